"""How a vocabulary grows: ids never move, new categories come after the known ones. Pure NumPy.

A category that disappears from the logs keeps its id (its embedding stays trained), and finds it again on return.
Counting is left to NVTabular's Categorify.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def extend_vocabulary(
    known: NDArray[np.int64], seen: NDArray[np.int64], counts: NDArray[np.int64], *, frequency_threshold: int
) -> NDArray[np.int64]:
    """`known` followed by the categories in `seen` that are new and frequent enough, most frequent first.

    Args:
        known: The vocabulary so far, in the order of ids.
        seen: Distinct categories of this round.
        counts: Sightings of each, same length.
        frequency_threshold: Sightings that a new category needs.

    Equally frequent ones are in the order of their values, so the result depends on the rows alone, not their order.

    >>> extend_vocabulary(np.array([7]), np.array([9, 7, 4, 5]), np.array([2, 9, 2, 1]), frequency_threshold=2)
    array([7, 4, 9])
    """
    is_new = (counts >= frequency_threshold) & ~np.isin(seen, known)
    values, counts = seen[is_new], counts[is_new]
    extended: NDArray[np.int64] = np.concatenate([known, values[np.lexsort((values, -counts))]]).astype(np.int64)
    return extended
