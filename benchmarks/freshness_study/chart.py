"""The study's chart as a standalone SVG: how far below the best possible AUC each policy is, hour by hour."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from benchmarks.freshness_study.days import BEST, EXACT, FROZEN
from components.charts.line_chart import ticks

WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 40, 44
COLORS = ("#dc2626", "#d97706", "#2563eb", "#059669")
SMOOTHED_HOURS = 3
"""Hours whose mean is drawn: a single hour's clicks make a policy's AUC uncertain by a tenth of a point."""


def chart(result: dict[str, Any]) -> str:
    """The chart of `result`, the study's JSON document."""
    hourly = result["study"]["hourly_auc"]
    names = [*result["study"]["rounds"], EXACT]
    lines = {name: _smoothed([100.0 * (best - own) for best, own in zip(hourly[BEST], hourly[name])]) for name in names}
    num_hours, top = len(hourly[BEST]), max(max(line) for line in lines.values()) * 1.06

    def at(hour: float, points: float) -> tuple[float, float]:
        x = LEFT + hour / num_hours * (WIDTH - LEFT - RIGHT)
        return x, TOP + points / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#333"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="14">AUC points below the best possible, mean of {SMOOTHED_HOURS} hours'
        "</text>",
    ]
    for value in ticks(0.0, top, 6):
        x, y = at(0, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{0.0 - value:.4g}</text>')
    for hour in range(0, num_hours + 1, 6 if num_hours > 12 else 2):
        x, _ = at(hour, 0.0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{hour}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">hours since the first model</text>')
    for number, (name, line) in enumerate(lines.items()):
        color, dashes = (COLORS[number], "") if name != EXACT else ("#777", ' stroke-dasharray="5 4"')
        points = " ".join("{:.1f},{:.1f}".format(*at(hour + 0.5, value)) for hour, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>')
        y = TOP + 14 + 18 * number
        label = name if name in (FROZEN, EXACT) else f"retrained {name}"
        parts.append(
            f'<line x1="{WIDTH - 142}" x2="{WIDTH - 122}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"{dashes}/>'
        )
        parts.append(f'<text x="{WIDTH - 116}" y="{y + 4}" font-size="11">{html.escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _smoothed(values: Sequence[float]) -> list[float]:
    """Each value's mean with its neighbours; fewer at the ends."""
    half = SMOOTHED_HOURS // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
