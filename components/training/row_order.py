"""Order of the training rows within one pass: shuffled, or in time order.

Replayed rows are mixed in evenly. The order depends only on the rows, the share of replayed rows
and the seed, so a resumed pass continues in the same order. `fit` decides the number of passes, and
whether a pass is shuffled or in time order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BLOCK_ROWS = 1 << 10
"""Number of adjacent rows in a block. In a long pass, blocks are shuffled as units."""
_MAX_BLOCKS = 1 << 10
"""Maximum number of blocks whose rows are shuffled together in a long pass. The blocks together
have a million rows, and the order of these rows takes 8 MB."""


def derived_seed(*numbers: int) -> int:
    """Return a seed below 2^32 that depends on every number and on their order.

    The last number must not be 0, because `SeedSequence` ignores zeros at the end.
    """
    assert numbers[-1] != 0
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@dataclass(frozen=True, kw_only=True)
class PassRows:
    """Rows of a pass."""

    num_new: int
    """Rows of the window, numbered from 0. A pass contains all of these rows."""
    num_old: int
    """Available replay rows, numbered after the rows of the window."""
    num_replayed: int
    """Replay rows of one pass, at most `num_old`."""

    def __len__(self) -> int:
        """Return the number of rows of one pass."""
        return self.num_new + self.num_replayed


def replayed(num_new: int, share: float, available: int) -> int:
    """Return how many replay rows to add to `num_new` new rows.

    Args:
        num_new: Number of new rows.
        share: Share of replay rows among all rows, in [0, 1).
        available: Number of available replay rows, which is the maximum of the result.

    >>> replayed(900, 0.1, 5000), replayed(900, 0.1, 50), replayed(900, 0.0, 50)
    (100, 50, 0)
    """
    return min(available, round(num_new * share / (1 - share)))


class PassOrder:
    """Row numbers of one pass in training order.

    A shuffled pass is shuffled in two steps, so that memory does not grow with its length and reads
    stay local. First, blocks of 1024 adjacent rows are permuted over the whole pass. Then the pass
    is divided into windows with equal numbers of blocks, at most 1024. The rows of each window are
    permuted. A batch therefore has rows from hundreds of positions of the pass.

    A pass in time order is divided into tenths. If a tenth has more than 1024 blocks, the windows
    are smaller. The rows of each window are permuted, so that no batch consists of a single
    request.

    Each pass uses replay rows at equal distances, starting at a different row.
    """

    def __init__(self, part: PassRows, seed: int, *, in_time_order: bool = False) -> None:
        self._part = part
        self._seed = seed
        self._offset = float(np.random.default_rng([seed, 1]).random())
        self._blocks: NDArray[np.int64] | None = None
        if in_time_order:
            self._window_rows = min(-(-len(part) // 10), _MAX_BLOCKS * _BLOCK_ROWS)
        else:
            # Only complete blocks are permuted, so that windows start at multiples of their length.
            num_blocks = -(-len(part) // _BLOCK_ROWS)
            self._blocks = np.append(
                np.random.default_rng(seed).permutation(num_blocks - 1), num_blocks - 1
            )
            num_windows = -(-num_blocks // _MAX_BLOCKS)
            self._window_rows = -(-num_blocks // num_windows) * _BLOCK_ROWS
        self._window = np.empty(0, np.int64)
        self._window_number = -1

    def __len__(self) -> int:
        return len(self._part)

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the row numbers at positions `start` to `stop`, or to the end of the pass."""
        stop = min(stop, len(self))
        chunks = [np.empty(0, np.int64)]
        while start < stop:
            number, at = divmod(start, self._window_rows)
            chunk = self._positions(number)[at : at + stop - start]
            chunks.append(chunk)
            start += len(chunk)
        return self._to_rows(np.concatenate(chunks))

    def _positions(self, number: int) -> NDArray[np.int64]:
        """Return window `number` as positions in time order. The latest window is cached."""
        if number != self._window_number:
            if self._blocks is None:
                positions = np.arange(number * self._window_rows, (number + 1) * self._window_rows)
            else:
                num_blocks = self._window_rows // _BLOCK_ROWS
                blocks = self._blocks[number * num_blocks : (number + 1) * num_blocks]
                positions = (blocks[:, None] * _BLOCK_ROWS + np.arange(_BLOCK_ROWS)).ravel()
            random = np.random.default_rng([self._seed, 2, number])
            self._window = random.permutation(positions[positions < len(self)])
            self._window_number = number
        return self._window

    def _to_rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        part = self._part
        # Number of replay rows before each position, and up to and including each position. The
        # replay rows are spread evenly over the pass.
        before, until = ((positions + end) * part.num_replayed // len(self) for end in (0, 1))
        rows = positions - before
        if part.num_replayed:
            is_replay = until > before
            drawn = (before[is_replay] + self._offset) * (part.num_old / part.num_replayed)
            rows[is_replay] = part.num_new + np.minimum(drawn.astype(np.int64), part.num_old - 1)
        return rows
