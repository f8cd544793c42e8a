"""Simulated labels and scores with a known AUC, to test when a policy first requests a run.

Rows are independent, or all rows of a request share a user.

The scores are binormal: scores of non-clicks are standard normal, and scores of clicks are shifted,
so that AUC = Phi(shift / sqrt 2). AUC depends only on the order of the scores, so the scores need
not be probabilities.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from evergreen.config.monitor import PolicySettings
from evergreen.events.event_log import partition_of
from evergreen.statistics.metrics import auc_estimate
from monitoring.metrics.window import Kpis
from monitoring.policies.policies import SequentialPolicy
from monitoring.policies.policy import Action, Baseline, Evidence, MaturedRows, Policy


@dataclass(frozen=True)
class ClickTraffic:
    """Parameters of simulated rows."""

    rate: float
    """Share of clicks."""
    rows_per_decision: int
    rows_per_request: int = 1
    user_spread: float = 0.0
    """Standard deviation of the effect of a user. All rows of a user have the same effect, which is
    added to the score and to the log-odds of a click."""


def draw(random: Generator, traffic: ClickTraffic, *, rows: int, auc: float) -> MaturedRows:
    """Draw `rows` rows. `auc` is the AUC among rows of one user.

    If users do not differ, `auc` is also the AUC over all rows.
    """
    requests = -(-rows // traffic.rows_per_request)
    groups = np.repeat(np.arange(requests), traffic.rows_per_request)[:rows]
    shift = np.float32(np.sqrt(2.0) * NormalDist().inv_cdf(auc))
    scores = random.standard_normal(rows, np.float32)
    if traffic.user_spread:
        user = random.standard_normal(requests, np.float32) * np.float32(traffic.user_spread)
        odds = traffic.rate / (1.0 - traffic.rate) * np.exp(user - traffic.user_spread**2 / 2)
        labels = random.random(rows, np.float32) < (odds / (1.0 + odds))[groups]
        scores += user[groups]
    else:
        labels = random.random(rows, np.float32) < np.float32(traffic.rate)
    scores += shift * labels
    return MaturedRows(labels=labels.astype(np.uint8), scores=scores, groups=groups)


def draw_returning(
    random: Generator, *, users: int, requests: int
) -> tuple[MaturedRows, NDArray[np.int64]]:
    """Draw requests of four rows from users who return equally often, in random order.

    Each user has a tendency to click, and an independent bias of the scores.

    Returns:
        The rows, and the user of each row.
    """
    user = np.repeat(random.permutation(np.arange(requests) % users), 4)
    known, (tendency, bias) = (
        random.normal(-1.0, 1.0, 4 * requests),
        random.normal(0.0, 1.0, (2, users)),
    )
    labels = random.random(4 * requests) < 1.0 / (1.0 + np.exp(-known - tendency[user]))
    scores = (1.0 / (1.0 + np.exp(-known - bias[user]))).astype(np.float32)
    return MaturedRows(
        labels=labels.astype(np.uint8), scores=scores, groups=np.repeat(np.arange(requests), 4)
    ), user


def joined(first: MaturedRows, second: MaturedRows) -> MaturedRows:
    """Return the rows of `first` followed by the rows of `second`."""
    return MaturedRows(
        labels=np.concatenate((first.labels, second.labels)),
        scores=np.concatenate((first.scores, second.scores)),
        groups=np.concatenate((first.groups, second.groups + first.groups[-1] + 1)),
    )


def part(rows: MaturedRows, begin: int, end: int) -> MaturedRows:
    """Return the rows from `begin` to `end` as evidence at one decision point.

    `begin` and `end` must be multiples of the number of rows per request.
    """
    groups: NDArray[np.int64] = rows.groups[begin:end]
    return MaturedRows(
        labels=rows.labels[begin:end], scores=rows.scores[begin:end], groups=groups - groups[0]
    )


def of_partition(rows: MaturedRows, name: str, *, partitions: int) -> MaturedRows:
    """Return the rows of the requests that the client sends to partition 0 of `partitions`.

    The ids of the requests start with `name`.
    """
    requests, numbers = np.unique(rows.groups, return_inverse=True)
    chosen = np.array(
        [partition_of(f"{name}, request {request}", partitions) == 0 for request in requests]
    )[numbers]
    return MaturedRows(
        labels=rows.labels[chosen], scores=rows.scores[chosen], groups=rows.groups[chosen]
    )


NO_KPIS = Kpis(
    version=1,
    rows=0,
    clicks=0,
    auc=None,
    auc_low=None,
    auc_high=None,
    log_loss=None,
    calibration=None,
    ctr=None,
)


class Windows:
    """KPIs of a stream's windows.

    A window has up to `rows` rows. All policies share the computed KPIs.
    """

    def __init__(self, stream: MaturedRows, rows: int) -> None:
        self._stream, self._rows, self._known = stream, rows, dict[int, Kpis]()

    def kpis(self, end: int) -> Kpis:
        """Return the AUC with its interval.

        The AUC is computed only if there are enough clicks for some policy.
        """
        if end not in self._known:
            begin = max(0, end - self._rows)
            labels = self._stream.labels[begin:end]
            clicks = int(labels.sum())
            is_evaluated = clicks >= PolicySettings.min_clicks
            scores, groups = self._stream.scores[begin:end], self._stream.groups[begin:end]
            found = auc_estimate(labels, scores, groups=groups) if is_evaluated else None
            self._known[end] = replace(
                NO_KPIS,
                rows=end - begin,
                clicks=clicks,
                auc=found.auc if found else None,
                auc_low=found.low if found else None,
                auc_high=found.high if found else None,
            )
        return self._known[end]


def first_run(
    policy: Policy,
    stream: MaturedRows,
    *,
    step: int,
    windows: Windows | None,
    gate_auc: float,
    after: int = 0,
) -> int | None:
    """Return the row at which `policy` first requests a run, or None if it never does.

    Args:
        policy: See `policies.policy.Policy`.
        stream: Rows in temporal order.
        step: Rows per decision point.
        windows: KPIs of the stream's windows. None if the policy does not use KPIs.
        gate_auc: AUC that the gate measured. The gate's interval has width 0.
        after: Number of the first row after a drift. Earlier requests for a run are ignored, unless
            they come from the sequential test.
    """
    state: Any = {}
    for begin in range(0, len(stream.labels), step):
        end = min(begin + step, len(stream.labels))
        evidence = Evidence(
            time=float(end),
            version=1,
            serving_since=0.0,
            seen_until=float(end),
            kpis=NO_KPIS
            if windows is None or policy.name == SequentialPolicy.name
            else windows.kpis(end),
            rows_of={1: part(stream, begin, end)},
            lineage=(1,),
            matured_total=end,
            baselines={1: Baseline(auc=gate_auc, low=gate_auc, high=gate_auc)},
            drift=(),
        )
        decision, state = policy.decide(evidence, state)
        if decision.action is Action.RETRAIN and (
            end > after or policy.name == SequentialPolicy.name
        ):
            return end
    return None
