"""Whether the share of clicks changed: from all kept windows merged, and from the newest of them.

A fall is often labels that have not all arrived, a change to a rate that the champion learnt already is none. What is
made of it is `rules.click_rate`'s.
"""

from __future__ import annotations

from typing import Any

from components.drift_statistics.chance import proportion
from components.drift_statistics.effects import share_change
from components.validation.column_tests import design_of_totals
from components.validation.kept_windows import KeptWindows
from components.validation.windows import WindowSummary


def measure_label_shift(now: WindowSummary, kept: KeptWindows) -> dict[str, Any] | None:
    """The change of the click rate, as `manifests.ValidationReport.label` describes it.

    Rows of a request that are alike count as fewer, in the interval and in the p-value. None where a side has no rows,
    or its clicks are not known.
    """
    found = _compared(now, kept.merged)
    if found is None:
        return None
    return {**found, "newest": _compared(now, kept.newest) if len(kept.windows) > 1 else None}


def _compared(now: WindowSummary, before: WindowSummary) -> dict[str, Any] | None:
    n, m = now.rows, before.rows
    if not n or not m or not before.requests:
        return None
    design = design_of_totals(now.clicks, before.clicks, (now, before))
    effect = share_change(now.clicks.rows, n, before.clicks.rows, m, design)
    assert effect is not None
    return {
        "rate_now": now.clicks.rows / n,
        "rate_before": before.clicks.rows / m,
        "difference": effect.value,
        "low": effect.low,
        "high": effect.high,
        "p_value": proportion(now.clicks.rows, n, before.clicks.rows, m, design),
        "design_effect": design,
        "num_rows_now": n,
        "num_rows_before": m,
    }
