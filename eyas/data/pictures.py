"""The pictures of the data card, painted with matplotlib in the colours of the page.

Knows names and numbers, and nothing of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.ticker import PercentFormatter

from eyas.data.drawing import INCHES, INK, LINE, color, hint, svg

WIDE = 4.2  # inches, as all pictures
ROW = 0.48  # inches of a bar with a line of text above it
# The flow, in units of the height that all rows have together.
GAP = 0.075  # between two ends, the height of a line of text
END = 0.03  # width of the bars at both ends, in units of the picture's width
FLOW_INCHES = 2.4


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of something: its name, its count, and the CSS variable of its colour."""

    name: str
    count: float
    color: str


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Counts by class, drawn as shares of their sum. dashed: for what others are compared with."""

    name: str
    counts: Sequence[float]
    color: str
    dashed: bool = False

    @property
    def shares(self) -> list[float]:
        total = sum(self.counts) or 1
        return [count / total for count in self.counts]


def picture(paint: Callable[..., None], label: str, *contents: Any) -> Markup:
    """What one of the `paint_*` functions draws of these contents, as SVG, as high as they need."""
    rows = contents[0]
    if paint in (paint_histogram, paint_lines):
        size = INCHES
    elif paint is paint_flow:
        size = WIDE, FLOW_INCHES * _flow_height(rows, _summed(rows.values()))
    else:
        size = WIDE, ROW * max(len(rows), 1)
    return svg(lambda axes: paint(axes, *contents), label, size)


# From sources to fates.


def paint_flow(axes: Axes, sources: Mapping[str, Sequence[Segment]]) -> None:
    """Ribbons from each source on the left to its segments, by name, on the right. They are as
    thick as their share of all rows; all of them together have height 1.
    """
    fates = _summed(sources.values())
    total = sum(one.count for one in fates) or 1
    sizes = {name: sum(one.count for one in segments) for name, segments in sources.items()}
    height = _flow_height(sources, fates)
    left = _stacked({name: size / total for name, size in sizes.items()}, height)
    right = _stacked({one.name: one.count / total for one in fates}, height)
    _fill_figure(axes)
    axes.set_ylim(height, 0)
    starts, ends = dict(left), dict(right)  # of the next ribbon
    for name, segments in sources.items():
        for one in segments:
            if one.count:
                thick = one.count / total
                ribbon = _ribbon(starts[name], ends[one.name], thick)
                patch = PathPatch(ribbon, facecolor=color(one.color), alpha=0.38, linewidth=0)
                _hint(patch, f"{name}, {one.name}: {one.count:,.0f}")
                axes.add_patch(patch).set_clip_on(False)
                starts[name] += thick
                ends[one.name] += thick
    for name, y in left.items():
        thick = sizes[name] / total
        _rectangle(axes, (0, y), END, thick, INK)
        _label(axes, END + 0.015, y + thick / 2, f"{_short(name)} {sizes[name]:,.0f}", "left")
    for one in fates:
        thick, y = one.count / total, right[one.name]
        _rectangle(axes, (1 - END, y), END, thick, color(one.color))
        _label(
            axes, 1 - END - 0.015, y + thick / 2, f"{_short(one.name)} {one.count:,.0f}", "right"
        )


def _flow_height(sources: Sized, fates: Sized) -> float:
    return 1 + GAP * max(len(sources), len(fates), 1)


def _summed(sources: Iterable[Sequence[Segment]]) -> list[Segment]:
    """The segments of all sources, equal names added up, in the order of their first place."""
    summed: dict[str, Segment] = {}
    for one in (segment for segments in sources for segment in segments):
        before = summed[one.name].count if one.name in summed else 0
        summed[one.name] = Segment(one.name, before + one.count, one.color)
    return list(summed.values())


def _stacked(heights: Mapping[str, float], height: float) -> dict[str, float]:
    """Where each begins, one below the other with equal gaps."""
    gap = (height - sum(heights.values())) / max(len(heights), 1)
    y, begins = gap / 2, {}
    for name, own in heights.items():
        begins[name] = y
        y += own + gap
    return begins


def _ribbon(start: float, end: float, thick: float) -> Path:
    left, middle, right = END, 0.5, 1 - END
    points = [(left, start), (middle, start), (middle, end), (right, end), (right, end + thick)]
    points += [(middle, end + thick), (middle, start + thick), (left, start + thick), (left, start)]
    curve = [Path.CURVE4] * 3
    return Path(points, [Path.MOVETO, *curve, Path.LINETO, *curve, Path.CLOSEPOLY])


# Bars.


def paint_shares(
    axes: Axes,
    rows: Mapping[str, Sequence[Segment]],
    notes: Mapping[str, str],
    longest: float | None = None,
) -> None:
    """A bar per row cut into its segments; above it the name and, on the right, a note.

    All bars have one length; with `longest`, which is the width of the picture, the length of their
    sum. The bar of row i lies at y = i, the picture is 1 wide.
    """
    _rows(axes, len(rows))
    for y, (name, segments) in enumerate(rows.items()):
        total = longest or sum(one.count for one in segments) or 1
        _above(axes, y, _short(name, 34), notes.get(name, ""))
        x = 0.0
        for one in segments:
            bar = _rectangle(axes, (x, y - 0.14), one.count / total, 0.28, color(one.color))
            _hint(bar, f"{one.name}: {one.count:,.0f}")
            x += one.count / total


def paint_bars(axes: Axes, segments: Sequence[Segment]) -> None:
    """A bar per segment, relative to the largest, with its count and its share of all."""
    most = max((one.count for one in segments), default=1) or 1
    total = sum(one.count for one in segments) or 1
    _rows(axes, len(segments))
    for y, one in enumerate(segments):
        note = f"{one.count:,.0f} ({100 * one.count / total:.1f} %)"
        _above(axes, y, _short(one.name, 30), note)
        _rectangle(axes, (0, y - 0.14), one.count / most, 0.28, color(one.color))


def paint_distances(axes: Axes, rows: Mapping[str, tuple[float, float, float]]) -> None:
    """For each row the distance before and after, and the floor below which no difference can be
    seen.
    """
    _rows(axes, len(rows))
    axes.set_xlim(-0.03, 1.03)
    for y, (name, values) in enumerate(rows.items()):
        before, after, floor = values
        scale = 1 / (max(values) or 1)
        _above(axes, y, name, f"{before:.3f} → {after:.3f}, floor {floor:.3f}")
        _line(axes, (0, 1), (y, y), LINE, 1)
        _line(axes, (before * scale, after * scale), (y, y), color("fit-after"), 3)
        _line(axes, (floor * scale,) * 2, (y - 0.2, y + 0.2), color("ink"), 2)
        for value, variable in ((before, "fit-before"), (after, "fit-after")):
            # A dot: almost no line, with round ends.
            _line(axes, (value * scale,) * 2, (y, y + 0.001), color(variable), 9)


# Over classes.


def paint_histogram(axes: Axes, classes: Sequence[str], series: Sequence[ClassCounts]) -> None:
    """Shares by class, the bars of the series side by side; class i begins at x = i."""
    width = 0.8 / max(len(series), 1)
    for place, one in enumerate(series):
        left = [number + 0.1 + width * place for number in range(len(classes))]
        drawn = axes.bar(
            left, one.shares, width * 0.92, align="edge", color=color(one.color), clip_on=False
        )
        for bar, name, count, share in zip(drawn, classes, one.counts, one.shares, strict=True):
            _hint(bar, f"{one.name}, from {name}: {count:,.0f} ({100 * share:.1f} %)")
    _percent_by_class(axes, classes, series)


def paint_lines(axes: Axes, classes: Sequence[str], series: Sequence[ClassCounts]) -> None:
    """Shares by class, a line per series."""
    middle = [number + 0.5 for number in range(len(classes))]
    for one in series:
        style = (0, (5, 4)) if one.dashed else "-"
        (line,) = axes.plot(
            middle,
            one.shares,
            color=color(one.color),
            linewidth=2.2,
            linestyle=style,
            clip_on=False,
        )
        _hint(line, one.name)
    _percent_by_class(axes, classes, series)


def _percent_by_class(axes: Axes, classes: Sequence[str], series: Sequence[ClassCounts]) -> None:
    most = max((share for one in series for share in one.shares), default=0)
    axes.set_ylim(0, max(math.ceil(most * 10) / 10, 0.1))
    axes.set_xlim(0, max(len(classes), 1))
    axes.set_xticks(range(len(classes)), classes)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(False, axis="x")
    for line in axes.get_ygridlines():
        line.set_clip_on(False)


# Shapes.


def _fill_figure(axes: Axes) -> None:
    """Use the whole figure, 1 wide, without axes: nothing to lay out, which takes half the time."""
    axes.set_axis_off()
    figure = axes.get_figure(root=True)
    assert figure is not None, "axes of a figure"
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    axes.set_xlim(0, 1)


def _rows(axes: Axes, num_rows: int) -> None:
    _fill_figure(axes)
    axes.set_ylim(max(num_rows, 1) - 0.5 + 0.1, -0.7)


def _above(axes: Axes, y: float, name: str, note: str) -> None:
    """The line of text above the bar of a row."""
    _text(axes, 0, y - 0.28, name, color=color("ink"), va="bottom")
    _text(axes, 1, y - 0.28, note, ha="right", va="bottom")


def _rectangle(
    axes: Axes, place: tuple[float, float], width: float, height: float, colour: str
) -> Rectangle:
    drawn = Rectangle(place, width, height, facecolor=colour, linewidth=0, clip_on=False)
    axes.add_patch(drawn)
    return drawn


def _hint(artist: Artist, text: str) -> None:
    hint(artist, " ".join(text.split()))


def _line(
    axes: Axes, x: tuple[float, ...], y: tuple[float, ...], colour: str, width: float
) -> None:
    axes.plot(x, y, color=colour, linewidth=width, solid_capstyle="round", clip_on=False)


def _label(axes: Axes, x: float, y: float, text: str, side: str) -> None:
    """A text on the flow, readable above the ribbons."""
    written = _text(axes, x, y, text, color=color("ink"), ha=side, va="center")
    box = {"facecolor": color("card"), "alpha": 0.6, "linewidth": 0, "boxstyle": "square,pad=.1"}
    written.set_bbox(box)


def _text(axes: Axes, x: float, y: float, text: str, **style: object) -> Text:
    # Names come from run files and data: `$` in them is no formula.
    return axes.text(x, y, text, parse_math=False, **style)  # type: ignore[arg-type]


def _short(name: str, limit: int = 24) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"
