"""Write the model card of a target made by recipes/target.py: data, training, quality, samples.

    python recipes/target_card.py --target FOLDER --data a.jsonl.gz b.jsonl.gz --held-out
    dev.jsonl.gz

Samples are the answers to the first user turns of ten held-out dialogues, greedy, chosen by a seed
and not edited.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import fsspec

from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.records import Message

ATTRIBUTION = {
    "schema-guided-dialogue": "Schema-Guided Dialogue (Rastogi et al., Google)",
    "star": "STAR (Mosig et al., Rasa)",
    "gsm8k": "GSM8K (Cobbe et al., OpenAI)",
    "tldr-pages": "tldr-pages and its contributors",
    "taskmaster-4": "Taskmaster-4 (Google)",
}
MAX_TOKENS = 128


def rows(path: Path) -> list[dict[str, Any]]:
    with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as lines:
        return [json.loads(line) for line in lines]


def data_table(paths: list[Path]) -> tuple[str, list[str]]:
    """A Markdown table of the training sets, and their licences."""
    table = ["| set | conversations | characters | licence | by |", "|---|---|---|---|---|"]
    licences = []
    for path in paths:
        by_source: dict[tuple[str, str], list[int]] = defaultdict(list)
        for row in rows(path):
            by_source[row["source"], row["licence"]].append(
                sum(len(message["content"]) for message in row["messages"])
            )
        for (source, licence), sizes in by_source.items():
            table.append(
                f"| {source} | {len(sizes):,} | {sum(sizes):,} | {licence} | "
                f"{ATTRIBUTION.get(source, source)} |"
            )
            licences.append(licence)
    return "\n".join(table), sorted(set(licences))


def answers(
    folder: Path, held_out: list[dict[str, Any]]
) -> tuple[list[tuple[list[Message], str]], float]:
    """Ten sample dialogues with their answers, and the share of 200 greedy answers that end by
    themselves.
    """
    chat, engine = Chat(folder), Engine.load(folder, config=EngineConfig(max_batch=16))
    rng = random.Random(0)
    asked: dict[str, list[Message]] = {}
    for index, row in enumerate(rng.sample(held_out, 210)):
        turns = [
            place for place, message in enumerate(row["messages"]) if message["role"] == "user"
        ]
        # The samples show a dialogue's beginning; the share is over prompts cut anywhere.
        asked[str(index)] = row["messages"][
            : (turns[min(index % 3, len(turns) - 1)] if index < 10 else rng.choice(turns)) + 1
        ]
    params = SamplingParams(max_tokens=MAX_TOKENS)
    requests = [
        Request(id, tuple(chat.prompt_ids(messages)), params) for id, messages in asked.items()
    ]
    results = {
        result.request_id: result
        for result in engine.run(request for request in requests if len(request.prompt_ids) < 890)
    }
    samples = [
        (asked[str(index)], chat.decode(results[str(index)].token_ids)) for index in range(10)
    ]
    ends = [result.finish_reason == "stop" for id, result in results.items() if int(id) >= 10]
    return samples, sum(ends) / len(ends)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    args = parser.parse_args()
    training = json.loads((args.target / "training.json").read_text())
    table, licences = data_table(args.data)
    samples, stopped = answers(args.target, rows(args.held_out))
    last = training["curve"][-1]
    dialogues = []
    for number, (messages, answer) in enumerate(samples, start=1):
        lines = [f"**{message['role']}**: {message['content']}" for message in messages]
        dialogues.append(
            f"### {number}\n\n" + "\n\n".join([*lines, f"**assistant (this model)**: {answer}"])
        )
    (args.target / "README.md").write_text(
        CARD.format(
            licences="\n".join(f"- {licence.lower()}" for licence in licences),
            table=table,
            command=training["training_command"],
            tokens=f"{last['tokens'] / 1e6:.1f}",
            loss=f"{last['loss']:.3f}",
            perplexity=f"{training['held_out_perplexity']:.2f}",
            stopped=f"{stopped:.1%}",
            max_tokens=MAX_TOKENS,
            dialogues="\n\n".join(dialogues),
        )
    )


CARD = """---
library_name: transformers
pipeline_tag: text-generation
language: en
license:
{licences}
---

# The built-in target of eyas

A small chat model of the Llama architecture (17.4 M parameters, 12 layers of 320, byte-level BPE of
8,000 tokens, context 1,024), made so that everything in eyas can run anywhere on something real. It
knows task dialogues (restaurants, hotels, flights, banks, ...), short arithmetic and command lines,
and is fluent there. It knows no facts: names, addresses, prices and sums are made up. It is no
assistant for anyone.

## Data

{table}

Held out and never trained on: the dev part of Schema-Guided Dialogue. The Schema-Guided Dialogue
set is CC BY-SA 4.0, and this model is shared under the same licence, with attribution to all sets
above. Worker ids and annotations are not part of the data.

## Training

```
{command}
```

Muon on the matrices, AdamW on embeddings and norms, bf16 autocast, {tokens} M tokens, final
training loss {loss} on all tokens, on a 2-core machine without a GPU. Held-out perplexity on
assistant tokens: **{perplexity}** (bf16 weights). Of 200 greedy answers to held-out prompts,
**{stopped}** end by themselves within {max_tokens} tokens.

## Ten dialogues, not edited

Beginnings of held-out dialogues; the last answer is this model's, greedy.

{dialogues}
"""

if __name__ == "__main__":
    main()
