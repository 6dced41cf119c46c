"""A conversation's tokens in colours, for a terminal and as a page of HTML. Knows kinds of tokens
by name, not what they mean.

What people wrote is shown as characters and nothing else: control characters and those that turn
the direction of text appear by their code, so that no conversation can move the cursor or hide a
token.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape
from rich.text import Text

from eyas.chat.turn import Encoded
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
_LINE_BREAK = Markup("<i></i>\n")  # shown as a sign, which a selection does not copy
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@dataclass(frozen=True)
class Sample:
    """A conversation on a page: its tokens, and for each way of looking at it the kind of every
    token.
    """

    title: str
    encoded: Encoded
    kinds: Mapping[str, Sequence[str]]
    facts: Mapping[str, str] | None = None


def pieces(encoded: Encoded) -> list[str]:
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
    """A text with every character that would not be seen shown by its code; line breaks and tabs
    stay.
    """
    return "".join(
        f"⟨U+{ord(one):04X}⟩" if one not in "\n\t" and unicodedata.category(one) in _HIDDEN else one
        for one in text
    )


def painted(
    encoded: Encoded, kinds: Sequence[str], meaning: Mapping[str, str], whole: bool = False
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
    """Tokens of one kind; line breaks among them that are not context are marked, since one would
    not see their colour.
    """
    for text in texts:
        told = visible(text)
        picture.append(told if kind == CONTEXT else told.replace("\n", "⏎\n"), style=STYLES[kind])


def page(
    title: str,
    lead: str,
    samples: Sequence[Sample],
    views: Mapping[str, Mapping[str, str]],
    facts: Mapping[str, str],
    note: str = "",
) -> str:
    """One page of HTML that needs nothing beside it. views: for each way of looking, what its kinds
    of tokens mean.
    """
    drawn = [
        {
            "title": sample.title,
            "facts": sample.facts or {},
            "tokens": [
                {
                    "text": escape(visible(text)).replace("\n", _LINE_BREAK),
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
