"""The last matured rows of each model version, in arrays; its last ranked lists; its conversions.

In: labels, scores, times and places as requests mature. Out: the newest of them. What they say is left to
`monitoring.measures.kpis`; keeping them over a restart to `monitoring.memory.store`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts import metrics
from components.runtime.errors import ContractError

MAX_VERSIONS = 8
"""Versions whose rows are kept; the one unseen for longest is forgotten first."""
MAX_TIMED_ROWS = 1_000_000
"""Rows that a window of time holds at most: 26 MB a version. Its AUC then takes some 100 ms per decision point."""
MAX_LISTS = 10_000
"""Newest ranked lists of a version that are kept."""
MAX_SETTLED = 20_000
"""Newest requests of a version whose closed conversion windows are kept."""
_FIRST_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """What is measured besides the window of records."""

    window_seconds: float = 0.0
    """Length of a window of prediction time whose AUC is measured beside that of the window of records; 0 = none."""
    ranking_k: int = 10
    """Places of a ranked list that count in its hit rate@k and NDCG@k."""

    def __post_init__(self) -> None:
        """Refuses windows that hold nothing."""
        if not self.window_seconds >= 0:
            raise ContractError(f"window_seconds is {self.window_seconds}, expected at least 0")
        if self.ranking_k < 1:
            raise ContractError(f"ranking_k is {self.ranking_k}, expected at least 1")


class TimedRows(NamedTuple):
    """Rows in the order in which they matured; views, valid until the next update."""

    labels: NDArray[np.uint8]
    scores: NDArray[np.float32]
    times: NDArray[np.float64]
    """When they were predicted, seconds since the epoch."""


class RowWindow:
    """The newest `capacity` rows, oldest first, and behind them up to `held` rows for windows of time.

    >>> window = RowWindow(3)
    >>> window.update(np.array([0, 1], np.uint8), np.array([0.1, 0.2], np.float32))
    >>> window.update(np.array([1, 0], np.uint8), np.array([0.5, 0.25], np.float32))
    >>> window.labels.tolist(), window.scores.tolist()[1:]
    ([1, 1, 0], [0.5, 0.25])
    """

    def __init__(self, capacity: int, held: int = 0) -> None:
        """Empty; grows as rows come."""
        self._capacity, self._held = capacity, max(capacity, held)
        # The live rows are one slice, moved to the front when the room behind is used up: once per as many rows.
        self._labels, self._scores = np.zeros(0, np.uint8), np.zeros(0, np.float32)
        self._times = np.zeros(0)
        self._end = 0

    def __len__(self) -> int:
        """Rows in the window of records."""
        return min(self._end, self._capacity)

    @property
    def labels(self) -> NDArray[np.uint8]:
        """0 or 1, shape [n]; a view, valid until the next update."""
        return self._labels[self._end - len(self) : self._end]

    @property
    def scores(self) -> NDArray[np.float32]:
        """Probabilities, shape [n]; a view, valid until the next update."""
        return self._scores[self._end - len(self) : self._end]

    def within(self, seconds: float) -> TimedRows:
        """The rows predicted in the half-open interval (t - seconds, t], t the newest prediction's time."""
        held = slice(self._end - min(self._end, self._held), self._end)
        times = self._times[held]
        recent = times > times.max(initial=-np.inf) - seconds
        if recent.all():
            return TimedRows(self._labels[held], self._scores[held], times)
        return TimedRows(self._labels[held][recent], self._scores[held][recent], times[recent])

    def update(self, labels: NDArray[np.uint8], scores: NDArray[np.float32], predicted_at: float = 0.0) -> None:
        """Takes in rows of one time, oldest first, and lets as many of the oldest go; `within` needs the time."""
        labels, scores = labels[-self._held :], scores[-self._held :]
        new_end = self._end + len(labels)
        if new_end > len(self._labels):
            new_end = self._make_room(len(labels)) + len(labels)
        new = slice(self._end, new_end)
        self._labels[new] = labels
        self._scores[new] = scores
        self._times[new] = predicted_at
        self._end = new_end

    def _make_room(self, count: int) -> int:
        """Moves the rows still needed to the front of twice their room; where they end."""
        kept = min(self._end, self._held)
        room = max(min(2 * self._held, 2 * (kept + count)), kept + count, min(_FIRST_ROWS, 2 * self._held))
        for name in ("_labels", "_scores", "_times"):
            old = getattr(self, name)
            moved = np.zeros(room, old.dtype)
            moved[:kept] = old[self._end - kept : self._end]
            setattr(self, name, moved)
        self._end = kept
        return kept


class RankedList(NamedTuple):
    """What became of the ranked list of one request."""

    is_hit: bool
    ndcg: float | None
    """None without a click."""


class _SettledWindow:
    """Sums over the newest requests whose conversion window has closed."""

    def __init__(self) -> None:
        self._each: deque[tuple[int, int]] = deque()
        self.rows = self.converted = 0

    def update(self, rows: int, converted: int) -> None:
        self._each.append((rows, converted))
        self.rows, self.converted = self.rows + rows, self.converted + converted
        if len(self._each) > MAX_SETTLED:
            rows, converted = self._each.popleft()
            self.rows, self.converted = self.rows - rows, self.converted - converted


class VersionWindows:
    """One `RowWindow` per model version, and which version serves now.

    The serving version is that of the newest prediction, matured or not: rows of an old version go on maturing for a
    whole attribution window after a release, and must not be judged any more. It is not the highest number: a
    rollback serves an older one. Nor is it a canary, which answers a share of the traffic beside it: its rows have a
    window of their own, and it serves once it answers as no canary.
    """

    def __init__(self, capacity: int, *, seconds: float = 0.0, k: int = 10) -> None:
        """Empty.

        Args:
            capacity: Rows of each version's window of records.
            seconds: Length of each version's window of time; 0 = none.
            k: Places of a ranked list that count.
        """
        self._capacity = capacity
        self._k = k
        self.seconds = seconds
        self._lists: dict[int, deque[RankedList]] = {}
        self._settled: dict[int, _SettledWindow] = {}
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

    def lists(self, version: int) -> tuple[RankedList, ...]:
        """The newest ranked lists of `version`, oldest first; none where it answered no ranking."""
        return tuple(self._lists.get(version, ()))

    def conversion_rate(self, version: int) -> float | None:
        """Share of rows with a conversion, of the newest whose conversion window has closed; None where none's has."""
        settled = self._settled.get(version)
        return settled.converted / settled.rows if settled and settled.rows else None

    def update(
        self,
        version: int,
        labels: NDArray[np.uint8],
        scores: NDArray[np.float32],
        *,
        predicted_at: float,
        positions: NDArray[np.int32] | None = None,
    ) -> None:
        """Takes in the rows of one request.

        Args:
            version: Model version.
            labels: 0 or 1, shape [n].
            scores: Probabilities, shape [n].
            predicted_at: Seconds since the epoch.
            positions: Places in the ranked list that the request was, from 1, shape [n]; None = it was no list. A list
                shown in several requests counts as several.
        """
        window = self._windows.pop(version, None) or self._new_window()
        self._windows[version] = window
        window.update(labels, scores, predicted_at)
        if positions is not None:
            clicked = positions[labels == 1]
            found = RankedList(metrics.hit_at_k(clicked, k=self._k), metrics.ndcg_at_k(clicked, k=self._k))
            self._lists.setdefault(version, deque(maxlen=MAX_LISTS)).append(found)
        self.note_prediction(version, predicted_at)
        if len(self._windows) > MAX_VERSIONS:
            forgotten = next(iter(self._windows))
            for each in (self._windows, self._lists, self._settled):
                each.pop(forgotten, None)

    def note_conversions(self, version: int, rows: int, converted: int) -> None:
        """Takes in one request whose conversion window has closed: its rows, and how many of them were converted."""
        if version in self._windows:
            self._settled.setdefault(version, _SettledWindow()).update(rows, converted)

    def _new_window(self) -> RowWindow:
        return RowWindow(self._capacity, MAX_TIMED_ROWS if self.seconds else 0)
