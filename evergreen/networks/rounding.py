"""Rounding of a model's tables for serving, to the trained precision or to fewer bits.

All rounding of tables happens in this module. `scoring` rounds the vectors that it looks up, and
the tables of the served graph are rounded by the same functions. Vectors are rounded independently
of each other, so the gate evaluates exactly the numbers that are served. Training never rounds
vectors.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.config.release import FLOAT32, INT8
from evergreen.networks.files import FloatArray, chunks

_LARGEST = 127
"""Largest int8 value that rounding produces. -128 is not used, so that every vector can be
negated."""


class RoundedTable(NamedTuple):
    """Embedding table for serving, or a part of its vectors. Each int8 vector has a scale."""

    values: NDArray[Any]
    """Rounded vectors, [rows, width], in the number type of the table."""
    scales: FloatArray | None = None
    """Scale of each vector, [rows, 1]. None if the vectors are not scaled."""

    def vectors(self) -> FloatArray:
        """Return the vectors as float32 [rows, width]."""
        wide: FloatArray = self.values.astype(np.float32, copy=False)
        with np.errstate(invalid="ignore"):
            return wide if self.scales is None else wide * self.scales


def round_table(table: FloatArray, numbers: str) -> RoundedTable:
    """Round a table to a number type.

    The table is read in chunks. For the number type float32, the given table is returned.

    Args:
        table: Vectors, [rows, width].
        numbers: Number type, one of `TABLE_TYPES`.

    >>> round_table(np.array([[0.5, -1.0], [0.0, 0.0]], np.float32), "int8").values.tolist()
    [[64, -127], [0, 0]]
    """
    if numbers == FLOAT32:
        return RoundedTable(table)
    values = np.empty(table.shape, numbers)
    scales = np.empty((len(table), 1), np.float32) if numbers == INT8 else None
    # For every number type, a value that is not finite makes its complete vector invalid. The gate
    # reports invalid vectors.
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in chunks(0, len(table)):
            part = table[rows]
            if scales is not None:
                scales[rows] = np.abs(part).max(axis=1, keepdims=True) / np.float32(_LARGEST)
                steps = np.rint(part / np.where(scales[rows] > 0, scales[rows], 1))
                part = steps.clip(-_LARGEST, _LARGEST)  # very small scales are inexact
            values[rows] = part
    return RoundedTable(values, scales)
