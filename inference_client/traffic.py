"""Where replayed rows come from: a simulated world, or a file of real ones; both can drift on command.

A source hands out rows request by request. Sending them is `replay`'s job; the world's truth is `simulation`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL
from components.contracts.features import MISSING_CATEGORY
from components.runtime.errors import ContractError
from inference_client.row_files import concatenated, read_rows, row_files
from inference_client.rows import FeatureRows
from inference_client.simulation.world import World, WorldRows

_CHUNK_ROWS = 4096


class Request(NamedTuple):
    """Rows to send in one request, with their truth, which the server must not see."""

    features: FeatureRows
    label: NDArray[np.int32]
    """[n] 1 = clicked."""
    probability: NDArray[np.float64] | None
    """[n] true click probability; None for real rows, where nobody knows it."""


class Traffic(Protocol):
    """A source of requests."""

    def take(self, rows: int) -> Request | None:
        """The next request of at most `rows` rows; None when the source is exhausted."""

    def drift(self) -> None:
        """Changes the world for all rows that are not taken yet.

        Raises:
            ContractError: The source has nothing to change into.
        """

    @property
    def drift_note(self) -> dict[str, Any]:
        """How drift changes the rows, for the summary."""


class WorldTraffic:
    """Rows drawn from a world, and from the drifted one after `drift`."""

    def __init__(self, world: World, drifted: World | None, random: Generator) -> None:
        self._world, self._drifted = world, drifted
        self._random = random
        self._chunk: WorldRows | None = None
        self._at = 0

    def take(self, rows: int) -> Request:
        """See `Traffic.take`; never exhausted."""
        # Drawing 64 rows takes as long as drawing 1,000, so they are drawn ahead.
        if self._chunk is None or self._at + rows > len(self._chunk.label):
            self._chunk, self._at = self._world.draw(max(rows, _CHUNK_ROWS), self._random), 0
        part = slice(self._at, self._at + rows)
        self._at += rows
        chunk = self._chunk
        features = FeatureRows(dense=chunk.dense[part], categorical=chunk.categorical[part])
        return Request(features, chunk.label[part], chunk.probability[part])

    def drift(self) -> None:
        """See `Traffic.drift`; rows drawn ahead are discarded."""
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
        }


class FileTraffic:
    """The labelled rows of a file (or a folder of them) in order, once; forms are `row_files`'.

    Drift permutes the distinct values of some categorical columns; labels stay with the values that the file holds, so
    what a value means truly changes.
    """

    def __init__(self, path: Path, *, drift_columns: tuple[str, ...] = (), seed: int = 0) -> None:
        """Opens the data.

        Raises:
            ContractError: The data is absent or unreadable, or `drift_columns` are not categorical.
        """
        if wrong := set(drift_columns) - set(CATEGORICAL):
            raise ContractError(f"drift columns {sorted(wrong)} are not categorical, expected some of C1..C26")
        self._drift_columns, self._seed = drift_columns, seed
        self._has_drifted = False
        files = row_files(path)
        self._batches = read_rows(files)
        self._permutations: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        """By column: its values in rising order, and what each becomes."""
        for place, distinct in _distinct_categories(files, drift_columns).items():
            random = np.random.default_rng([seed, 7, place])
            self._permutations[place] = distinct, random.permutation(distinct)
        self._features: FeatureRows | None = None
        self._label = np.empty(0, dtype=np.int32)

    def take(self, rows: int) -> Request | None:
        """See `Traffic.take`; the last request may be shorter."""
        while len(self._label) < rows and (batch := next(self._batches, None)) is not None:
            known = [] if self._features is None else [self._features]
            self._features = concatenated([*known, batch.features])
            self._label = np.concatenate([self._label, batch.label])
        if self._features is None or not len(self._label):
            return None
        features, label = self._features.take(slice(rows)), self._label[:rows]
        self._features, self._label = self._features.take(slice(rows, None)), self._label[rows:]
        if self._has_drifted:
            categorical = features.categorical.copy()
            for place, (values, images) in self._permutations.items():
                present = categorical[:, place] != MISSING_CATEGORY
                categorical[present, place] = images[np.searchsorted(values, categorical[present, place])]
            features = FeatureRows(dense=features.dense, categorical=categorical)
        return Request(features, label, None)

    def drift(self) -> None:
        """See `Traffic.drift`."""
        if not self._drift_columns:
            raise ContractError("no drift columns were given")
        self._has_drifted = True

    @property
    def drift_note(self) -> dict[str, Any]:
        """See `Traffic.drift_note`."""
        if not self._drift_columns:
            return {}
        counts = {CATEGORICAL[place]: len(values) for place, (values, _) in self._permutations.items()}
        return {
            "kind": "permutation",
            "columns": list(self._drift_columns),
            "seed": self._seed,
            "distinct_values": counts,
        }


def _distinct_categories(files: Sequence[Path], names: Sequence[str]) -> dict[int, NDArray[np.int64]]:
    """By categorical column's place: its distinct values in rising order, without the missing value."""
    found = {place: np.empty(0, np.int64) for place in sorted(map(CATEGORICAL.index, names))}
    for batch in read_rows(files, labelled=False) if found else ():
        found = {place: np.union1d(known, batch.features.categorical[:, place]) for place, known in found.items()}
    return {place: values[values != MISSING_CATEGORY] for place, values in found.items()}
