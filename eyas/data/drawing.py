"""The one look of every picture: matplotlib to SVG that takes its colours from the page.

A colour is the name of a CSS variable of the page, so that one picture serves light and dark:
`color("series-1")` is what matplotlib gets, `var(--series-1)` is what the SVG says. The variables
are in house.css, or in a page's own style.

    picture = svg(lambda axes: axes.bar([1, 2], [3, 4], color=color("series-1")), "rows by day")

Apart from page.py, because matplotlib takes longer to load than all that fills pages.
"""

from __future__ import annotations

import hashlib
import html
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eyas.page import stylesheet

# About a phone's width at one CSS pixel a point, so that text keeps its size there.
INCHES = (4.2, 2.6)
_VARIABLES: dict[str, str] = {}  # the colour that matplotlib writes -> the page's variable
_HINT = "hint: "
# What an SVG inside a page does not need: a namespace, a licence, and a style for the whole page.
_FOR_FILES = re.compile(
    r' xmlns(?::\w+)?="[^"]*"|<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>', re.S
)
_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


def color(variable: str) -> str:
    """A colour for matplotlib that becomes the page's CSS variable of this name (without `--`)."""
    placeholder = f"#{hashlib.sha256(variable.encode()).hexdigest()[:6]}"
    assert _VARIABLES.setdefault(placeholder, variable) == variable, f"{variable}: choose another"
    return placeholder


INK, LINE = color("muted"), color("line")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # real text: the page's font, small, and found by a search
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def hint(artist: Artist, text: str) -> None:
    """Show a text where the pointer rests on this part of the picture."""
    artist.set_gid(_HINT + text)


def svg(paint: Callable[[Axes], None], label: str, inches: tuple[float, float] = INCHES) -> Markup:
    """An SVG element for a page, as wide as its place there.

    label: what the picture shows, for those who do not see it; one a page, since the ids of the
    picture's parts come from it. The same picture gives the same text.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": label}):
        figure = Figure(figsize=inches, layout="constrained")
        paint(figure.subplots())
        written = io.StringIO()
        with warnings.catch_warnings():
            # The page's font draws the text: what matplotlib's own font lacks does not matter.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(
                written, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
            )
    text = written.getvalue()
    text = _FOR_FILES.sub("", text[text.index("<svg") :]).replace("xlink:href", "href")
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(f'<g id="{_HINT}(.*?)">', r"<g><title>\1</title>", text)
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, f"var(--{variable})")
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1))


def svg_file(
    paint: Callable[[Axes], None], label: str, inches: tuple[float, float] = INCHES
) -> str:
    """The same picture as a file of its own, for Markdown: it brings the stylesheet's colours."""
    colors = re.findall(r"^:root \{.*?^\}|^@media \(prefers.*?^\}", stylesheet(), re.DOTALL | re.M)
    style = f"<style>{''.join(colors)} svg {{ background: var(--paper); }}</style>"
    opening, rest = svg(paint, label, inches).split(">", 1)
    return f"{opening} {_NAMESPACE}>{style}{rest}"
