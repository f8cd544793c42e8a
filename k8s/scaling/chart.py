"""A simulation's chart as one SVG file: load, replicas, queue time, one below the other over the same hours."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from components.charts.line_chart import HEIGHT, WIDTH, Line, line_chart
from k8s.scaling.summary import Point

TOP_MS = 500.0
"""Queue times above are drawn at this height: one overload would flatten all else."""
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.grid{stroke:#e5e5e5}.level{stroke:#999;stroke-dasharray:4 4}"
    ".halo{paint-order:stroke;stroke:#fff;stroke-width:3px}"
)
_LOAD, _READY, _WANTED, _P50, _P99 = "#555", "#2563eb", "#d97706", "#059669", "#dc2626"


def chart(points: Sequence[Point], *, title: str, objective_ms: float) -> str:
    """The SVG; an empty string where there is nothing to draw."""
    if not points:
        return ""
    hours = [point.seconds / 3600 for point in points]
    panels: list[tuple[str, list[tuple[str, str, list[float | None]]], list[tuple[float, str]]]] = [
        ("requests served per second", [("served", _LOAD, [p.served_per_second for p in points])], []),
        (
            "replicas",
            [("wanted", _WANTED, [p.wanted for p in points]), ("ready", _READY, [p.ready for p in points])],
            [],
        ),
        (
            f"queue time, ms (cut at {TOP_MS:g})",
            [
                ("p99", _P99, [_cut(p.queue_p99_ms) for p in points]),
                ("p50", _P50, [_cut(p.queue_p50_ms) for p in points]),
            ],
            [(objective_ms, f"{objective_ms:g} ms")] if objective_ms <= TOP_MS else [],
        ),
    ]
    height = 30 + len(panels) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="4" y="18" style="font-size:14px">{html.escape(title)}</text>',
    ]
    for number, (label, series, levels) in enumerate(panels):
        lines = [Line(label=name, color=color, x=hours, y=y) for name, color, y in series]
        drawn = line_chart(lines, y_label=label, levels=levels, from_zero=True, x_unit="h")
        inner = re.search(r"<svg [^>]*>(.*)</svg>", drawn, re.DOTALL)
        if inner:
            legend = "".join(
                f'<text x="{WIDTH - 20 - 70 * place}" y="14" text-anchor="end" style="fill:{color}">{name}</text>'
                for place, (name, color, _) in enumerate(series)
            )
            parts.append(f'<g transform="translate(0 {30 + number * HEIGHT})">{inner[1]}{legend}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _cut(value: float | None) -> float | None:
    return None if value is None else min(value, TOP_MS)
