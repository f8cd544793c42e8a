"""Backtests as a table, as JSON and as one HTML page with a chart: no script, no outside asset.

In: one `Backtest` per setting of policies, over the same records. The lines are drawn by `components.charts`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from components.charts.line_chart import Line, Mark, line_chart
from monitoring.backtest.judging import Backtest

HEAD = (
    "policies",
    "fires",
    "first fire",
    "delay",
    "rows to fire",
    "false alarms",
    "held",
    "GPU hours",
    "AUC hours lost",
)
COLORS = ("#dc2626", "#2563eb", "#059669", "#9333ea", "#b45309", "#0e7490")
MAX_DRAWN = 1500
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1000px;padding:14px;color:#111}
svg{width:100%;min-width:600px;height:auto}svg text{font:12px system-ui,sans-serif;fill:#444}
svg .halo{paint-order:stroke;stroke:#fff;stroke-width:3px}.grid{stroke:#eee}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92em}
td,th{text-align:left;padding:4px 8px;border-bottom:1px solid #eee;vertical-align:top}
.legend i{display:inline-block;width:1em;height:.35em;margin-right:.4em;vertical-align:middle}
.legend span{margin-right:1.2em}
"""


def as_table(backtests: Sequence[Backtest]) -> str:
    """Plain text, one line per setting of policies; a number that does not exist is a dash."""
    cells = [list(HEAD), *(_row(each) for each in backtests)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in cells]
    first = backtests[0]
    summary = f"{first.rows:,} matured rows, {first.decision_points:,} decision points"
    return "\n".join([summary, *lines]) + "\n"


def as_json(backtests: Sequence[Backtest]) -> str:
    """A list of objects, with every fire and without the points of the chart."""
    documents = []
    for each in backtests:
        document = asdict(each)
        del document["points"]
        documents.append(document)
    return json.dumps(documents, indent=2, allow_nan=False) + "\n"


def as_page(backtests: Sequence[Backtest], *, drift_at: float | None) -> str:
    """The HTML page: the AUC of whichever version served, with every setting's fires on it."""
    heads = "".join(f"<th>{name}</th>" for name in HEAD)
    rows = "".join("<tr>" + "".join(f"<td>{_text(v)}</td>" for v in _row(each)) + "</tr>" for each in backtests)
    fires = [(each.policies, fire) for each in backtests for fire in each.fires]
    listed = "".join(
        f"<tr><td>{_moment(fire.time)}</td><td>{_text(name)}</td><td>{_text(fire.policy)}</td>"
        f"<td>{_text(fire.reason)}</td></tr>"
        for name, fire in sorted(fires, key=lambda pair: pair[1].time)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Backtest</title><style>{STYLE}</style></head><body><h1>Backtest</h1>"
        f"<p>{backtests[0].rows:,} matured rows, {backtests[0].decision_points:,} decision points. A fire changes no "
        "model here: after it the records go on as they were.</p>"
        f'<div class="scroll"><table><tr>{heads}</tr>{rows}</table></div>{_chart(backtests, drift_at)}'
        "<h2>Fires</h2><table><tr><th>when</th><th>policies</th><th>fired</th><th>because</th></tr>"
        f"{listed}</table></body></html>\n"
    )


def _chart(backtests: Sequence[Backtest], drift_at: float | None) -> str:
    points = backtests[0].points
    if not points:
        return ""
    start = points[0].time
    hours = [(point.time - start) / 3600.0 for point in points]
    lines = []
    for number, version in enumerate(sorted({point.version for point in points})):
        every = max(1, -(-sum(point.version == version for point in points) // MAX_DRAWN))
        of_version = [(x, point) for x, point in zip(hours, points) if point.version == version][::every]
        lines.append(
            Line(
                label=f"version {version}",
                color=COLORS[(number + 1) % len(COLORS)],
                x=[x for x, _ in of_version],
                y=[point.auc for _, point in of_version],
                low=[point.auc_low for _, point in of_version],
                high=[point.auc_high for _, point in of_version],
            )
        )
    marks = [
        Mark(x=(fire.time - start) / 3600.0, text=each.policies, color=COLORS[number % len(COLORS)])
        for number, each in enumerate(backtests)
        for fire in each.fires
    ]
    if drift_at is not None:
        marks.append(Mark(x=(drift_at - start) / 3600.0, text="the world changes", color="#111"))
    return line_chart(lines, y_label="AUC of the serving version, 95 %", marks=marks, x_unit="h")


def _row(each: Backtest) -> list[str]:
    first = each.fires[0] if each.fires else None
    return [
        each.policies,
        str(len(each.fires)),
        _moment(first.time) if first else "-",
        "-" if each.delay_seconds is None else f"{each.delay_seconds:.0f} s",
        "-" if each.delay_rows is None else f"{each.delay_rows:,}",
        "-" if each.false_alarms is None else str(each.false_alarms),
        str(each.held),
        f"{each.gpu_hours:g}",
        "-" if each.auc_hours_lost is None else f"{each.auc_hours_lost:.3g}",
    ]


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _text(value: Any) -> str:
    return html.escape(str(value))
