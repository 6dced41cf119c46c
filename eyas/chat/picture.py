"""A conversation's tokens in colours, for a terminal and as a page of HTML; and the error of two
masks for one answer, with its picture.

Texts of messages are shown as characters only: control characters and those that turn the direction
of text appear by their code, so that no conversation can move the cursor or hide a token.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from eyas.chat.turn import TokenizedText
from eyas.errors import InputError
from eyas.page import fill

TEMPLATE = Path(__file__).with_name("audit.html")
STYLES = {
    "drafted": "black on green3",
    "both": "black on green3",
    "missed": "black on dark_orange",
    "first": "black on dark_orange",
    "beyond": "white on red3",
    "second": "white on red3",
    "given": "underline cyan",
    "context": "dim",
}
CONTEXT = "context"
KEPT = 30  # tokens of a long context that stay at either end
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@dataclass(frozen=True)
class PageSample:
    """A conversation on a page: its tokens, and for each view the kind of every token."""

    title: str
    encoded: TokenizedText
    kinds: Mapping[str, Sequence[str]]
    facts: Mapping[str, str] | None = None


def pieces(encoded: TokenizedText) -> list[str]:
    """The text of each token [T]: together the whole text. Of tokens that share a character, the
    first has it.
    """
    made, at = [], 0
    for _, stop in encoded.offsets:
        made.append(encoded.text[at : max(at, stop)])
        at = max(at, stop)
    if made:
        made[-1] += encoded.text[at:]
    return made


def visible(text: str) -> str:
    """A text with every invisible character replaced by its code; line breaks and tabs stay."""
    return "".join(
        f"⟨U+{ord(one):04X}⟩" if one not in "\n\t" and unicodedata.category(one) in _HIDDEN else one
        for one in text
    )


def paint(
    encoded: TokenizedText, kinds: Sequence[str], meaning: Mapping[str, str], whole: bool = False
) -> Text:
    """The tokens coloured by kind, and what the colours mean. Long stretches of context are cut
    unless `whole`.
    """
    picture = Text()
    shown = list(zip(pieces(encoded), kinds, strict=True))
    for kind, run in itertools.groupby(shown, key=lambda pair: pair[1]):
        texts = [text for text, _ in run]
        cut = len(texts) - 2 * KEPT if kind == CONTEXT and not whole else 0
        if cut > 0:
            _add(picture, texts[:KEPT], kind)
            picture.append(f" ⟨{cut} tokens⟩ ", style="dim italic")
            texts = texts[-KEPT:]
        _add(picture, texts, kind)
    picture.append("\n")
    for kind, count in counts(kinds).items():
        picture.append(f"\n {kind} ", style=STYLES[kind])
        picture.append(f" {count:,}: {meaning[kind]}", style="default")
    return picture


def counts(kinds: Sequence[str]) -> dict[str, int]:
    """How many tokens there are of each kind that occurs, in the kinds' order."""
    return {kind: count for kind in STYLES if (count := sum(one == kind for one in kinds))}


def _add(picture: Text, texts: list[str], kind: str) -> None:
    """Append tokens of one kind. Line breaks outside of context are marked: their colour does not
    show.
    """
    for text in map(visible, texts):
        picture.append(text if kind == CONTEXT else text.replace("\n", "⏎\n"), style=STYLES[kind])


def page(
    title: str,
    lead: str,
    samples: Sequence[PageSample],
    views: Mapping[str, Mapping[str, str]],
    facts: Mapping[str, str],
    note: str = "",
) -> str:
    """One page of HTML that needs nothing beside it. views: for each, what its kinds of tokens
    mean.
    """
    drawn = [
        {
            "title": sample.title,
            "facts": sample.facts or {},
            "tokens": [
                {
                    "lines": visible(text).split("\n"),
                    "id": number,
                    "at": at,
                    "kinds": " ".join(
                        f"v{view}-{sample.kinds[name][at]}" for view, name in enumerate(views)
                    ),
                }
                for at, (text, number) in enumerate(
                    zip(pieces(sample.encoded), sample.encoded.ids, strict=True)
                )
            ],
            "counts": [counts(sample.kinds[name]) for name in views],
        }
        for sample in samples
    ]
    return fill(
        TEMPLATE,
        title=title,
        lead=lead,
        facts=facts,
        samples=drawn,
        views=list(views.items()),
        note=note,
    )


# Two masks for one answer

PICTURE_FILE = "mask-disagreement.html"
_BOTH = {
    (True, True): "both",
    (True, False): "first",
    (False, True): "second",
    (False, False): "context",
}
DISAGREEMENT_KINDS = {
    "both": "the target's by both ways",
    "first": "by character spans only",
    "second": "by prefixes only",
    "context": "by neither",
}


class MaskDisagreement(InputError):
    """Character spans and prefixes give two masks for one answer: a fault of the template, the
    tokenizer or of eyas.

    The message names the template, and tokens by number, never their text. The picture shows the
    text: `show` writes it where its owner alone can read it.
    """

    def __init__(
        self, folder: str, encoded: TokenizedText, first: list[bool], second: list[bool]
    ) -> None:
        differ = [
            at for at, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]
        ]
        super().__init__(
            f"two ways to the loss mask differ with the chat template of {folder}: {len(differ)} "
            f"of {len(first)} tokens, "
            f"the first at {differ[0]}",
            f"see the picture (`eyas audit` makes it too, {PICTURE_FILE}) and mend the template; "
            "nothing was trained on this row",
        )
        self.folder, self.encoded, self.first, self.second = folder, encoded, first, second

    @property
    def kinds(self) -> list[str]:
        """For each token [T]: which of the two ways masks it."""
        return [_BOTH[pair] for pair in zip(self.first, self.second, strict=True)]

    def picture(self) -> Text:
        """The conversation for a terminal, its tokens coloured by which way masks them."""
        return paint(self.encoded, self.kinds, DISAGREEMENT_KINDS)

    def html(self) -> str:
        """The same as a page that needs nothing beside it."""
        sample = PageSample("The answer", self.encoded, {"masks": self.kinds})
        lead = "Two ways to the loss mask differ on this answer. No head was trained on it."
        return page(
            "eyas: masks that differ",
            lead,
            [sample],
            {"masks": DISAGREEMENT_KINDS},
            facts={"target": self.folder},
        )

    def show(self) -> None:
        """Print the picture to stderr and write it as HTML, readable by its owner only, in the
        working directory or, where that fails, in the system's temporary folder.
        """
        console = Console(stderr=True, highlight=False)
        console.print(self.picture())
        try:
            handle, path = (
                os.open(PICTURE_FILE, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600),
                PICTURE_FILE,
            )
        except OSError:
            handle, path = tempfile.mkstemp(suffix=f"-{PICTURE_FILE}")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(self.html())
        console.print(f"the same as a page: {path}", markup=False, soft_wrap=True)
