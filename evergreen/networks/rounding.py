"""A model's tables as they are served: as they were learned, or in fewer bits.

The one place that rounds. `scoring` rounds the vectors that it looks up, the served graph holds tables that were
rounded by the same functions, and a vector is rounded by itself alone: so the gate judges the very numbers that are
served. Training never rounds.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.config.release import FLOAT32, INT8
from evergreen.networks.files import FloatArray, chunks

_LARGEST = 127
"""Of an int8 number; -128 is not used, so that a vector's sign can be changed."""


class RoundedTable(NamedTuple):
    """A table, or some vectors, as they are served: the numbers, times the scales where there are some."""

    values: NDArray[Any]
    """[rows, width], of the numbers' type."""
    scales: FloatArray | None = None
    """[rows, 1]; None where the numbers are the vectors'."""

    def vectors(self) -> FloatArray:
        """What a look-up gives, [rows, width]."""
        wide: FloatArray = self.values.astype(np.float32, copy=False)
        with np.errstate(invalid="ignore"):
            return wide if self.scales is None else wide * self.scales


def round_table(table: FloatArray, numbers: str) -> RoundedTable:
    """The `table` [rows, width] in `numbers`; it is read in pieces, and float32 is the table itself.

    >>> round_table(np.array([[0.5, -1.0], [0.0, 0.0]], np.float32), "int8").values.tolist()
    [[64, -127], [0, 0]]
    """
    if numbers == FLOAT32:
        return RoundedTable(table)
    values = np.empty(table.shape, numbers)
    scales = np.empty((len(table), 1), np.float32) if numbers == INT8 else None
    # A number that is not finite spoils its vector here as it does in float32: a finding for the gate, not for this.
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in chunks(0, len(table)):
            part = table[rows]
            if scales is not None:
                scales[rows] = np.abs(part).max(axis=1, keepdims=True) / np.float32(_LARGEST)
                steps = np.rint(part / np.where(scales[rows] > 0, scales[rows], 1))
                part = steps.clip(-_LARGEST, _LARGEST)  # scales of the least numbers are not exact
            values[rows] = part
    return RoundedTable(values, scales)
