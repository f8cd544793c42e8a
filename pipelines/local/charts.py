"""Line charts as inline SVG: no script, no network, readable on a phone. What they show is the report's."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 920, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 34, 34


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart; None breaks it. With `low` and `high` (as long as `y`) a band is drawn behind it."""

    label: str
    color: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = field(default=())
    high: Sequence[float | None] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line at an event."""

    x: float
    text: str
    color: str = "#555"


def line_chart(
    lines: Sequence[Line], *, y_label: str, marks: Sequence[Mark] = (), levels: Sequence[tuple[float, str]] = ()
) -> str:
    """The chart as SVG text; an empty string where there is no point to draw.

    Args:
        lines: What is drawn; x in seconds.
        y_label: What the vertical axis measures.
        marks: Events.
        levels: Horizontal lines, (value, label).
    """
    xs = [x for line in lines for x in line.x]
    ys = [y for line in lines for values in (line.y, line.low, line.high) for y in values if y is not None]
    ys += [value for value, _ in levels]
    if not xs or not ys:
        return ""
    x_low, x_high = min(xs), max([*xs, min(xs) + 1e-9])
    pad = (max(ys) - min(ys) or 1.0) * 0.08
    y_low, y_high = min(ys) - pad, max(ys) + pad

    def at_x(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(y_label)} over time">']
    for i in range(5):
        y = y_low + (y_high - y_low) * i / 4
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for i in range(7):
        x = x_low + (x_high - x_low) * i / 6
        parts.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{x:.0f} s</text>')
    for value, label in levels:
        parts.append(
            f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(value):.1f}" y2="{at_y(value):.1f}"/>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="{at_y(value) - 4:.1f}" text-anchor="end">{html.escape(label)}</text>'
        )
    for line in lines:
        parts += _band(line, at_x, at_y)
        parts += [
            f'<polyline fill="none" stroke="{line.color}" stroke-width="2" points="{points}"/>'
            for points in _polylines(line, at_x, at_y)
        ]
    for number, mark in enumerate(marks):
        x = at_x(min(max(mark.x, x_low), x_high))
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{mark.color}" '
            f'stroke-dasharray="3 3"/><text class="mark" x="{x + 3:.1f}" y="{TOP - 20 + 11 * (number % 3):.1f}" '
            f'fill="{mark.color}">{html.escape(mark.text)}</text>'
        )
    legend = "".join(f'<span><i style="background:{line.color}"></i>{html.escape(line.label)}</span>' for line in lines)
    return "".join([*parts, "</svg>", f'<p class="legend">{legend}</p>'])


def _polylines(line: Line, at_x, at_y) -> list[str]:  # type: ignore[no-untyped-def]
    """Point lists of the line's unbroken stretches."""
    stretches: list[list[str]] = [[]]
    for x, y in zip(line.x, line.y):
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{at_x(x):.1f},{at_y(y):.1f}")
    return [" ".join(stretch) for stretch in stretches if stretch]


def _band(line: Line, at_x, at_y) -> list[str]:  # type: ignore[no-untyped-def]
    """The polygon between `low` and `high`, where both exist."""
    both = [(x, a, b) for x, a, b in zip(line.x, line.low, line.high) if a is not None and b is not None]
    if not both:
        return []
    there = [f"{at_x(x):.1f},{at_y(b):.1f}" for x, _, b in both]
    back = [f"{at_x(x):.1f},{at_y(a):.1f}" for x, a, _ in reversed(both)]
    return [f'<polygon fill="{line.color}" opacity="0.15" points="{" ".join(there + back)}"/>']
