"""The last matured rows of each model version, in arrays.

In: labels and scores as requests mature. Out: the newest `capacity` of them. What they say is left to
`monitoring.measures.kpis`; keeping them over a restart to `monitoring.memory.store`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_VERSIONS = 8
"""Versions whose rows are kept; the one unseen for longest is forgotten first."""


class RowWindow:
    """The newest `capacity` rows, oldest first.

    >>> window = RowWindow(3)
    >>> window.update(np.array([0, 1], np.uint8), np.array([0.1, 0.2], np.float32))
    >>> window.update(np.array([1, 0], np.uint8), np.array([0.5, 0.25], np.float32))
    >>> window.labels.tolist(), window.scores.tolist()[1:]
    ([1, 1, 0], [0.5, 0.25])
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Twice the capacity: the live rows are one slice, moved to the front once per `capacity` rows.
        self._labels = np.zeros(2 * capacity, np.uint8)
        self._scores = np.zeros(2 * capacity, np.float32)
        self._end = 0

    def __len__(self) -> int:
        """Rows held."""
        return min(self._end, self._capacity)

    @property
    def labels(self) -> NDArray[np.uint8]:
        """0 or 1, shape [n]; a view, valid until the next update."""
        return self._labels[self._end - len(self) : self._end]

    @property
    def scores(self) -> NDArray[np.float32]:
        """Probabilities, shape [n]; a view, valid until the next update."""
        return self._scores[self._end - len(self) : self._end]

    def update(self, labels: NDArray[np.uint8], scores: NDArray[np.float32]) -> None:
        """Takes in rows, oldest first, and lets as many of the oldest go."""
        labels, scores = labels[-self._capacity :], scores[-self._capacity :]
        if self._end + len(labels) > len(self._labels):
            kept = len(self)
            self._labels[:kept], self._scores[:kept] = self.labels.copy(), self.scores.copy()
            self._end = kept
        new_end = self._end + len(labels)
        self._labels[self._end : new_end], self._scores[self._end : new_end] = labels, scores
        self._end = new_end


class VersionWindows:
    """One `RowWindow` per model version, and which version serves now.

    The serving version is that of the newest prediction, matured or not: rows of an old version go on maturing for a
    whole attribution window after a release, and must not be judged any more. It is not the highest number: a
    rollback serves an older one. Nor is it a canary, which answers a share of the traffic beside it: its rows have a
    window of their own, and it serves once it answers as no canary.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._windows: dict[int, RowWindow] = {}
        self._newest: tuple[float, int] | None = None
        self.canaries: set[int] = set()
        """Versions that answered last as canaries."""

    @property
    def serving_version(self) -> int | None:
        """The version that serves now; None before the first prediction."""
        return self._newest[1] if self._newest else None

    def note_arm(self, version: int, *, is_canary: bool) -> bool:
        """Takes in as what `version` answered; whether that is news."""
        # A late record of a canary that serves by now is no way back.
        if is_canary == (version in self.canaries) or (is_canary and version == self.serving_version):
            return False
        self.canaries ^= {version}
        return True

    def note_prediction(self, version: int, predicted_at: float) -> None:
        """Takes in that `version` made a prediction; a canary's is no sign of who serves."""
        if version in self.canaries:
            return
        if self._newest is None or (predicted_at, version) >= self._newest:
            self._newest = (predicted_at, version)

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

    def update(self, version: int, predicted_at: float, labels: NDArray[np.uint8], scores: NDArray[np.float32]) -> None:
        """Takes in the rows of one request."""
        window = self._windows.pop(version, None) or RowWindow(self._capacity)
        self._windows[version] = window
        window.update(labels, scores)
        self.note_prediction(version, predicted_at)
        if len(self._windows) > MAX_VERSIONS:
            del self._windows[next(iter(self._windows))]
