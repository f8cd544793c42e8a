"""Where replayed rows come from: a simulated world, or a file of real ones; both can drift on command.

A source hands out rows request by request. Sending them is `replay`'s; the world's truth is `simulation`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, MISSING_CATEGORY
from components.runtime.errors import ContractError
from inference_client.row_files import distinct_categories, read_rows, row_files
from inference_client.simulation.world import Rows, World

_CHUNK_ROWS = 4096


class Request(NamedTuple):
    """Rows to send in one request, with what the sender must not know."""

    dense: NDArray[np.float32]
    categorical: NDArray[np.int64]
    label: NDArray[np.int32]
    probability: NDArray[np.float64] | None
    """True click probability; None for real rows, where nobody knows it."""


class Traffic(Protocol):
    """A source of requests."""

    def take(self, rows: int) -> Request | None:
        """The next request of at most `rows` rows; None when the source is exhausted."""

    def drift(self) -> None:
        """Changes the world for all rows not yet taken.

        Raises:
            ContractError: the source was given nothing to change into.
        """

    @property
    def drift_note(self) -> dict[str, Any]:
        """What drift means here, for the summary."""


class WorldTraffic:
    """Rows drawn from a world, and from the drifted one after `drift`."""

    def __init__(self, world: World, drifted: World | None, random: Generator) -> None:
        self._world, self._drifted, self._random = world, drifted, random
        self._chunk: Rows | None = None
        self._at = 0

    def take(self, rows: int) -> Request:
        """See `Traffic.take`; never exhausted."""
        # Drawing 64 rows costs as much as drawing 1,000: the calls dominate, so draw ahead.
        if self._chunk is None or self._at + rows > len(self._chunk.label):
            self._chunk, self._at = self._world.draw(max(rows, _CHUNK_ROWS), self._random), 0
        part = slice(self._at, self._at + rows)
        self._at += rows
        dense, categorical, probability, label = self._chunk
        return Request(dense[part], categorical[part], label[part], probability[part])

    def drift(self) -> None:
        """See `Traffic.drift`; rows drawn ahead are dropped."""
        if self._drifted is None:
            raise ContractError("no drifted world was given")
        self._world, self._chunk = self._drifted, None

    @property
    def drift_note(self) -> dict[str, Any]:
        """See `Traffic.drift_note`."""
        if self._drifted is None or not self._drifted.drifts:
            return {}
        newest = self._drifted.drifts[-1]
        return {
            "kind": "world",
            "columns": list(newest.columns),
            "new_category_columns": list(newest.new_category_columns),
            "new_category_share": newest.new_category_share,
            "dense_shift": newest.dense_shift,
        }


@dataclass
class _Permutation:
    keys: NDArray[np.int64]
    images: NDArray[np.int64]

    def apply(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        present = values != MISSING_CATEGORY
        mapped = values.copy()
        mapped[present] = self.images[np.searchsorted(self.keys, values[present])]
        return mapped


class FileTraffic:
    """The labelled rows of a file (or a folder of them) in order, once; forms are `row_files`'.

    Drift permutes the distinct values of the stated category columns among themselves; labels keep following the
    values that the file holds, so what a value means truly changes.
    """

    def __init__(self, path: Path, *, drift_columns: tuple[str, ...] = (), seed: int = 0) -> None:
        """Opens the data.

        Raises:
            ContractError: absent, unreadable, without the raw columns, or `drift_columns` are no category columns.
        """
        if wrong := set(drift_columns) - set(CATEGORICAL):
            raise ContractError(f"drift columns {sorted(wrong)} are no category columns, expected some of C1..C26")
        self._paths, self._columns, self._seed = row_files(path), drift_columns, seed
        self._batches = read_rows(self._paths)
        self._permutations: dict[int, _Permutation] = {}
        if drift_columns:
            self._prepared = self._prepare_permutations()
        self._dense = np.empty((0, len(DENSE)), dtype=np.float32)
        self._categorical = np.empty((0, len(CATEGORICAL)), dtype=np.int64)
        self._label = np.empty(0, dtype=np.int32)

    def take(self, rows: int) -> Request | None:
        """See `Traffic.take`; the last request may be shorter."""
        while len(self._label) < rows and (batch := next(self._batches, None)) is not None:
            dense, categorical, label = batch
            self._dense = np.concatenate([self._dense, dense])
            self._categorical = np.concatenate([self._categorical, categorical])
            self._label = np.concatenate([self._label, label])
        if not len(self._label):
            return None
        categorical = self._categorical[:rows]
        if self._permutations:
            categorical = categorical.copy()
            for column, permutation in self._permutations.items():
                categorical[:, column] = permutation.apply(categorical[:, column])
        request = Request(self._dense[:rows], categorical, self._label[:rows], None)
        self._dense, self._categorical = self._dense[rows:], self._categorical[rows:]
        self._label = self._label[rows:]
        return request

    def drift(self) -> None:
        """See `Traffic.drift`."""
        if not self._columns:
            raise ContractError("no drift columns were given")
        self._permutations = self._prepared

    @property
    def drift_note(self) -> dict[str, Any]:
        """See `Traffic.drift_note`."""
        if not self._columns:
            return {}
        values = {CATEGORICAL[column]: len(p.keys) for column, p in self._prepared.items()}
        return {"kind": "permutation", "columns": list(self._columns), "seed": self._seed, "distinct_values": values}

    def _prepare_permutations(self) -> dict[int, _Permutation]:
        prepared = {}
        for name, distinct in distinct_categories(self._paths, self._columns).items():
            column = CATEGORICAL.index(name)
            random = np.random.default_rng([self._seed, 7, column])
            prepared[column] = _Permutation(distinct, random.permutation(distinct))
        return prepared
