"""Rows from a set of tables, and the planted effects of given rows: what a world and a drifting world share.

Which tables there are is `world`'s and `slow_drift`'s; how effects become probabilities is theirs too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.runtime.errors import ContractError
from inference_client.simulation.columns import INTERACTION_BUCKETS
from inference_client.simulation.tables import CategoryTable, DenseTable

Lookup = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All columns of a world at one time."""

    dense: list[DenseTable]
    """One per integer column."""
    categories: list[CategoryTable]
    """One per categorical column."""
    interactions: list[tuple[int, int, NDArray[np.float32]]]
    """(column, column, weights [buckets * buckets]) each."""

    def draw(self, n: int, random: Generator) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
        """`n` independent rows: dense [n, 13], categorical [n, 26] and the sum of their effects [n]."""
        effects = np.zeros(n, dtype=np.float32)
        present_of: dict[float, NDArray[np.bool_]] = {}

        def present(missing: float) -> NDArray[np.bool_]:
            if missing not in present_of:
                present_of[missing] = random.random(n, dtype=np.float32) >= missing
            return present_of[missing]

        dense = np.empty((n, NUM_DENSE), dtype=np.float32)
        for i, dense_table in enumerate(self.dense):
            at = random.integers(0, 1 << 16, n, dtype=np.uint16)
            values, value_effects = dense_table.values[at], dense_table.effects[at]
            if dense_table.missing:
                has = present(dense_table.missing)
                values = np.where(has, values, np.float32(np.nan))
                value_effects = np.where(has, value_effects, dense_table.missing_effect)
            dense[:, i] = values
            effects += value_effects
        categorical = np.empty((n, NUM_CATEGORICAL), dtype=np.int64)
        buckets: dict[int, NDArray[np.int32]] = {}
        for i, table in enumerate(self.categories):
            index = table.alias.draw(n, random)
            if table.missing:
                index = np.where(present(table.missing), index, np.int32(len(table.frequencies)))
            categorical[:, i] = table.keys[index]
            effects += table.weights[index]
            if i in self._folded:
                buckets[i] = index % INTERACTION_BUCKETS
        return dense, categorical, self._with_interactions(effects, buckets)

    def effects_of(self, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> NDArray[np.float32]:
        """The sum of the effects [n] of rows that this or another set of tables drew.

        A category that this set does not hold has the effect 0, as nothing is known of it here.

        Raises:
            ContractError: an integer column holds a value that these tables never draw.
        """
        effects = np.zeros(len(dense), dtype=np.float32)
        for i, (dense_table, (values, value_effects)) in enumerate(zip(self.dense, self._dense_lookups)):
            missing = np.isnan(dense[:, i])
            found = np.minimum(np.searchsorted(values, dense[:, i]), len(values) - 1)
            if (strange := (values[found] != dense[:, i]) & ~missing).any():
                raise ContractError(f"I{i + 1} holds {dense[strange, i][0]}, which these tables never draw")
            effects += np.where(missing, dense_table.missing_effect, value_effects[found])
        buckets: dict[int, NDArray[np.int32]] = {}
        for i, table in enumerate(self.categories):
            order = np.argsort(table.keys)
            keys = table.keys[order]
            found = np.minimum(np.searchsorted(keys, categorical[:, i]), len(keys) - 1)
            index = order[found]
            effects += np.where(keys[found] == categorical[:, i], table.weights[index], np.float32(0.0))
            if i in self._folded:
                buckets[i] = (index % INTERACTION_BUCKETS).astype(np.int32)
        return self._with_interactions(effects, buckets)

    @property
    def _folded(self) -> set[int]:
        return {column for a, b, _ in self.interactions for column in (a, b)}

    @cached_property
    def _dense_lookups(self) -> list[Lookup]:
        """Per integer column its distinct values, ascending, and their effects."""
        firsts = [np.unique(table.values, return_index=True) for table in self.dense]
        return [(values, table.effects[first]) for table, (values, first) in zip(self.dense, firsts)]

    def _with_interactions(
        self, effects: NDArray[np.float32], buckets: dict[int, NDArray[np.int32]]
    ) -> NDArray[np.float32]:
        for a, b, weights in self.interactions:
            effects += weights[buckets[a] * INTERACTION_BUCKETS + buckets[b]]
        return effects
