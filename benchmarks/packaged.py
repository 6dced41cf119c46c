"""What users say in the packaged prompts, for benchmarks that make prompts of their own from it.
Knows no torch.
"""

from __future__ import annotations

import gzip
import json

from eyas.builtin import demo_prompts


def user_turns() -> list[str]:
    """Each once, sorted; rows that are damaged on purpose are passed over."""
    with gzip.open(demo_prompts(), "rb") as lines:
        values = (
            json.loads(line)
            for line in lines
            if line.startswith(b"{") and line.rstrip().endswith(b"}")
        )
        turns = [
            turn
            for value in values
            for turn in value.get("messages") or value.get("conversations") or ()
        ]
    mine = (turn for turn in turns if turn.get("role", turn.get("from")) in ("user", "human"))
    said = {turn.get("content") or turn.get("value") for turn in mine}
    return sorted(text for text in said if isinstance(text, str) and text.strip())
