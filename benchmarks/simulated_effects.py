"""Compute the planted effects of rows that were changed after drawing, or drawn at another time."""

import numpy as np
from numpy.typing import NDArray

from demo.simulation.tables import INTERACTION_BUCKETS, Tables


def effects_of(
    tables: Tables, dense: NDArray[np.float32], categorical: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the sum of the planted effects of each row, as [n].

    The rows may have been drawn from other tables. A category that is not in `tables` has no
    effect. Integer values must be values that `tables` can draw.

    >>> from demo.simulation.simulator import Simulator
    >>> tables = Simulator.create(7).tables
    >>> rows = tables.draw(10_000, np.random.default_rng(0))
    >>> bool(np.allclose(effects_of(tables, rows.dense, rows.categorical), rows.effects, atol=1e-5))
    True
    """
    effects = np.zeros(len(dense), dtype=np.float32)
    for i, table in enumerate(tables.dense):
        found = np.minimum(
            np.searchsorted(table.values, dense[:, i]), len(table.values) - 1
        )  # `table.values` ascends
        effects += np.where(np.isnan(dense[:, i]), table.missing_effect, table.effects[found])
    buckets = []
    for i, column in enumerate(tables.categories):
        order = np.argsort(column.keys)
        keys = column.keys[order]
        found = np.minimum(np.searchsorted(keys, categorical[:, i]), len(keys) - 1)
        index = order[found]
        effects += np.where(
            keys[found] == categorical[:, i], column.weights[index], np.float32(0.0)
        )
        buckets.append(index % INTERACTION_BUCKETS)
    for a, b, weights in tables.interactions:
        effects += weights[buckets[a] * INTERACTION_BUCKETS + buckets[b]]
    return effects
