"""What is compared: our policies as the monitor runs them, and the reference's window of 200 rows.

Each answers at which row of a stream it first asks for a run. The policies are the monitor's own classes, asked at
decision points of a fixed number of rows; only the evidence is made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.policy_study.streams import part
from components.contracts.metrics import auc_estimate
from monitoring.deciding.confirmation import ConfirmationSettings
from monitoring.deciding.decision import Action
from monitoring.deciding.evidence import Baseline, Evidence, MaturedRows, Policy
from monitoring.deciding.relative_drop import RelativeDropPolicy, RelativeDropSettings
from monitoring.deciding.sequential import SequentialPolicy, SequentialSettings
from monitoring.deciding.threshold import ThresholdPolicy, ThresholdSettings
from monitoring.measures.kpis import Kpis

REFERENCE_ROWS = 200
REFERENCE_STRIDE = 10
"""The reference looks at every record, we let it look at every tenth: it fires falsely all the same."""


def first_run(
    policy: Policy, stream: MaturedRows, *, step: int, windows: Windows | None, gate_auc: float, after: int = 0
) -> int | None:
    """The row at which `policy` first asks for a run; None = never.

    Args:
        policy: See `evidence.Policy`.
        stream: Rows in their order.
        step: Rows per decision point.
        windows: KPIs of the stream; None = the policy does not look at them.
        gate_auc: What the gate measured, exactly.
        after: Answers before this row do not count, but for the sequential test's, which are for good.
    """
    memory: Any = {}
    for begin in range(0, len(stream.labels), step):
        end = min(begin + step, len(stream.labels))
        evidence = Evidence(
            time=float(end),
            version=1,
            serving_since=0.0,
            kpis=NO_KPIS if windows is None or policy.name == SequentialPolicy.name else windows.kpis(end),
            rows=part(stream, begin, end),
            matured_total=end,
            baseline=Baseline(auc=gate_auc, low=gate_auc, high=gate_auc),
            drift=(),
        )
        decision, memory = policy.decide(evidence, memory)
        if decision.action is Action.RETRAIN and (end > after or policy.name == SequentialPolicy.name):
            return end
    return None


NO_KPIS = Kpis(
    version=1, rows=0, clicks=0, auc=None, auc_low=None, auc_high=None, log_loss=None, calibration=None, ctr=None
)


class Windows:
    """KPIs of a stream's windows of `rows` rows, computed once for all contestants."""

    def __init__(self, stream: MaturedRows, rows: int) -> None:
        self._stream, self._rows, self._known = stream, rows, dict[int, Kpis]()

    def kpis(self, end: int) -> Kpis:
        """AUC with its interval; with too few clicks to be looked at by any policy it is not computed."""
        if end not in self._known:
            begin = max(0, end - self._rows)
            labels = self._stream.labels[begin:end]
            clicks = int(labels.sum())
            is_judged = clicks >= ConfirmationSettings.min_clicks
            found = auc_estimate(labels, self._stream.scores[begin:end]) if is_judged else None
            self._known[end] = replace(
                NO_KPIS,
                rows=end - begin,
                clicks=clicks,
                auc=found.auc if found else None,
                auc_low=found.low if found else None,
                auc_high=found.high if found else None,
            )
        return self._known[end]


def sequential(alpha: float, tolerance: float) -> SequentialPolicy:
    """The sequential test."""
    return SequentialPolicy(SequentialSettings(sequential_alpha=alpha, sequential_tolerance=tolerance))


def threshold(*, require_confidence: bool) -> ThresholdPolicy:
    """The threshold as it is configured by default, with and without its confidence."""
    return ThresholdPolicy(ThresholdSettings(require_confidence=require_confidence))


def relative_drop() -> RelativeDropPolicy:
    """The drop against the gate's AUC as it is configured by default."""
    return RelativeDropPolicy(RelativeDropSettings())


def reference_first_run(stream: MaturedRows, auc_threshold: float, *, after: int = 0) -> int | None:
    """The reference: at once when the AUC of the last 200 rows is below the threshold, however few clicks they hold."""
    for ends, aucs in _window_aucs(stream, after):
        if (below := np.flatnonzero(aucs < auc_threshold)).size:
            return int(ends[below[0]])
    return None


def _window_aucs(stream: MaturedRows, after: int, at_once: int = 250) -> Iterator[tuple[Any, Any]]:
    """Ends of windows that end after row `after`, and their AUCs, NaN where they are not defined."""
    ends = np.arange(max(after + 1, REFERENCE_ROWS), len(stream.labels) + 1, REFERENCE_STRIDE)
    for some in np.split(ends, range(at_once, len(ends), at_once)):
        rows = some[:, None] - REFERENCE_ROWS + np.arange(REFERENCE_ROWS)
        order = np.argsort(stream.scores[rows], axis=1)
        clicks = np.take_along_axis(stream.labels[rows], order, axis=1).astype(np.int64)
        num = clicks.sum(axis=1)
        ranks = (clicks * np.arange(1, REFERENCE_ROWS + 1)).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            yield some, (ranks - num * (num + 1) / 2) / (num * (REFERENCE_ROWS - num))
