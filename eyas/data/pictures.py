"""The data card's pictures: SVG that takes its colours from the page, so that light and dark are
one file.

Knows names and numbers, and nothing of rows. Drawn as wide as a phone at one CSS pixel a unit, so
that text keeps its size there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 400.0
BAR = 9.0  # thickness of the flow's two ends
GAP = 15.0  # between two ends of it: a line of text
FLOW = 220.0  # height that all rows have together
LINE, STEP = 18.0, 38.0  # height of a line of text; of a bar with a line above it
CHART = 170.0  # height of a chart's area


@dataclass(frozen=True, slots=True)
class Part:
    """A share of something: what it is called, how much it is, and the page's colour for it (a CSS
    variable's name).
    """

    name: str
    count: float
    color: str


def flow(sources: Mapping[str, Sequence[Part]], label: str) -> Markup:
    """Ribbons from each source at the left to its parts at the right, as thick as they are many.
    Parts are told by name.
    """
    fates = _summed(sources.values())
    total = sum(part.count for part in fates) or 1
    sizes = {name: sum(part.count for part in parts) for name, parts in sources.items()}
    height = FLOW + GAP * max(len(sources), len(fates))
    left = _stacked({name: FLOW * size / total for name, size in sizes.items()}, height)
    right = _stacked({part.name: FLOW * part.count / total for part in fates}, height)
    drawn = list(_ribbons(sources, dict(left), dict(right), total))
    for name, y in left.items():
        drawn.append(_rect(0, y, BAR, max(FLOW * sizes[name] / total, 1), "muted"))
    for part in fates:
        drawn.append(
            _rect(WIDTH - BAR, right[part.name], BAR, max(FLOW * part.count / total, 1), part.color)
        )
    for name, y in left.items():
        middle = y + FLOW * sizes[name] / total / 2
        drawn.append(
            _text(BAR + 5, middle + 4, f"{_short(name)} {_number(sizes[name])}", halo=True)
        )
    for part in fates:
        middle = right[part.name] + FLOW * part.count / total / 2
        drawn.append(
            _text(
                WIDTH - BAR - 5,
                middle + 4,
                f"{_short(part.name)} {_number(part.count)}",
                anchor="end",
                halo=True,
            )
        )
    return _svg(drawn, height, label)


def _summed(sources: Iterable[Sequence[Part]]) -> list[Part]:
    """The parts of all sources, equal names added up, in the order in which they first come."""
    summed: dict[str, Part] = {}
    for part in (part for parts in sources for part in parts):
        before = summed[part.name].count if part.name in summed else 0
        summed[part.name] = Part(part.name, before + part.count, part.color)
    return list(summed.values())


def _stacked(heights: Mapping[str, float], height: float) -> dict[str, float]:
    """Where each begins, one below the other with a gap, in the middle of the height together."""
    gap = (height - FLOW) / max(len(heights), 1)
    y, begins = gap / 2, {}
    for name, own in heights.items():
        begins[name] = y
        y += own + gap
    return begins


def _ribbons(
    sources: Mapping[str, Sequence[Part]],
    left: dict[str, float],
    right: dict[str, float],
    total: float,
) -> Iterable[Markup]:
    """`left` and `right` say where the next ribbon begins, and move on with each."""
    middle = WIDTH / 2
    for name, parts in sources.items():
        for part in parts:
            if not part.count:
                continue
            thick = FLOW * part.count / total
            a, b = left[name], right[part.name]
            left[name], right[part.name] = a + thick, b + thick
            yield Markup(
                '<path style="fill:var(--{})" opacity=".38" d="M{} {}C{} {} {} {} {} {}V{}C{} {} '
                '{} {} {} {}Z">'
                "<title>{}</title></path>"
            ).format(
                part.color,
                *map(_round, (BAR, a, middle, a, middle, b, WIDTH - BAR, b, b + max(thick, 0.4))),
                *map(_round, (middle, b + thick, middle, a + thick, BAR, a + max(thick, 0.4))),
                f"{name}, {part.name}: {_number(part.count)}",
            )


def shares(
    rows: Mapping[str, Sequence[Part]],
    notes: Mapping[str, str],
    label: str,
    longest: float | None = None,
) -> Markup:
    """A bar per row cut into its parts; above each its name and, at the right, a note.

    All are of one length, or where `longest` is given, in proportion to their sum: as long as the
    picture is wide for so many.
    """
    drawn, y = [], 0.0
    for name, parts in rows.items():
        total = longest or sum(part.count for part in parts) or 1
        drawn += [
            _text(0, y + 12, _short(name, 34), "ink"),
            _text(WIDTH, y + 12, notes.get(name, ""), anchor="end"),
        ]
        x = 0.0
        for part in parts:
            width = WIDTH * part.count / total
            drawn.append(
                _rect(x, y + LINE, width, 11, part.color, f"{part.name}: {_number(part.count)}")
            )
            x += width
        y += STEP
    return _svg(drawn, max(y, 1), label)


def bars(parts: Sequence[Part], label: str) -> Markup:
    """A bar per part, as long as its share of the largest, with its count and its share of all."""
    most, total = (
        max((part.count for part in parts), default=1) or 1,
        sum(part.count for part in parts) or 1,
    )
    drawn, y = [], 0.0
    for part in parts:
        note = f"{_number(part.count)} ({100 * part.count / total:.1f} %)"
        drawn += [
            _text(0, y + 12, _short(part.name, 30), "ink"),
            _text(WIDTH, y + 12, note, anchor="end"),
        ]
        drawn.append(_rect(0, y + LINE, max(WIDTH * part.count / most, 1), 8, part.color))
        y += STEP - 4
    return _svg(drawn, max(y, 1), label)


@dataclass(frozen=True, slots=True)
class Series:
    """Counts by class, shown as shares of their sum. dashed: for what the others are compared with."""

    name: str
    counts: Sequence[float]
    color: str
    dashed: bool = False


def histogram(classes: Sequence[str], series: Sequence[Series], label: str) -> Markup:
    """Bars by class, those of the series side by side."""
    tall, axis = _axis(series, classes)
    slot = (WIDTH - 30) / len(classes)
    width = slot * 0.8 / max(len(series), 1)
    drawn = list(axis)
    for place, one in enumerate(series):
        for number, share in enumerate(_of_sum(one.counts)):
            height = CHART * share / tall
            x = 30 + slot * (number + 0.1) + width * place
            hint = (
                f"{one.name}, from {classes[number]}: {_number(one.counts[number])} "
                f"({100 * share:.1f} %)"
            )
            drawn.append(_rect(x, 6 + CHART - height, width * 0.92, height, one.color, hint))
    return _svg(drawn, CHART + 40, label)


def lines(classes: Sequence[str], series: Sequence[Series], label: str) -> Markup:
    """A line per series over the classes."""
    tall, axis = _axis(series, classes)
    slot = (WIDTH - 30) / len(classes)
    drawn = list(axis)
    for one in series:
        points = [
            (30 + slot * (number + 0.5), 6 + CHART * (1 - share / tall))
            for number, share in enumerate(_of_sum(one.counts))
        ]
        path = " ".join(f"{_round(x)},{_round(y)}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        drawn.append(
            Markup(
                f'<polyline points="{path}" fill="none" stroke-width="2.2" '
                f'stroke-linejoin="round"{dash}'
                ' style="stroke:var(--{})"><title>{}</title></polyline>'
            ).format(one.color, one.name)
        )
    return _svg(drawn, CHART + 40, label)


def distances(rows: Mapping[str, tuple[float, float, float]], label: str) -> Markup:
    """For each row how far apart two things were and are, with the floor below which no difference
    can be told.
    """
    drawn, y = [], 0.0
    for name, (before, after, floor) in rows.items():
        scale = (WIDTH - 20) / (max(before, after, floor) or 1)
        x = [10 + scale * value for value in (before, after, floor)]
        drawn += [
            _text(0, y + 12, name, "ink"),
            _text(WIDTH, y + 12, f"{before:.3f} → {after:.3f}, floor {floor:.3f}", anchor="end"),
            _line(10, y + 32, WIDTH - 10, y + 32, "line", 1),
            _line(x[0], y + 32, x[1], y + 32, "fit-after", 3),
            _line(x[2], y + 24, x[2], y + 40, "ink", 2),
            _dot(x[0], y + 32, "fit-before"),
            _dot(x[1], y + 32, "fit-after"),
        ]
        y += 52
    return _svg(drawn, max(y, 1), label)


def _axis(series: Sequence[Series], classes: Sequence[str]) -> tuple[float, list[Markup]]:
    """The share at the top of the chart, and its grid and names."""
    most = max((share for one in series for share in _of_sum(one.counts)), default=0)
    tall = max(math.ceil(most * 10) / 10, 0.1)
    drawn = []
    for quarter in range(5):
        y = 6 + CHART * (1 - quarter / 4)
        drawn += [
            _line(30, y, WIDTH, y, "line", 1),
            _text(25, y + 4, f"{100 * tall * quarter / 4:.0f}%", anchor="end"),
        ]
    slot = (WIDTH - 30) / max(len(classes), 1)
    drawn += [
        _text(30 + slot * number, CHART + 22, name, anchor="middle")
        for number, name in enumerate(classes)
    ]
    return tall, drawn


def _of_sum(counts: Sequence[float]) -> list[float]:
    total = sum(counts) or 1
    return [count / total for count in counts]


# Shapes


def _svg(drawn: Iterable[Markup], height: float, label: str) -> Markup:
    opening = f'<svg viewBox="0 0 {WIDTH:.0f} {_round(height + 2)}" role="img" aria-label="'
    return (
        Markup(opening) + escape(label) + Markup('">') + Markup("").join(drawn) + Markup("</svg>")
    )


def _rect(x: float, y: float, width: float, height: float, color: str, hint: str = "") -> Markup:
    title = Markup("<title>{}</title>").format(hint) if hint else ""
    shape = Markup('<rect x="{}" y="{}" width="{}" height="{}" style="fill:var(--{})">{}</rect>')
    return shape.format(_round(x), _round(y), _round(width), _round(height), color, title)


def _line(x: float, y: float, x2: float, y2: float, color: str, width: float) -> Markup:
    shape = Markup(
        '<line x1="{}" y1="{}" x2="{}" y2="{}" stroke-width="{}" style="stroke:var(--{})"/>'
    )
    return shape.format(*map(_round, (x, y, x2, y2, width)), color)


def _dot(x: float, y: float, color: str) -> Markup:
    return Markup('<circle cx="{}" cy="{}" r="6" style="fill:var(--{})"/>').format(
        _round(x), _round(y), color
    )


def _text(
    x: float, y: float, text: str, color: str = "muted", anchor: str = "start", halo: bool = False
) -> Markup:
    kind = "halo" if halo else "plain"
    shape = Markup(
        '<text x="{}" y="{}" class="{}" text-anchor="{}" style="fill:var(--{})">{}</text>'
    )
    return shape.format(_round(x), _round(y), kind, anchor, "ink" if halo else color, text)


def _short(name: str, limit: int = 24) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _number(count: float) -> str:
    return f"{count:,.0f}"


def _round(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
