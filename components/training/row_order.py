"""The order in which one pass learns its rows: shuffled, or in time order.

Replayed rows are mixed in evenly; rows, share and seed decide it all, so a resumed pass goes on in the same order. How
many passes there are, and which order they take, is `fit`'s.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RUN_ROWS = 1 << 10
"""Neighbouring rows that move together in a long pass."""
_MOST_RUNS = 1 << 10
"""Runs that are shuffled into each other in a long pass, at most: a million rows, whose order takes 8 MB."""


def derived_seed(*numbers: int) -> int:
    """A seed below 2^32 that changes with every number and with their order; the last must not be 0.

    (NumPy takes numbers that end in zeros for the shorter ones.)
    """
    assert numbers[-1] != 0
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@dataclass(frozen=True, kw_only=True)
class PassRows:
    """Which rows a pass goes over."""

    num_new: int
    """Rows of the window, from number 0 on; all take part."""
    num_old: int
    """Replay rows, which follow them."""
    num_replayed: int
    """Those of one pass, at most as many as there are."""

    def __len__(self) -> int:
        """Rows of one pass."""
        return self.num_new + self.num_replayed


def replayed(num_new: int, share: float, available: int) -> int:
    """Replay rows beside `num_new` new ones that make `share` (in [0, 1)) of all, at most those available.

    >>> replayed(900, 0.1, 5000), replayed(900, 0.1, 50), replayed(900, 0.0, 50)
    (100, 50, 0)
    """
    return min(available, round(num_new * share / (1 - share)))


class PassOrder:
    """The row numbers of one pass, in the order in which they are learned.

    Shuffled, they take two steps, so that the order of a long pass needs no memory of its length and its reads stay
    near each other: runs of 1024 neighbouring rows change places over the whole pass, then windows of equally many such
    runs, 1024 at most, are permuted row by row. A batch so holds rows of hundreds of places of the pass. In time order
    tenths of the pass, at most as long as those windows, are permuted row by row, so that no batch is of one request.
    Of the replay rows, evenly spaced ones take part, other ones in each pass.
    """

    def __init__(self, part: PassRows, seed: int, *, in_time_order: bool = False) -> None:
        self._part = part
        self._seed = seed
        self._offset = float(np.random.default_rng([seed, 1]).random())
        self._runs: NDArray[np.int64] | None = None
        if in_time_order:
            self._window_rows = min(-(-len(part) // 10), _MOST_RUNS * _RUN_ROWS)
        else:
            # Only whole runs change places: windows then begin at multiples of their length.
            num_runs = -(-len(part) // _RUN_ROWS)
            self._runs = np.append(np.random.default_rng(seed).permutation(num_runs - 1), num_runs - 1)
            num_windows = -(-num_runs // _MOST_RUNS)
            self._window_rows = -(-num_runs // num_windows) * _RUN_ROWS
        self._window = np.empty(0, np.int64)
        self._window_number = -1

    def __len__(self) -> int:
        return len(self._part)

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The row numbers at positions `start` to `stop`, the end of the pass at most."""
        stop = min(stop, len(self))
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            number, at = divmod(start, self._window_rows)
            piece = self._positions(number)[at : at + stop - start]
            pieces.append(piece)
            start += len(piece)
        return self._to_rows(np.concatenate(pieces))

    def _positions(self, number: int) -> NDArray[np.int64]:
        """Window `number` as positions in time order; the last one made is kept."""
        if number != self._window_number:
            if self._runs is None:
                positions = np.arange(number * self._window_rows, (number + 1) * self._window_rows)
            else:
                num_runs = self._window_rows // _RUN_ROWS
                runs = self._runs[number * num_runs : (number + 1) * num_runs]
                positions = (runs[:, None] * _RUN_ROWS + np.arange(_RUN_ROWS)).ravel()
            random = np.random.default_rng([self._seed, 2, number])
            self._window = random.permutation(positions[positions < len(self)])
            self._window_number = number
        return self._window

    def _to_rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        part = self._part
        # Replay rows at or before each position, so that every stretch of the pass holds its share of them.
        before, until = ((positions + end) * part.num_replayed // len(self) for end in (0, 1))
        rows = positions - before
        if part.num_replayed:
            is_replay = until > before
            drawn = (before[is_replay] + self._offset) * (part.num_old / part.num_replayed)
            rows[is_replay] = part.num_new + np.minimum(drawn.astype(np.int64), part.num_old - 1)
        return rows
