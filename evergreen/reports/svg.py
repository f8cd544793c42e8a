"""Charts as inline SVG from templates: lines over time with events, and small bars.

Positions are percentages of the plot's width and height. A chart therefore fills the width of the
window, and is lower on a phone. The size of the texts does not change.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from evergreen.reports.rendering import PageBlock

WIDTH, HEIGHT = 920, 300
"""Default size in pixels. The page stretches the chart to the available width."""
LEFT = 50
RIGHT = 14
TOP = 42
BOTTOM = 34
_MARK_ROWS = 3
"""Number of text rows above the chart. Event names are distributed over these rows, so that the
names do not overlap."""
_CHARACTER = 0.85
"""Approximate width of a character on a desktop, in percent of the plot's width."""
_SERIES_SHARE = 1 / 8
"""Upper limit of the distance between two marks of a series, as a share of the horizontal axis. All
marks of a series have the same text."""
_ROW = 24
"""Height of one row of an interval chart in pixels."""
STEPS = 1000
"""Number of distinct horizontal positions in a chart."""
SERIES = tuple(f"var(--series-{number})" for number in range(1, 9))
"""Colours of lines. The style sheet defines these colours for light and dark mode."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart. A value of None interrupts the line.

    If `low` and `high` are given, each as long as `y`, the band between them is drawn behind the
    line.
    """

    label: str
    color: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = field(default=())
    high: Sequence[float | None] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Vertical line that marks an event."""

    x: float
    text: str
    color: str = "var(--soft)"


@dataclass(frozen=True, kw_only=True)
class _Tick:
    """Number on an axis, or a labelled horizontal line."""

    at: float
    """Position in percent from the top or from the left."""
    text: str


@dataclass(frozen=True, kw_only=True)
class _DrawnMark:
    at: float
    """Percent from the left."""
    y: int
    """Pixels from the top of the plot. A negative value is above the plot."""
    mark: Mark
    anchor: str
    """Side of the line on which the name is written: `start` or `end`."""


@dataclass(frozen=True, kw_only=True)
class _DrawnLine:
    color: str
    band: str
    """Points of the polygon between `low` and `high`. An empty text if `low` and `high` are not
    given."""
    parts: Sequence[str]
    """Points of each uninterrupted part of the line."""


@dataclass(frozen=True, kw_only=True)
class LineChart(PageBlock):
    """Line chart for which all positions are computed."""

    TEMPLATE: ClassVar[str] = "line_chart.html.j2"
    WIDTH: ClassVar[int] = WIDTH
    HEIGHT: ClassVar[int] = HEIGHT - TOP - BOTTOM
    """Height of the plot without the space for texts above and below it."""
    LEFT: ClassVar[int] = LEFT
    RIGHT: ClassVar[int] = RIGHT
    TOP: ClassVar[int] = TOP
    STEPS: ClassVar[int] = STEPS

    label: str
    legend: Sequence[Line]
    x_ticks: Sequence[_Tick]
    y_ticks: Sequence[_Tick]
    levels: Sequence[_Tick]
    lines: Sequence[_DrawnLine]
    marks: Sequence[_DrawnMark]


def line_chart(
    lines: Sequence[Line],
    *,
    y_label: str,
    marks: Sequence[Mark] = (),
    levels: Sequence[tuple[float, str]] = (),
    from_zero: bool = False,
    x_unit: str = "s",
) -> LineChart | None:
    """Return the chart, or None if there is no point to draw.

    `levels` are horizontal lines, (value, label). `x_unit` is written beside the numbers of the
    horizontal axis. In a series of marks with the same text, only the first mark is drawn.
    """
    xs = [x for line in lines for x in line.x]
    ys = [
        y
        for line in lines
        for values in (line.y, line.low, line.high)
        for y in values
        if y is not None
    ]
    ys += [value for value, _ in levels]
    if not xs or not ys:
        return None
    xs += [mark.x for mark in marks]
    x_low, x_high = min(xs), max([*xs, min(xs) + 1e-9])
    pad = (max(ys) - min(ys) or abs(max(ys)) or 1.0) * 0.08
    y_low, y_high = (0.0 if from_zero else min(ys) - pad), max(ys) + pad

    def percent(x: float) -> float:
        return (x - x_low) / (x_high - x_low) * 100

    def at_x(x: float) -> float:
        return (x - x_low) / (x_high - x_low) * STEPS

    def at_y(y: float) -> float:
        return 100 - (y - y_low) / (y_high - y_low) * 100

    firsts = _firsts(marks, apart=(x_high - x_low) * _SERIES_SHARE)
    return LineChart(
        label=y_label,
        legend=lines,
        x_ticks=[
            _Tick(at=percent(x), text=f"{x:g} {x_unit}".rstrip()) for x in ticks(x_low, x_high, 5)
        ],
        y_ticks=[_Tick(at=at_y(y), text=f"{y:.4g}") for y in ticks(y_low, y_high, 5)],
        levels=[_Tick(at=at_y(value), text=text) for value, text in levels],
        lines=[
            _DrawnLine(
                color=line.color, band=_band(line, at_x, at_y), parts=_parts(line, at_x, at_y)
            )
            for line in lines
        ],
        marks=_draw_marks([(percent(mark.x), mark) for mark in firsts]),
    )


def _firsts(marks: Sequence[Mark], *, apart: float) -> list[Mark]:
    """Return the marks in ascending order, without repetitions.

    A mark is a repetition if the previous mark with the same text is less than `apart` away.
    """
    last: dict[str, float] = {}
    firsts = []
    for mark in sorted(marks, key=lambda mark: mark.x):
        if mark.x - last.get(mark.text, -math.inf) >= apart:
            firsts.append(mark)
        last[mark.text] = mark.x
    return firsts


def _draw_marks(marks: Sequence[tuple[float, Mark]]) -> list[_DrawnMark]:
    """Place the name of each mark in the first row that has space for it, and return the marks.

    Near the right edge, a name is written on the left side of its line.
    """
    ends = [-math.inf] * _MARK_ROWS
    drawn = []
    for at, mark in marks:
        width = _CHARACTER * (len(mark.text) + 2)
        anchor = "end" if at > 80 else "start"
        start = at - width if anchor == "end" else at
        free = [row for row, end in enumerate(ends) if end <= start]
        row = free[0] if free else min(range(_MARK_ROWS), key=ends.__getitem__)
        ends[row] = start + width
        y = -4 - 12 * (_MARK_ROWS - 1 - row)
        drawn.append(_DrawnMark(at=at, y=y, mark=mark, anchor=anchor))
    return drawn


_Axis = Callable[[float], float]


def _parts(line: Line, at_x: _Axis, at_y: _Axis) -> list[str]:
    """Return the points of each uninterrupted part of the line."""
    parts: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y):
        if y is None:
            parts.append([])
        else:
            parts[-1].append(f"{at_x(x):.1f},{at_y(y):.2f}")
    return [" ".join(part) for part in parts if part]


def _band(line: Line, at_x: _Axis, at_y: _Axis) -> str:
    """Return the corners of the area between the lower and the upper limit.

    Points without both limits are skipped.
    """
    both = [
        (x, a, b) for x, a, b in zip(line.x, line.low, line.high) if a is not None and b is not None
    ]
    above = [f"{at_x(x):.1f},{at_y(b):.2f}" for x, _, b in both]
    below = [f"{at_x(x):.1f},{at_y(a):.2f}" for x, a, _ in reversed(both)]
    return " ".join(above + below)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its interval, on one row of an interval chart."""

    label: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class _DrawnInterval:
    label: str
    y: int
    at: float
    """Position of the estimate in percent from the left."""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class IntervalChart(PageBlock):
    """Chart with one estimate and its interval in each row, and with a limit."""

    TEMPLATE: ClassVar[str] = "interval_chart.html.j2"

    label: str
    title: str
    """All values as text, for readers who cannot see the chart."""
    rows: Sequence[_DrawnInterval]
    ticks: Sequence[_Tick]
    limit: _Tick | None
    height: int


def interval_chart(
    intervals: Sequence[Interval], *, label: str, limit: float | None = None
) -> IntervalChart:
    """Return a chart of the intervals.

    There must be at least one interval. A limit of None is not drawn.
    """
    values = [each for found in intervals for each in (found.value, found.low, found.high)]
    values += [] if limit is None else [limit]
    pad = (max(values) - min(values) or 1.0) * 0.05
    low, high = min(values) - pad, max(values) + pad

    def percent(value: float) -> float:
        return (value - low) / (high - low) * 100

    named = [
        f"{each.label} {each.value:.4g} ({each.low:.4g} to {each.high:.4g})" for each in intervals
    ]
    named += [] if limit is None else [f"limit {limit:g}"]
    return IntervalChart(
        label=label,
        title=f"{label}: {', '.join(named)}",
        rows=[
            _DrawnInterval(
                label=each.label,
                y=_ROW // 2 + _ROW * number,
                at=percent(each.value),
                start=percent(each.low),
                end=percent(each.high),
            )
            for number, each in enumerate(intervals)
        ],
        ticks=[_Tick(at=percent(value), text=f"{value:.4g}") for value in ticks(low, high, 3)],
        limit=None if limit is None else _Tick(at=percent(limit), text=f"limit {limit:g}"),
        height=_ROW * len(intervals),
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers between `low` and `high`, for the labels of an axis.

    The number of results is close to `about`.

    >>> ticks(0.583, 0.882, 5)
    [0.6, 0.65, 0.7, 0.75, 0.8, 0.85]
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.8)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Bar that shows the current share of rows.

    A wider bar behind this bar shows the earlier share.
    """

    label: str
    now: float
    before: float | None
    """Earlier share of rows. None if there are no earlier rows."""


@dataclass(frozen=True, kw_only=True)
class _Rectangle:
    name: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, kw_only=True)
class BarChart(PageBlock):
    """Chart with one bar for each value, side by side. Screen readers read the text `title`.

    Bars of earlier rows are wider, so that they differ in shape and not only in colour.
    """

    TEMPLATE: ClassVar[str] = "bar_chart.html.j2"
    WIDTH: ClassVar[int] = 280
    HEIGHT: ClassVar[int] = 72

    title: str
    bars: Sequence[Bar]

    def rectangles(self, position: int) -> list[_Rectangle]:
        """Return the rectangles of the bar at `position`.

        The first rectangle is drawn in the background.
        """
        bar, step = self.bars[position], self.WIDTH / len(self.bars)
        top = max(max(each.now, each.before or 0.0) for each in self.bars) or 1.0
        shapes = []
        for name, margin, share in (
            ("before", 0.05, (bar.before or 0.0) / top),
            ("now", 0.25, bar.now / top),
        ):
            height = share * self.HEIGHT
            x, width = (position + margin) * step, (1 - 2 * margin) * step
            shapes.append(
                _Rectangle(name=name, x=x, y=self.HEIGHT - height, width=width, height=height)
            )
        return shapes
