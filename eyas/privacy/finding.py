"""What is kept of a value that was found: its type, its place and a keyed hash. Knows no way of
finding one.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Where something was found: characters [start, end) of a turn as it was read, or of the system
    prompt (turn None).

    hash: equal for equal values under the same key and of use to nobody without the key; "" where
    nobody asked for it. The value itself is kept nowhere, in no form.
    """

    type: str
    start: int
    end: int
    turn: int | None = None
    hash: str = ""
