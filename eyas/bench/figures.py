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

from eyas.figure import INK, color, svg

SERIES = tuple(color(f"series-{number}") for number in range(4))
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
        _lines(axes, series, x_label, label)

    return svg(paint, f"{label} by {x_label}")


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


def _lines(axes: Axes, series: Sequence[Series], x_label: str, y_label: str) -> None:
    ticks = sorted({point.x for one in series for point in one.points})
    is_wide = ticks[0] > 0 and ticks[-1] / ticks[0] > WIDE
    if is_wide:
        axes.set_xscale("log", base=2)
    for one in series:
        x, y = [point.x for point in one.points], [point.y for point in one.points]
        known = [point for point in one.points if point.low is not None and point.high is not None]
        style: dict[str, Any] = (
            {"linestyle": (0, (4, 2)), "markerfacecolor": "none"} if one.is_expected else {}
        )
        axes.plot(
            x, y, color=one.color, marker="o", markersize=4.5, linewidth=2, label=one.name, **style
        )
        if known:
            lows, highs = (
                [point.low or 0.0 for point in known],
                [point.high or 0.0 for point in known],
            )
            axes.fill_between(
                [point.x for point in known], lows, highs, color=one.color, alpha=0.18, linewidth=0
            )
            axes.vlines([point.x for point in known], lows, highs, color=one.color, linewidth=1.2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.margins(y=0.08)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(axes, series)


def _bars(axes: Axes, series: Sequence[Series], label: str) -> None:
    for place, one in enumerate(series):
        (point,) = one.points
        axes.barh(place, point.y, height=0.55, color=one.color)
        if point.low is not None and point.high is not None:
            axes.hlines(place, point.low, point.high, color=INK, linewidth=1.5)
        end = max(point.y, point.high or 0)
        axes.annotate(
            f"{point.y:.3g}",
            (end, place),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=11,
        )
    axes.set_yticks(range(len(series)), [one.name for one in series])
    axes.set_ylim(len(series) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(label)


def _in_percent(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(axis="x", visible=False)


def _legend(axes: Axes, series: Sequence[Series]) -> None:
    if len(series) > 1:
        axes.legend(loc="best", fontsize=9.5, handlelength=1.6, labelspacing=0.3, borderaxespad=0.2)
