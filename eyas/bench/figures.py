"""The report's pictures: lines over load or position, bars, histograms. Knows numbers and names,
no benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from eyas.figure import color, hint, svg

SERIES = tuple(color(f"series-{number}") for number in range(4))
INK, CARD = color("ink"), color("card")
CAP = 9  # points of an error bar's ends: more than a marker, so that the shortest bar is seen
APART = 0.012  # of the axis, between two series at one load, or their error bars hide each other
WIDE = 20  # a range of loads over which a linear axis would put the lowest into one place


@dataclass(frozen=True, slots=True)
class Point:
    """A value at x, with the interval it lies in where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points with a name; a series of the same `number` has the same colour in every picture."""

    name: str
    number: int
    points: Sequence[Point]
    is_expected: bool = False  # and not measured: drawn in dashes

    @property
    def color(self) -> str:
        return SERIES[self.number % len(SERIES)]


def against_load(series: Sequence[Series], label: str, x_label: str, even: bool = False) -> Markup:
    """A line per series over the load; bars where there is only one. even: of ratios, with a line
    at 1 for no difference.
    """
    if len({point.x for one in series for point in one.points}) == 1:
        return svg(lambda axes: _bars(axes, series, label), f"{label} by {x_label}")

    def paint(axes: Axes) -> None:
        if even:
            axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        _lines(axes, series, x_label, label, from_zero=not even)

    return svg(paint, f"{label} by {x_label}")


def arms(bars: Sequence[tuple[Series, str]], label: str) -> Markup:
    """A bar for each arm, under its name and what is said of it."""

    def paint(axes: Axes) -> None:
        for place, (one, said) in enumerate(bars):
            (point,) = one.points
            axes.barh(place, point.y, height=0.5, color=one.color)
            if point.low is not None and point.high is not None:
                ends = [point.low, point.high], [float(place)] * 2
                axes.plot(*ends, color=CARD, linewidth=5, solid_capstyle="round")
                _interval(axes, ends, "|", INK)
            axes.annotate(
                f"{one.name}: {said}",
                (0, place - 0.27),
                (0, 3),
                textcoords="offset points",
                color=INK,
            )
        axes.set_yticks([])
        axes.set_ylim(len(bars) - 0.6, -0.75)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(label)

    return svg(paint, label, (5.2, 0.5 + 0.7 * len(bars)))


def histogram(series: Sequence[Series], label: str) -> Markup:
    """The share of each count, bars of the series side by side."""

    def paint(axes: Axes) -> None:
        width = 0.8 / max(len(series), 1)
        for place, one in enumerate(series):
            total = sum(point.y for point in one.points)
            shift = (place - (len(series) - 1) / 2) * width
            x, shares = (
                [point.x + shift for point in one.points],
                [point.y / total for point in one.points],
            )
            axes.bar(x, shares, width * 0.92, color=one.color, label=one.name)
        axes.set_xlabel("accepted drafts in a round")
        _in_percent(axes)
        _legend(axes, series)

    return svg(paint, label)


def by_position(series: Sequence[Series], label: str) -> Markup:
    """A line per series of shares over positions 1, 2, ..."""

    def paint(axes: Axes) -> None:
        _lines(axes, series, "draft position", "")
        axes.set_ylim(0, 1)
        _in_percent(axes)

    return svg(paint, label)


def _lines(
    axes: Axes, series: Sequence[Series], x_label: str, y_label: str, from_zero: bool = True
) -> None:
    ticks = sorted({point.x for one in series for point in one.points})
    is_wide = ticks[0] > 0 and ticks[-1] / ticks[0] > WIDE
    if is_wide:
        axes.set_xscale("log", base=2)
    span = ticks[-1] / ticks[0] if is_wide else ticks[-1] - ticks[0]
    for place, one in enumerate(series):
        shift = APART * (place - (len(series) - 1) / 2)
        x = [point.x * span**shift if is_wide else point.x + shift * span for point in one.points]
        style: dict[str, Any] = (
            {"linestyle": (0, (4, 2)), "markerfacecolor": "none"} if one.is_expected else {}
        )
        y = [point.y for point in one.points]
        axes.plot(
            x, y, color=one.color, marker="o", markersize=4, linewidth=1.6, label=one.name, **style
        )
        for at, point in zip(x, one.points, strict=True):
            if point.low is not None and point.high is not None:
                _interval(axes, ([at, at], [point.low, point.high]), "_", one.color)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.margins(y=0.08)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(axes, series)


def _bars(axes: Axes, series: Sequence[Series], label: str) -> None:
    for place, one in enumerate(series):
        (point,) = one.points
        axes.barh(place, point.y, height=0.55, color=one.color)
        told = f"{point.y:.3g}"
        if point.low is not None and point.high is not None:
            ends = [point.low, point.high], [float(place)] * 2
            axes.plot(*ends, color=CARD, linewidth=5, solid_capstyle="round")  # apart from the bar
            _interval(axes, ends, "|", INK)
            told += f"\n{point.low:.3g} to {point.high:.3g}"
        axes.annotate(
            told,
            (max(point.y, point.high or 0), place),
            (7, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    axes.set_yticks(range(len(series)), [one.name for one in series])
    axes.set_ylim(len(series) - 0.5, -0.5)
    axes.margins(x=0.35)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)


def _interval(axes: Axes, ends: tuple[list[float], list[float]], cap: str, ink: str) -> None:
    """An error bar with caps between two points (x, y); it tells its ends under the pointer."""
    style: dict[str, Any] = {
        "linewidth": 1.6,
        "markersize": CAP,
        "markeredgewidth": 1.6,
        "zorder": 3,
    }
    (bar,) = axes.plot(*ends, color=ink, marker=cap, **style)
    along = ends[1] if cap == "_" else ends[0]
    hint(bar, f"{along[0]:.3g} to {along[1]:.3g}")


def _in_percent(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="x", visible=False)


def _legend(axes: Axes, series: Sequence[Series]) -> None:
    if len(series) > 1:
        axes.legend(loc="best", fontsize=9.5, handlelength=1.6, labelspacing=0.3, borderaxespad=0.2)
