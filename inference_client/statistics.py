"""Keeps count of a replay: a line per second while it runs, a summary when it ends.

Counting only; sending is `replay`'s, and how good the scores were is the monitor's to say.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.metrics import roc_auc

BEFORE, AFTER = "before", "after"
_MAX_LATENCIES = 200_000
_MAX_ERROR_TEXTS = 50
_MAX_TRUTH_ROWS = 2_000_000
"""Rows of each phase that the best AUC is computed over, 8 bytes each: a replay may run for weeks."""


class ReplayStatistics:
    """Counts since the start, and since the last line."""

    def __init__(self) -> None:
        self.sent = 0
        """Requests asked for, answered or not."""
        self.failed = 0
        """Requests without a usable answer after all retries."""
        self.rows = 0
        """Rows answered."""
        self.clicks = 0
        """Clicks among the rows answered."""
        self.drift_time: float | None = None
        """Seconds since the epoch of the switch; None before it."""
        self._rows_of = {BEFORE: 0, AFTER: 0}
        self._versions: Counter[int] = Counter()
        self._errors: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._truth: dict[str, list[tuple[NDArray[np.int32], NDArray[np.float32]]]] = {BEFORE: [], AFTER: []}
        self._second = _Second()

    @property
    def phase(self) -> str:
        """`before` or `after` the drift."""
        return BEFORE if self.drift_time is None else AFTER

    def count_sent(self) -> None:
        """Counts one request."""
        self.sent += 1
        self._second.sent += 1

    def count_answer(
        self,
        *,
        phase: str,
        version: int,
        latency_seconds: float,
        label: NDArray[np.int32],
        probability: NDArray[np.float64] | None,
    ) -> None:
        """Counts one answer; `phase` is the one that its rows were drawn in."""
        n = len(label)
        self.rows += n
        self.clicks += int(label.sum())
        self._rows_of[phase] += n
        self._versions[version] += n
        self._second.rows += n
        self._second.versions[version] += n
        self._second.latencies.append(latency_seconds)
        if len(self._latencies) < _MAX_LATENCIES:
            self._latencies.append(latency_seconds)
        if probability is not None and self._rows_of[phase] <= _MAX_TRUTH_ROWS:
            self._truth[phase].append((label, probability.astype(np.float32)))

    def count_failure(self, error: Exception) -> None:
        """Counts one request that failed for good."""
        self.failed += 1
        self._second.failed += 1
        text = f"{type(error).__name__}: {error}"
        if text in self._errors or len(self._errors) < _MAX_ERROR_TEXTS:
            self._errors[text] += 1
        else:
            self._errors["other errors"] += 1

    def take_second(self, *, time: float, behind_seconds: float) -> dict[str, Any]:
        """The line about what happened since the last one."""
        second, self._second = self._second, _Second()
        return {
            "time": round(time, 3),
            "phase": self.phase,
            "requests_sent": second.sent,
            "requests_failed": second.failed,
            "rows": second.rows,
            "p50_ms": _milliseconds(second.latencies, 50),
            "p99_ms": _milliseconds(second.latencies, 99),
            "versions": {str(version): rows for version, rows in sorted(second.versions.items())},
            "behind": round(behind_seconds, 3),
        }

    def summary(self) -> dict[str, Any]:
        """Everything counted; None where there is nothing to count from.

        Percentiles are of the first 200,000 answers, `bayes_auc` is of each phase's first 2,000,000 rows.
        """
        return {
            "requests": {"sent": self.sent, "failed": self.failed},
            "rows": self.rows,
            "clicks": self.clicks,
            "drift_time": self.drift_time,
            "rows_before_drift": self._rows_of[BEFORE],
            "rows_after_drift": self._rows_of[AFTER],
            "bayes_auc": {phase: self._bayes_auc(phase) for phase in (BEFORE, AFTER)},
            "versions_seen": {str(version): rows for version, rows in sorted(self._versions.items())},
            "latency_ms": {"p50": _milliseconds(self._latencies, 50), "p99": _milliseconds(self._latencies, 99)},
            "errors": dict(self._errors),
        }

    def _bayes_auc(self, phase: str) -> float | None:
        if not self._truth[phase]:
            return None
        labels, probabilities = (np.concatenate(arrays) for arrays in zip(*self._truth[phase]))
        return roc_auc(labels, probabilities)


class _Second:
    def __init__(self) -> None:
        self.sent = self.failed = self.rows = 0
        self.latencies: list[float] = []
        self.versions: Counter[int] = Counter()


def _milliseconds(latencies: list[float], percentile: float) -> float | None:
    return round(float(np.percentile(latencies, percentile)) * 1e3, 3) if latencies else None
