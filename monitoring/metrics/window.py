"""Keep the newest matured rows and ranked lists of each model version, and compute its KPIs.

`statistics.metrics` defines the KPIs. `monitoring.state.store` stores rows across restarts.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.records import NO_POSITION
from evergreen.statistics import metrics
from monitoring.rows import MaturedRequests

MAX_VERSIONS = 8
"""Maximum number of versions with rows. The version that got no rows for the longest time is
dropped first."""
_MAX_LISTS = 10_000
"""Number of newest ranked lists per version."""
RANKING_K = 10
"""Number of top positions in hit rate@k and NDCG@k."""


class RowWindow:
    """The newest `capacity` rows, oldest first."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._num_requests = capacity, 0
        self.labels: NDArray[np.uint8] = np.zeros(0, np.uint8)
        """Label of each row, 0 or 1, shape [n]."""
        self.scores: NDArray[np.float32] = np.zeros(0, np.float32)
        """Score of each row, a probability, shape [n]."""
        self.groups: NDArray[np.int64] = np.zeros(0, np.int64)
        """User number of each row, shape [n].

        A known user has a number of at least 0. For an unknown user, each request has a unique
        number below `MISSING_CATEGORY`.
        """

    def update(self, requests: MaturedRequests) -> None:
        """Add the rows of these requests, and drop the oldest rows beyond the capacity.

        Rows of one user form a group across requests. Rows of an unknown user form a group within
        their request.
        """
        unknown = (
            MISSING_CATEGORY
            - 1
            - self._num_requests
            - np.repeat(np.arange(len(requests)), requests.sizes)
        )
        groups = np.where(requests.users == MISSING_CATEGORY, unknown, requests.users)
        self.labels = np.concatenate([self.labels, requests.labels])[-self._capacity :]
        self.scores = np.concatenate([self.scores, requests.scores])[-self._capacity :]
        self.groups = np.concatenate([self.groups, groups])[-self._capacity :]
        self._num_requests += len(requests)


class RankedList(NamedTuple):
    """Outcome of the ranked list of one request."""

    is_hit: bool
    ndcg: float | None
    """NDCG@k of the list. None if there is no click."""


class VersionWindows:
    """Windows of all model versions including canaries, and each version's newest ranked lists."""

    def __init__(self, capacity: int, *, keep_lists: bool = True) -> None:
        """Start empty. `capacity` is the number of rows per window."""
        self._capacity, self._keep_lists = capacity, keep_lists
        self._lists: dict[int, deque[RankedList]] = {}
        self._windows: dict[int, RowWindow] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions with rows. The most recently updated version is last."""
        return tuple(self._windows)

    def __getitem__(self, version: int) -> RowWindow:
        """Return the window of `version`.

        Raises:
            KeyError: The version has no row.
        """
        return self._windows[version]

    def lists(self, version: int) -> tuple[RankedList, ...]:
        """Return the newest ranked lists of `version`, oldest first.

        The result is empty if no request to the version was a ranking.
        """
        return tuple(self._lists.get(version, ()))

    def update(self, requests: MaturedRequests) -> None:
        """Add the rows of these requests.

        A list that was shown in several requests counts once per request.
        """
        for version, of_version in requests.by_version():
            window = self._windows.pop(version, None) or RowWindow(self._capacity)
            self._windows[version] = window
            window.update(of_version)
            if self._keep_lists and (of_version.positions != NO_POSITION).any():
                self._lists.setdefault(version, deque(maxlen=_MAX_LISTS)).extend(
                    _ranked_lists(of_version)
                )
            if len(self._windows) > MAX_VERSIONS:
                forgotten = next(iter(self._windows))
                del self._windows[forgotten]
                self._lists.pop(forgotten, None)


def _ranked_lists(requests: MaturedRequests) -> Iterator[RankedList]:
    starts = requests.starts
    for start, size in zip(starts.tolist(), requests.sizes.tolist()):
        positions = requests.positions[start : start + size]
        if positions[0] != NO_POSITION:
            clicked = positions[requests.labels[start : start + size] == 1]
            yield RankedList(
                metrics.hit_at_k(clicked, k=RANKING_K), metrics.ndcg_at_k(clicked, k=RANKING_K)
            )


@dataclass(frozen=True, kw_only=True)
class Kpis:
    """KPIs of one model version. An undefined KPI is None."""

    version: int
    rows: int
    clicks: int
    auc: float | None
    """AUC of the window. None unless both classes are present."""
    auc_low: float | None
    """Lower end of the 95 % interval (DeLong, with rows grouped by user, or by request if the user
    is unknown). None if clicks or non-clicks come from too few groups."""
    auc_high: float | None
    log_loss: float | None
    calibration: float | None
    """Expected clicks per observed click. None if there is no click."""
    ctr: float | None
    normalized_entropy: float | None = None
    """Log loss divided by the entropy of the click rate. None unless both classes are present."""
    calibration_error: float | None = None
    """Expected calibration error (ECE) with bins of equal mass. None if there are fewer rows than
    bins."""
    ranked_lists: int | None = None
    """Number of newest ranked lists behind `hit_rate` and `ndcg`, or None."""
    hit_rate: float | None = None
    """Share of ranked lists with a click among the top k positions."""
    ndcg: float | None = None
    """Mean NDCG@k over the ranked lists with a click. None if no list has a click."""
    conversion_rate: float | None = None
    """Share of rows with a conversion, among the newest rows with a closed conversion window. None
    if there are no rows with a closed conversion window."""
    gauc: float | None = None
    """Mean AUC within users, weighted by their rows. None if no known user has both a click and a
    non-click."""


def measure(version: int, window: RowWindow) -> Kpis:
    """Compute the KPIs of the rows in `window`.

    20,000 rows take 5 ms.

    >>> measure(1, RowWindow(3)).auc is None
    True
    """
    labels, scores = window.labels, window.scores
    estimate = metrics.auc_estimate(labels, scores, groups=window.groups)
    is_known = window.groups > MISSING_CATEGORY
    within_users = metrics.user_quality(
        labels[is_known], scores[is_known], users=window.groups[is_known]
    )
    return Kpis(
        version=version,
        rows=len(labels),
        clicks=int(labels.sum()),
        auc=estimate.auc if estimate else metrics.roc_auc(labels, scores),
        auc_low=estimate.low if estimate else None,
        auc_high=estimate.high if estimate else None,
        log_loss=metrics.log_loss(labels, scores),
        calibration=metrics.calibration(labels, scores),
        ctr=float(labels.mean()) if len(labels) else None,
        normalized_entropy=metrics.normalized_entropy(labels, scores),
        calibration_error=metrics.expected_calibration_error(labels, scores),
        gauc=within_users.gauc,
    )


def measure_version(version: int, windows: VersionWindows) -> Kpis:
    """Compute the KPIs of the rows and ranked lists of `version`.

    Raises:
        KeyError: The version has no row.
    """
    kpis = measure(version, windows[version])
    if lists := windows.lists(version):
        gains = [each.ndcg for each in lists if each.ndcg is not None]
        kpis = replace(
            kpis,
            ranked_lists=len(lists),
            hit_rate=sum(each.is_hit for each in lists) / len(lists),
            ndcg=sum(gains) / len(gains) if gains else None,
        )
    return kpis
