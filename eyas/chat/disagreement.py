"""The error of two masks for one answer, and its picture: what stops a run before a wrong mask
trains anything.
"""

from __future__ import annotations

import os
import tempfile

from rich.console import Console
from rich.text import Text

from eyas.chat.picture import Sample, page, painted
from eyas.chat.turn import Encoded
from eyas.errors import InputError

PICTURE = "mask-disagreement.html"
_BOTH = {
    (True, True): "both",
    (True, False): "first",
    (False, True): "second",
    (False, False): "context",
}
MEANING = {
    "both": "the target's by both ways",
    "first": "by character spans only",
    "second": "by prefixes only",
    "context": "by neither",
}


class MaskDisagreement(InputError):
    """Character spans and prefixes give two masks for one answer: a fault of the template, the
    tokenizer or of eyas.

    The message names the template and tokens by number, never what was said; the picture, which
    `show` writes for whoever may read the conversation, shows it.
    """

    def __init__(
        self, folder: str, encoded: Encoded, first: list[bool], second: list[bool]
    ) -> None:
        differ = [
            at for at, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]
        ]
        super().__init__(
            f"two ways to the loss mask differ with the chat template of {folder}: {len(differ)} "
            f"of {len(first)} tokens, "
            f"the first at {differ[0]}",
            f"see the picture (`eyas audit` makes it too, {PICTURE}) and mend the template; "
            "nothing was trained on this row",
        )
        self.folder, self.encoded, self.first, self.second = folder, encoded, first, second

    @property
    def kinds(self) -> list[str]:
        """For each token [T]: which of the two ways says that the target wrote it."""
        return [_BOTH[pair] for pair in zip(self.first, self.second, strict=True)]

    def picture(self) -> Text:
        """The conversation for a terminal, its tokens coloured by which way says that the target
        wrote them.
        """
        return painted(self.encoded, self.kinds, MEANING)

    def html(self) -> str:
        """The same as a page that needs nothing beside it."""
        sample = Sample("The answer", self.encoded, {"masks": self.kinds})
        lead = "Two ways to the loss mask differ on this answer. No head was trained on it."
        return page(
            "eyas: masks that differ",
            lead,
            [sample],
            {"masks": MEANING},
            facts={"target": self.folder},
        )

    def show(self) -> None:
        """Print the picture to stderr and write it as HTML, readable by its owner only, beside the
        user or, where that cannot be, in the system's temporary folder."""
        console = Console(stderr=True, highlight=False)
        console.print(self.picture())
        try:
            handle, path = os.open(PICTURE, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), PICTURE
        except OSError:
            handle, path = tempfile.mkstemp(suffix=f"-{PICTURE}")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(self.html())
        console.print(f"the same as a page: {path}", markup=False, soft_wrap=True)
