"""The figures of one simulation: what callers felt, what was refused, what it cost; as text and as an SVG chart.

Simulating is `simulation`'s.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from components.charts.line_chart import HEIGHT, WIDTH, Line, line_chart
from k8s.scaling.hpa import SYNC_SECONDS
from k8s.scaling.simulation import SimulatedRun, SyncState

WINDOW_SECONDS = 300.0
"""Span of one point of the time line."""
TOP_MS = 500.0
"""Queue times above are drawn at this height: one overload would flatten all else."""
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.grid{stroke:#e5e5e5}.level{stroke:#999;stroke-dasharray:4 4}"
    ".halo{paint-order:stroke;stroke:#fff;stroke-width:3px}"
)
_LOAD, _READY, _WANTED, _P50, _P99 = "#555", "#2563eb", "#d97706", "#059669", "#dc2626"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of a whole run; None where nothing was answered."""

    num_arrived: int
    num_answered: int
    num_refused: int
    """Found the queue full."""
    num_timed_out: int
    num_homeless: int
    """Came while no pod was ready."""
    num_inside: int
    """Neither answered nor dropped when the trace ended."""
    dropped_share: float
    queue_p50_ms: float | None
    queue_p99_ms: float | None
    late_share: float | None
    """Share of all requests that waited longer than the objective, or were dropped."""
    mean_replicas: float
    max_replicas: int
    num_changes: int
    """How often the autoscaler changed the number."""
    pod_hours: float
    node_hours: float
    cost: float | None
    """Of the nodes' hours, in the price's currency; None without a price."""


@dataclass(frozen=True, kw_only=True)
class TimelinePoint:
    """One span of the time line."""

    seconds: float
    """Its end."""
    ready: float
    wanted: float
    served_per_second: float
    queue_p50_ms: float | None
    queue_p99_ms: float | None


def summarise(outcome: SimulatedRun, *, objective_ms: float, price: float | None = None) -> Summary:
    """The figures of a run.

    Args:
        outcome: What happened.
        objective_ms: Queue time that is still in time.
        price: Of a node's hour.
    """
    waits = _joined([each for _, each in outcome.waits])
    counters, wanted = outcome.counters, [moment.wanted for moment in outcome.moments]
    num_dropped = counters.refused + counters.timed_out + outcome.num_homeless
    num_late = int((waits > objective_ms / 1e3).sum()) + num_dropped
    p50, p99 = _quantiles(waits)
    return Summary(
        num_arrived=outcome.num_arrived,
        num_answered=counters.answered,
        num_refused=counters.refused,
        num_timed_out=counters.timed_out,
        num_homeless=outcome.num_homeless,
        num_inside=outcome.num_inside,
        dropped_share=num_dropped / max(1, outcome.num_arrived),
        queue_p50_ms=p50,
        queue_p99_ms=p99,
        late_share=num_late / outcome.num_arrived if outcome.num_arrived else None,
        mean_replicas=outcome.pod_hours * 3600 / max(outcome.seconds, 1e-9),
        max_replicas=max(wanted, default=0),
        num_changes=sum(1 for a, b in zip(wanted, wanted[1:]) if a != b),
        pod_hours=outcome.pod_hours,
        node_hours=outcome.node_hours,
        cost=None if price is None else outcome.node_hours * price,
    )


def time_line(outcome: SimulatedRun, seconds: float = WINDOW_SECONDS) -> list[TimelinePoint]:
    """The run by spans of `seconds`."""

    def number(pair: tuple[SyncState, NDArray[np.float32]]) -> int:
        return int(np.ceil(pair[0].seconds / seconds))

    pairs = zip(outcome.moments, (waits for _, waits in outcome.waits))
    points = []
    for _, group in groupby(pairs, number):
        moments, waits = zip(*group)
        together = _joined(waits)
        p50, p99 = _quantiles(together)
        points.append(
            TimelinePoint(
                seconds=moments[-1].seconds,
                ready=float(np.mean([moment.ready for moment in moments])),
                wanted=float(np.mean([moment.wanted for moment in moments])),
                served_per_second=len(together) / (len(moments) * SYNC_SECONDS),
                queue_p50_ms=p50,
                queue_p99_ms=p99,
            )
        )
    return points


def text(summary: Summary, points: Sequence[TimelinePoint], *, objective_ms: float) -> str:
    """The run for a terminal: one line per half hour at most, then the figures."""
    stride = max(1, len(points) // 48)
    lines = [f"{'time':>6}  {'ready':>5}  {'wanted':>6}  {'served/s':>8}  {'p50 ms':>8}  {'p99 ms':>8}"]
    lines += [
        f"{_clock(p.seconds)}  {p.ready:5.1f}  {p.wanted:6.1f}  {p.served_per_second:8.1f}  {_ms(p.queue_p50_ms)}"
        f"  {_ms(p.queue_p99_ms)}"
        for p in points[stride - 1 :: stride]
    ]
    s = summary
    lines += [
        "",
        f"{s.num_arrived:,} requests: {s.num_answered:,} answered, {s.num_refused:,} found a full queue, "
        f"{s.num_timed_out:,} waited too long, {s.num_homeless:,} found no ready pod, {s.num_inside:,} under way at "
        "the end",
        f"queue time p50 {_ms(s.queue_p50_ms).strip()} ms, p99 {_ms(s.queue_p99_ms).strip()} ms; "
        f"{s.late_share or 0:.3%} later than {objective_ms:g} ms or dropped",
        f"replicas {s.mean_replicas:.2f} in the mean, {s.max_replicas} at most, changed {s.num_changes} times",
        f"{s.pod_hours:.1f} pod hours (of a GPU or slice each, where pods have one), {s.node_hours:.1f} node hours"
        + (f", cost {s.cost:.2f}" if s.cost is not None else ""),
    ]
    return "\n".join(lines)


def chart(points: Sequence[TimelinePoint], *, title: str, objective_ms: float) -> str:
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


def _joined(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def _quantiles(waits: NDArray[np.float32]) -> tuple[float | None, float | None]:
    if not len(waits):
        return None, None
    p50, p99 = np.quantile(waits, (0.5, 0.99))
    return 1e3 * float(p50), 1e3 * float(p99)


def _ms(value: float | None) -> str:
    return f"{'none':>8}" if value is None else f"{value:8.1f}"


def _clock(seconds: float) -> str:
    return f"{int(seconds // 3600):3d}:{int(seconds // 60) % 60:02d}"
