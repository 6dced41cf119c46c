"""Write general prompts: to explain, advise, write, translate, summarise, reckon and program, all
made up.

The demo adapts a head to a domain; on these prompts it shows that the head lost nothing elsewhere.
Knows the templates beside it (general_prompts.yaml); how they are filled is demo_prompts'.

    python recipes/general_prompts.py eyas/builtin/general_prompts.jsonl.gz

The rows are shuffled: any beginning of the file is a fair sample of it. Licence of templates and
output: CC0-1.0.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml
from demo_prompts import Writer, lines, listed, write_file

TEMPLATES = Path(__file__).with_suffix(".yaml")
SEED, NUM_PROMPTS, SHARE_FOLLOWED = 11, 300, 0.15


def conversations(num: int, rng: random.Random, templates: Path) -> list[tuple[str, list[str]]]:
    """`num` different conversations of one or two user turns from a file of templates, as many of
    each kind: the kind and the turns of each.
    """
    content = yaml.safe_load(templates.read_text(encoding="utf-8"))
    slots = {name: listed(text) for name, text in content["slots"].items()}
    kinds = {name: lines(text) for name, text in content["kinds"].items()}
    written: dict[str, tuple[str, list[str]]] = {}
    while len(written) < num:
        kind = list(kinds)[len(written) % len(kinds)]
        writer = Writer(rng, slots)
        turns = [writer.write(rng.choice(kinds[kind]))]
        if rng.random() < SHARE_FOLLOWED:
            turns.append(writer.write(rng.choice(content["follow"])))
        written.setdefault(turns[0].lower(), (kind, turns))
    return list(written.values())


def general_rows(num_prompts: int = NUM_PROMPTS, seed: int = SEED) -> list[str]:
    """The lines of the file, shuffled."""
    rng = random.Random(seed)
    rows = [
        {"id": f"general-{number:03d}", "category": kind, "turns": turns}
        for number, (kind, turns) in enumerate(conversations(num_prompts, rng, TEMPLATES))
    ]
    rng.shuffle(rows)
    return [json.dumps(row, ensure_ascii=False) for row in rows]


if __name__ == "__main__":
    write_file(__doc__, general_rows)
