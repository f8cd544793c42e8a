"""All rules over what was measured of one run's rows: the findings, the worst first."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from components.validation.measuring import Measured
from components.validation.rows import ColumnFault
from components.validation.rules import BLOCK, INFO, WARN, Finding, Judging
from components.validation.rules.anomalies import judge_anomalies
from components.validation.rules.click_rate import judge_click_rate
from components.validation.rules.drift import judge_drift
from components.validation.rules.skew import judge_skew
from components.validation.rules.structure import judge_structure
from components.validation.rules.values import judge_values
from components.validation.schemas.check import check_statistics
from components.validation.summarize import num_rows


def judge(
    measured: Measured,
    *,
    faults: Sequence[ColumnFault],
    screened: Sequence[Finding],
    schema: Any,
    before: Any | None,
    judging: Judging,
    excluded: Container[str],
) -> list[Finding]:
    """The findings of every rule.

    Args:
        measured: The rows in numbers.
        faults: Of their columns, new ones among them.
        screened: What the rules about single rows found.
        schema: By which they are judged.
        before: TFDV's statistics of the champion's rows; None without one.
        judging: Actions and thresholds.
        excluded: Features that the run left out.
    """
    now = measured.now
    optional = frozenset(f.name for f in schema.feature if not (f.presence.min_count or f.presence.min_fraction))
    findings = [
        *judge_structure(faults, num_rows(now), judging),
        *screened,
        *judge_anomalies(check_statistics(now, schema), now, schema, judging, excluded=excluded),
        *judge_values(now, before, judging, excluded=excluded, optional=optional),
        *judge_click_rate(measured.label, judging),
        *judge_drift(measured.drift, judging),
        *judge_skew(measured.skew.entries, measured.skew.facts, judging),
    ]
    return sorted(findings, key=lambda finding: (BLOCK, WARN, INFO).index(finding["severity"]))
