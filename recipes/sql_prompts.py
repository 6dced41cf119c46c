"""Write the prompts of `eyas demo`: requests for SQL, all made up.

Knows the templates beside it (sql_prompts.yaml). How they are filled is general_prompts', and what
cleaning is to find among them demo_prompts'.

    python recipes/sql_prompts.py eyas/builtin/sql_prompts.jsonl.gz

The rows are shuffled: any beginning of the file is a fair sample of it. Licence of templates and
output: CC0-1.0.
"""

from __future__ import annotations

import random
from pathlib import Path

import demo_prompts
import yaml
from general_prompts import conversations

TEMPLATES = Path(__file__).with_suffix(".yaml")
SEED, NUM_GOOD, NUM_DUPLICATES, NUM_EMPTY, NUM_BROKEN = 13, 340, 10, 4, 2


def sql_rows() -> list[str]:
    """The lines of the file: different conversations, some with personal data, and what cleaning is
    to find.
    """
    rng = random.Random(SEED)
    author = demo_prompts.Author(rng, yaml.safe_load(demo_prompts.TEMPLATES.read_text("utf-8")))
    good = [
        author.with_personal_data(turns, "command")
        if rng.random() < demo_prompts.SHARE_PLANTED
        else turns
        for _, turns in conversations(NUM_GOOD, rng, TEMPLATES)
    ]
    return demo_prompts.as_found(good, rng, NUM_DUPLICATES, NUM_EMPTY, NUM_BROKEN)


if __name__ == "__main__":
    demo_prompts.write_file(__doc__, sql_rows)
