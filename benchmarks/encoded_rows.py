"""Generate encoded rows with a planted click logit, for tables of a given size.

The table with 1,221,286 rows comes from NVIDIA's DCN sample. The 26 slot sizes of this table come
from one day of Criteo 1TB, encoded by NVTabular. Ids have a probability of about 1 / (id + 1), a
Zipf distribution with exponent 1. Ids of real click logs have a similar distribution, because
Categorify orders categories by frequency. The true logit is the sum of one weight per id and of the
weighted dense values. A list contributes the pooled weights of its elements to the logit. A list
has any number of elements up to its maximum. Id 0 is the padding, so it is never an element.
"""

import numpy as np
from numpy.typing import NDArray

from components.training.rows import Rows
from evergreen.config.features import Features
from evergreen.contracts.criteo import CRITEO, NUM_DENSE
from evergreen.contracts.workflow import PADDING_ID

SAMPLE_SLOT_SIZES = [
    203931,
    18598,
    14092,
    7012,
    18977,
    4,
    6385,
    1245,
    49,
    186213,
    71328,
    67288,
    11,
    2168,
    7338,
    61,
    4,
    932,
    15,
    204515,
    141526,
    199433,
    60919,
    9137,
    71,
    34,
]
_LARGE_SLOT = 10_000
"""Number of ids above which a slot grows with the size of the sample. In a smaller slot, all
categories occur already in the sample."""
_BIAS = -1.2
_WEIGHT_OF_ID, _WEIGHT_OF_DENSE = 0.3, 0.2
"""Standard deviations of the weights. With 26 slots and 13 values, the Bayes-optimal AUC is about
0.83."""


def slot_sizes_for(table_rows: int) -> list[int]:
    """Return the sample's slot sizes with about `table_rows` rows in total.

    Only slots with more than `_LARGE_SLOT` ids are scaled.
    """
    large = sum(size for size in SAMPLE_SLOT_SIZES if size > _LARGE_SLOT)
    factor = (table_rows - (sum(SAMPLE_SLOT_SIZES) - large)) / large
    return [round(size * factor) if size > _LARGE_SLOT else size for size in SAMPLE_SLOT_SIZES]


class PlantedLogit:
    """Generator of rows with a known click probability."""

    def __init__(
        self, slot_sizes: list[int], seed: int = 1, *, features: Features = CRITEO
    ) -> None:
        """Draw the weights.

        `features` are Criteo's columns, and may include lists of their categories.
        """
        random = np.random.default_rng(seed)
        self.slot_sizes, self._positions = slot_sizes, features.positions
        self._by_id = [
            _WEIGHT_OF_ID * random.standard_normal(size, np.float32) for size in slot_sizes
        ]
        self._by_dense = _WEIGHT_OF_DENSE * random.standard_normal(NUM_DENSE, np.float32)

    def draw(self, num_rows: int, seed: int) -> tuple[Rows, NDArray[np.float32]]:
        """Return `num_rows` rows and their true logits [n]."""
        random = np.random.default_rng(seed)
        dense = random.standard_normal((num_rows, NUM_DENSE), np.float32)
        ids = np.empty((num_rows, len(self._positions.slots)), np.int32)
        logits = dense @ self._by_dense + np.float32(_BIAS)
        for slot, (size, weights) in enumerate(zip(self.slot_sizes, self._by_id)):
            # The formula inverts the distribution function log(1 + id) / log(1 + size).
            drawn = np.expm1(random.random(num_rows) * np.log1p(size)).astype(np.int32)
            ids[:, slot] = np.minimum(drawn, size - 1)
            logits += weights[ids[:, slot]]
        for start, stop, pool in self._positions.lists:
            slot, shape = self._positions.slots[start], (num_rows, stop - start)
            drawn = np.expm1(random.random(shape) * np.log1p(self.slot_sizes[slot])).astype(
                np.int32
            )
            is_there = np.arange(shape[1]) < random.integers(
                0, shape[1], (num_rows, 1), endpoint=True
            )
            ids[:, start:stop] = np.where(
                is_there, np.clip(drawn, 1, self.slot_sizes[slot] - 1), PADDING_ID
            )
            pooled = np.where(is_there, self._by_id[slot][ids[:, start:stop]], np.float32(0)).sum(
                axis=1
            )
            logits += pooled / np.maximum(is_there.sum(axis=1), 1) if pool == "mean" else pooled
        labels = (random.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        return Rows(labels=labels, dense=dense, ids=ids), logits
