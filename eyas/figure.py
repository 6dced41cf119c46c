"""Line charts with intervals as SVG. Colours are variables of house.css, for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 420, 260  # CSS pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 26, 40  # margins
WIDE = 20  # a ratio of the x values above which the axis is logarithmic
NUM_COLORS, MOST_TICKS = 4, 6


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points with a name. `number` chooses the colour."""

    name: str
    number: int
    points: Sequence[Point]


def line_chart(series: Sequence[Series], x_label: str, y_label: str, rule: float = 0) -> Markup:
    """A line for each series, or a bar where all points have one x, with intervals.

    rule: a y value that is always shown and, unless it is 0, marked by a line.
    """
    points = [point for one in series for point in one.points]
    assert points, "a chart needs a point"
    xs = sorted({point.x for point in points})
    ys = [end for point in points for end in (point.y, point.low, point.high) if end is not None]
    ticks = axis_ticks([*ys, rule])
    is_log = xs[0] > 0 and xs[-1] / xs[0] > WIDE

    def across(x: float) -> float:
        ends = [math.log(one) if is_log else one for one in (xs[0], x, xs[-1])]
        span = ends[2] - ends[0]
        share = (ends[1] - ends[0]) / span if span else 0.5
        return LEFT + 14 + share * (WIDTH - LEFT - RIGHT - 28)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - ticks[0]) / (ticks[-1] - ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in ticks:
        y = down(tick)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "line"))
        parts.append(_text(LEFT - 6, y + 4, f"{tick:g}", "end"))
    parts += [_text(across(x), HEIGHT - BOTTOM + 16, f"{x:g}", "middle") for x in xs]
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 6, x_label, "middle"))
    parts.append(_text(4, 13, y_label, "start"))
    if rule:
        parts.append(_line(LEFT, down(rule), WIDTH - RIGHT, down(rule), "ink", dashed=True))
    # intervals at one x stay apart
    is_bars = len(xs) == 1
    step = min(40, (WIDTH - LEFT - RIGHT) / len(series)) if is_bars else 5
    polyline = '<polyline points="{}" fill="none" stroke="var(--{})" stroke-width="{:.1f}"/>'
    circle = '<circle cx="{:.1f}" cy="{:.1f}" r="3.2" fill="var(--{})"><title>{}</title></circle>'
    for place, one in enumerate(series):
        color = f"series-{one.number % NUM_COLORS}"
        shift = step * (place - (len(series) - 1) / 2)
        line = [(across(p.x) + shift, down(p.y)) for p in one.points]
        if is_bars:
            line += [(x, float(HEIGHT - BOTTOM)) for x, _ in line[:1]]
        path, width = " ".join(f"{x:.1f},{y:.1f}" for x, y in line), 0.7 * step if is_bars else 1.8
        parts.append(Markup(polyline).format(path, color, width))
        for point, (x, y) in zip(one.points, line, strict=False):
            hint = f"{one.name}: {point.y:.3g}"
            if point.low is not None and point.high is not None:
                hint += f" ({point.low:.3g} to {point.high:.3g})"
                ink = "ink" if is_bars else color  # over its bar
                parts.append(_line(x, down(point.low), x, down(point.high), ink))
            parts.append(Markup(circle).format(x, y, color, hint))
    return Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>{}').format(
        f"{y_label} by {x_label}", WIDTH, HEIGHT, Markup("").join(parts), _key(series)
    )


def axis_ticks(values: Sequence[float]) -> list[float]:
    """At most MOST_TICKS round numbers that enclose all values."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / (MOST_TICKS - 1)))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * power
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        last = max(last, first + 1)
        if last - first < MOST_TICKS:
            return [round(step * number, 12) for number in range(first, last + 1)]
    raise AssertionError("one of the steps fits")


def _key(series: Sequence[Series]) -> Markup:
    if len(series) < 2:
        return Markup("")
    names = Markup("").join(
        Markup('<li><i style="color: var(--series-{})">●</i> {}</li>').format(
            one.number % NUM_COLORS, one.name
        )
        for one in series
    )
    return Markup('<ul class="key">{}</ul>').format(names)


def _line(x1: float, y1: float, x2: float, y2: float, color: str, dashed: bool = False) -> Markup:
    return Markup(
        '<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" stroke="var(--{})"{}/>'
    ).format(x1, y1, x2, y2, color, Markup(' stroke-dasharray="3 3"' if dashed else ""))


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup(
        '<text x="{:.1f}" y="{:.1f}" font-size="11" text-anchor="{}" fill="var(--muted)">{}</text>'
    ).format(x, y, anchor, text)
