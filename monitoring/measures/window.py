"""The last matured rows of each model version, in arrays, and its last ranked lists.

In: labels, scores and places as requests mature. Out: the newest of them. What they say is left to
`monitoring.measures.kpis`; keeping them over a restart to `monitoring.memory.store`.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts import metrics
from components.contracts.features import MISSING_CATEGORY

MAX_VERSIONS = 8
"""Versions whose rows are kept; the one unseen for longest is forgotten first."""
MAX_LISTS = 10_000
"""Newest ranked lists of a version that are kept."""
RANKING_K = 10
"""Places of a ranked list that count in its hit rate@k and NDCG@k."""


class RowWindow:
    """The newest `capacity` rows, oldest first.

    >>> window = RowWindow(3)
    >>> window.update(np.array([0, 1], np.uint8), np.array([0.1, 0.2], np.float32))
    >>> window.update(np.array([1, 0], np.uint8), np.array([0.5, 0.25], np.float32))
    >>> window.labels.tolist(), window.scores.tolist()[1:], window.groups.tolist()
    ([1, 1, 0], [0.5, 0.25], [-2, -3, -3])
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # The live rows are one slice, moved to the front when the room behind is used up: once per as many rows.
        self._labels, self._scores = np.zeros(2 * capacity, np.uint8), np.zeros(2 * capacity, np.float32)
        self._groups = np.zeros(2 * capacity, np.int64)
        self._end = self._num_requests = 0

    def __len__(self) -> int:
        return min(self._end, self._capacity)

    @property
    def labels(self) -> NDArray[np.uint8]:
        """0 or 1, shape [n]; a view, valid until the next update."""
        return self._labels[self._end - len(self) : self._end]

    @property
    def scores(self) -> NDArray[np.float32]:
        """Probabilities, shape [n]; a view, valid until the next update."""
        return self._scores[self._end - len(self) : self._end]

    @property
    def groups(self) -> NDArray[np.int64]:
        """Whose each row is, shape [n]: a user from 0, or a request below `MISSING_CATEGORY`; a view, as `labels`."""
        return self._groups[self._end - len(self) : self._end]

    def update(
        self, labels: NDArray[np.uint8], scores: NDArray[np.float32], users: NDArray[np.int64] | None = None
    ) -> None:
        """Takes in the rows of one request, and lets as many of the oldest go.

        Rows of one user are alike whatever the request; those of an unknown one are alike within the request.
        """
        labels, scores = labels[-self._capacity :], scores[-self._capacity :]
        groups = np.full(len(labels), MISSING_CATEGORY - 1 - self._num_requests)
        if users is not None:
            users = users[-self._capacity :]
            groups = np.where(users == MISSING_CATEGORY, groups, users)
        if self._end + len(labels) > len(self._labels):
            kept = len(self)
            self._labels[:kept], self._scores[:kept], self._groups[:kept] = self.labels, self.scores, self.groups
            self._end = kept
        new = slice(self._end, self._end + len(labels))
        self._labels[new], self._scores[new], self._groups[new] = labels, scores, groups
        self._end = new.stop
        self._num_requests += 1


class RankedList(NamedTuple):
    """What became of the ranked list of one request."""

    is_hit: bool
    ndcg: float | None
    """None without a click."""


class VersionWindows:
    """One `RowWindow` per model version, and its newest ranked lists; a canary has a window as well."""

    def __init__(self, capacity: int) -> None:
        """Empty; `capacity` is the number of rows of each version's window."""
        self._capacity = capacity
        self._lists: dict[int, deque[RankedList]] = {}
        self._windows: dict[int, RowWindow] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions with rows, the one seen last at the end."""
        return tuple(self._windows)

    def __getitem__(self, version: int) -> RowWindow:
        """The rows of `version`.

        Raises:
            KeyError: no row of it is held.
        """
        return self._windows[version]

    def lists(self, version: int) -> tuple[RankedList, ...]:
        """The newest ranked lists of `version`, oldest first; none where it answered no ranking."""
        return tuple(self._lists.get(version, ()))

    def update(
        self,
        version: int,
        labels: NDArray[np.uint8],
        scores: NDArray[np.float32],
        *,
        positions: NDArray[np.int32] | None = None,
        users: NDArray[np.int64] | None = None,
    ) -> None:
        """Takes in the rows of one request.

        Arrays are [n]. `positions` are places, from 1, in the ranked list that the request was, None = it was no list;
        a list shown in several requests counts as several. `users` None = the recommender names none.
        """
        window = self._windows.pop(version, None) or RowWindow(self._capacity)
        self._windows[version] = window
        window.update(labels, scores, users)
        if positions is not None:
            clicked = positions[labels == 1]
            found = RankedList(metrics.hit_at_k(clicked, k=RANKING_K), metrics.ndcg_at_k(clicked, k=RANKING_K))
            self._lists.setdefault(version, deque(maxlen=MAX_LISTS)).append(found)
        if len(self._windows) > MAX_VERSIONS:
            forgotten = next(iter(self._windows))
            del self._windows[forgotten]
            self._lists.pop(forgotten, None)
