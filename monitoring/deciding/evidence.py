"""What a policy is shown at one decision point, and what every policy promises.

Evidence comes from records alone (event times, no wall clock), so that a backtest over the archive shows a policy what
the live monitor showed it. Gathering it is left to `monitoring.deciding.judge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from monitoring.deciding.decision import Decision
from monitoring.measures.kpis import Kpis


@dataclass(frozen=True, kw_only=True, eq=False)
class MaturedRows:
    """Rows of the serving version that matured since the last decision point, ordered by (time, request id, row)."""

    labels: NDArray[np.uint8]
    """0 or 1, shape [n]."""
    scores: NDArray[np.float32]
    """Probabilities, shape [n]."""
    groups: NDArray[np.int64]
    """Request of each row, shape [n], numbered from 0: rows of one request share their user."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the gate measured of a version before it served."""

    auc: float
    low: float
    """Ends of the 95 % interval."""
    high: float


@dataclass(frozen=True, kw_only=True)
class FeatureDrift:
    """What `monitoring.drift` says of one closed bucket of predictions, all numbers of which exist."""

    bucket_end: float
    """Event time, seconds since the epoch."""
    version: int
    rows: int
    drifted: tuple[str, ...]
    """Columns that drifted after the multiple-test control, the worst first."""
    distances: Mapping[str, float]
    """Distance of each judged column."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """All that a policy may use."""

    time: float
    """The decision point: event time up to which every row is matured, seconds since the epoch."""
    version: int
    """The serving version."""
    serving_since: float
    """Event time of the serving version's first prediction since it serves, to within one decision span."""
    kpis: Kpis
    """Of the serving version's window."""
    rows: MaturedRows
    matured_total: int
    """Rows judged so far, of all versions; only grows."""
    baseline: Baseline | None
    """None where the model store holds no verdict on the version, or the gate had no AUC."""
    drift: tuple[FeatureDrift, ...]
    """The closed buckets of the serving version that no decision has seen yet, oldest first."""

    def window_numbers(self) -> dict[str, float | None]:
        """The window's numbers, as every decision reports them."""
        kpis = self.kpis
        return {
            "auc": kpis.auc,
            "auc_low": kpis.auc_low,
            "auc_high": kpis.auc_high,
            "rows": kpis.rows,
            "clicks": kpis.clicks,
            "version": self.version,
        }


Memory = Mapping[str, Any]
"""A policy's own memory, as JSON takes it; empty before the first decision."""


class Policy(Protocol):
    """Decides; pure: the same evidence and memory give the same decision and memory."""

    @property
    def name(self) -> str:
        """Names the policy in settings, decisions and metrics."""

    def decide(self, evidence: Evidence, memory: Memory) -> tuple[Decision, Memory]:
        """Judges one decision point; the second value is the memory for the next."""
