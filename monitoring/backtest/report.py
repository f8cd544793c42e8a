"""Backtests as a table, as JSON and as one HTML page with a chart: no script, no outside asset.

In: one `Backtest` per setting of policies, over the same records. The lines are drawn by `components.charts`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from html import escape

from components.charts.line_chart import Line, Mark, line_chart
from components.charts.page import html_page, html_table
from monitoring.backtest.judging import Backtest

COLORS = ("#dc2626", "#2563eb", "#059669", "#9333ea", "#b45309", "#0e7490")
MAX_DRAWN = 1500


def as_table(backtests: Sequence[Backtest]) -> str:
    """Plain text, one line per setting of policies; a number that does not exist is a dash."""
    cells = [list(_figures(backtests[0])), *(list(_figures(each).values()) for each in backtests)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in cells]
    return "\n".join([_summary(backtests), *lines]) + "\n"


def as_json(backtests: Sequence[Backtest]) -> str:
    """A list of objects, with every fire and without the points of the chart."""
    documents = [asdict(replace(each, points=())) for each in backtests]
    return json.dumps(documents, indent=2, allow_nan=False) + "\n"


def as_page(backtests: Sequence[Backtest], *, drift_at: float | None) -> str:
    """The HTML page: the AUC of whichever version served, with every setting's fires on it."""
    fires = sorted(((fire.time, each.policies, fire) for each in backtests for fire in each.fires), key=lambda f: f[0])
    listed = [[_moment(time), escape(policies), fire.policy, escape(fire.reason)] for time, policies, fire in fires]
    figures = [list(_figures(each).values()) for each in backtests]
    return html_page(
        "Backtest",
        intro=f"<p>{_summary(backtests)}. A fire changes no model here: after it the records go on as they were.</p>",
        sections={
            "Policies": html_table(list(_figures(backtests[0])), figures, caption="What each would have done"),
            "AUC": _chart(backtests, drift_at),
            "Fires": html_table(["when", "policies", "fired", "because"], listed, caption="Runs requested"),
        },
    )


def _summary(backtests: Sequence[Backtest]) -> str:
    return f"{backtests[0].rows:,} matured rows, {backtests[0].decision_points:,} decision points"


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


def _figures(each: Backtest) -> dict[str, str]:
    """The cells of a table's row by their headings."""
    return {
        "policies": each.policies,
        "fires": str(len(each.fires)),
        "first fire": _moment(each.fires[0].time) if each.fires else "-",
        "delay": "-" if each.delay_seconds is None else f"{each.delay_seconds:.0f} s",
        "rows to fire": "-" if each.delay_rows is None else f"{each.delay_rows:,}",
        "false alarms": "-" if each.false_alarms is None else str(each.false_alarms),
        "held": str(each.held),
        "AUC hours lost": "-" if each.auc_hours_lost is None else f"{each.auc_hours_lost:.3g}",
    }


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
