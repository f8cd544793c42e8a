"""Provide replayed rows from a simulator or a file of real rows. Both sources can drift on command.

A source returns rows request by request. The module `replay` sends the rows. Simulated rows have
true click probabilities. Files are Parquet with the recommender's column names in any order, with
or without labels. A column may be absent if serving replaces it by a fixed value. `evergreen data
ingest` converts other files to Parquet and separates malformed rows. This module raises an error at
the first malformed value, with its file and row.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import Generator
from numpy.typing import NDArray

from demo.simulation.simulator import SimulatedRows, Simulator
from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.config.reader import nearest
from evergreen.config.spec import Recommender
from evergreen.contracts.raw_rows import LABEL, REQUEST_ID
from evergreen.runtime.errors import ContractError, first_line
from inference_client.rows import FeatureRows, WrongValue, feature_rows, numbers

_BATCH_ROWS = 4096
_CHUNK_ROWS = 4096


class LabelledRows(NamedTuple):
    """Batch of rows of a file."""

    features: FeatureRows
    label: NDArray[np.int32]
    """Labels, shape [n]: 1 for a click, and 0 for no click. All are 0 if labels were not
    requested."""
    request: list[str] | None = None
    """Request id of each row. None if request ids were not requested."""


def row_files(path: Path) -> list[Path]:
    """Return the file `path`, or all Parquet files in the folder `path` at any depth.

    Raises:
        ContractError: the path does not exist or contains no Parquet file.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ContractError(f"data {path} does not exist or contains no Parquet file")
    return files


def read_rows(
    files: Sequence[Path],
    recommender: Recommender,
    *,
    labelled: bool = True,
    with_requests: bool = False,
) -> Iterator[LabelledRows]:
    """Yield the rows of the files in batches, in order.

    The name of the label column comes from the recommender, or from the raw schema.

    Raises:
        ContractError: a file is corrupt or not Parquet, lacks a column, or has an invalid value.
            The message contains the file and the row.
    """
    for path in files:
        try:
            yield from _read_file(path, recommender, labelled=labelled, with_requests=with_requests)
        except (pa.ArrowException, OSError) as error:
            raise ContractError(f"data {path} cannot be read: {first_line(error)}") from error


def concatenated(parts: Sequence[FeatureRows]) -> FeatureRows:
    """Concatenate the rows of one or more parts."""
    return FeatureRows(
        dense=np.concatenate([part.dense for part in parts]),
        categorical=np.concatenate([part.categorical for part in parts]),
    )


def _read_file(
    path: Path, recommender: Recommender, *, labelled: bool, with_requests: bool
) -> Iterator[LabelledRows]:
    here, features = pq.read_schema(path).names, recommender.features
    names = [name for name in features.names if name in here or name in features.needed]
    label = LABEL if LABEL in here else recommender.data.label
    wanted = [*([label] if labelled else []), *([REQUEST_ID] if with_requests else []), *names]
    if missing := [name for name in wanted if name not in here]:
        raise ContractError(
            f"data {path} lacks columns {missing} of recommender "
            f"{recommender.name}{nearest(missing[0], here)}"
        )
    first_row = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
            named = {name: batch.column(name) for name in wanted}
            try:
                labels = (
                    _labels(label, named.pop(label))
                    if labelled
                    else np.zeros(batch.num_rows, dtype=np.int32)
                )
                requests = named.pop(REQUEST_ID).to_pylist() if with_requests else None
                yield LabelledRows(feature_rows(named, features), labels, requests)
            except WrongValue as error:
                raise ContractError(
                    f"{path} row {first_row + error.row}: {error.column} is {error.value!r}, "
                    f"expected {error.expected}"
                ) from error
            first_row += batch.num_rows


def _labels(name: str, values: pa.Array) -> NDArray[np.int32]:
    found = numbers(name, values)
    wrong = np.flatnonzero((found != 0) & (found != 1))
    if len(wrong):
        row = int(wrong[0])
        raise WrongValue(column=name, row=row, value=values[row].as_py(), expected="0 or 1")
    return found.astype(np.int32)


class Request(NamedTuple):
    """Rows of one request with their labels. The labels are not sent to the server."""

    features: FeatureRows
    label: NDArray[np.int32]
    """Labels, shape [n]: 1 for a click, and 0 for no click."""
    probability: NDArray[np.float64] | None
    """True click probabilities, shape [n], or None for real rows."""


class Traffic(Protocol):
    """Source of requests."""

    def take(self, rows: int) -> Request | None:
        """Return the next request of at most `rows` rows, or None if the source is exhausted."""

    def drift(self) -> None:
        """Change the distribution of all rows that `take` returns from now on.

        Raises:
            ContractError: the source has no drift.
        """

    @property
    def drift_note(self) -> dict[str, Any]:
        """Description of the drift, for the summary."""


class SimulatedTraffic:
    """Rows drawn from a simulator, and after `drift` from the drifted simulator."""

    def __init__(self, simulator: Simulator, drifted: Simulator | None, random: Generator) -> None:
        self._simulator, self._drifted = simulator, drifted
        self._random = random
        self._chunk: SimulatedRows | None = None
        self._at = 0

    def take(self, rows: int) -> Request:
        """Draw the next request (see `Traffic.take`). The source is never exhausted."""
        # Draw rows in advance, because drawing 64 rows takes as long as drawing 1,000.
        if self._chunk is None or self._at + rows > len(self._chunk.label):
            self._chunk, self._at = self._simulator.draw(max(rows, _CHUNK_ROWS), self._random), 0
        part = slice(self._at, self._at + rows)
        self._at += rows
        chunk = self._chunk
        features = FeatureRows(dense=chunk.dense[part], categorical=chunk.categorical[part])
        return Request(features, chunk.label[part], chunk.probability[part])

    def drift(self) -> None:
        """Switch to the drifted simulator (see `Traffic.drift`).

        Rows that were drawn in advance are discarded.
        """
        if self._drifted is None:
            raise ContractError(
                "--drifted-simulator is absent, expected a file, because the traffic has to drift"
            )
        self._simulator, self._chunk = self._drifted, None

    @property
    def drift_note(self) -> dict[str, Any]:
        """See `Traffic.drift_note`."""
        if self._drifted is None or not self._drifted.drifts:
            return {}
        newest = self._drifted.drifts[-1]
        return {
            "kind": "simulator",
            "columns": list(newest.columns),
            "new_category_columns": list(newest.new_category_columns),
            "new_category_share": newest.new_category_share,
        }


class FileTraffic:
    """Labelled rows of a file or a folder. Each row is sent once, in order.

    Drift permutes the distinct values of categorical columns, and mirrors numeric columns at their
    median, so that the lowest value becomes the highest. The labels stay with their rows, so the
    relation between values and labels really changes.
    """

    def __init__(
        self,
        path: Path,
        recommender: Recommender,
        *,
        drift_columns: tuple[str, ...] = (),
        seed: int = 0,
        keeps_requests: bool = False,
    ) -> None:
        """Open the files of rows.

        Args:
            path: File, or folder of files.
            recommender: Recommender of the rows.
            drift_columns: Columns whose values `drift` changes.
            seed: Seed of the permutation of categories.
            keeps_requests: Whether a request is a series of rows with one request id.

        Raises:
            ContractError: the data is absent or unreadable, or a drift column is not a feature.
        """
        self._own = recommender.features
        if wrong := [name for name in drift_columns if name not in self._own.names]:
            raise ContractError(
                f"drift column {wrong[0]!r} is not a feature{nearest(wrong[0], self._own.names)}"
            )
        self._drift_columns, self._seed = drift_columns, seed
        self._has_drifted = False
        files = row_files(path)
        self._batches = read_rows(files, recommender, with_requests=keeps_requests)
        self._requests: list[str] | None = [] if keeps_requests else None
        found: dict[str, list[NDArray[Any]]] = {name: [] for name in drift_columns}
        for batch in read_rows(files, recommender, labelled=False) if found else ():
            for name, parts in found.items():
                values = _column(self._own, batch.features, name)
                parts.append(values[_is_present(values)])
        self._images: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        """Distinct values of each column in ascending order, with their replacements."""
        for name, parts in found.items():
            values, counts = np.unique(np.concatenate(parts or [np.empty(0)]), return_counts=True)
            random = np.random.default_rng([seed, 7, self._own.names.index(name)])
            is_numeric = name in self._own.numeric
            self._images[name] = (
                values,
                _mirrored(values, counts) if is_numeric else random.permutation(values),
            )
        self._features: FeatureRows | None = None
        self._label = np.empty(0, dtype=np.int32)

    def take(self, rows: int) -> Request | None:
        """Return the next rows (see `Traffic.take`). The last request may be shorter."""
        while len(self._label) < rows and (batch := next(self._batches, None)) is not None:
            known = [] if self._features is None else [self._features]
            self._features = concatenated([*known, batch.features])
            self._label = np.concatenate([self._label, batch.label])
            if self._requests is not None:
                self._requests += batch.request or []
        if self._features is None or not len(self._label):
            return None
        if self._requests is not None:
            own = self._requests[:rows]
            rows = next((at for at, each in enumerate(own) if each != own[0]), len(own))
            del self._requests[:rows]
        features, label = self._features.take(slice(rows)), self._label[:rows]
        self._features, self._label = self._features.take(slice(rows, None)), self._label[rows:]
        if self._has_drifted:
            features = FeatureRows(
                dense=features.dense.copy(), categorical=features.categorical.copy()
            )
            for name, (values, images) in self._images.items():
                column = _column(self._own, features, name)
                present = _is_present(column)
                column[present] = images[np.searchsorted(values, column[present])]
        return Request(features, label, None)

    def drift(self) -> None:
        """Change the drift columns (see `Traffic.drift`)."""
        if not self._drift_columns:
            raise ContractError(
                "--drift-columns is empty, expected at least one column, because the traffic has "
                "to drift"
            )
        self._has_drifted = True

    @property
    def drift_note(self) -> dict[str, Any]:
        """See `Traffic.drift_note`."""
        if not self._drift_columns:
            return {}
        return {
            "kind": "permutation",
            "columns": list(self._drift_columns),
            "seed": self._seed,
            "distinct_values": {name: len(values) for name, (values, _) in self._images.items()},
        }


def _column(features: Features, rows: FeatureRows, name: str) -> NDArray[Any]:
    """Return a view of a column [n], or of the positions of a list [n, positions]."""
    if name in features.numeric:
        return rows.dense[:, features.numeric.index(name)]
    if name in features.lists:
        start, stop, _ = features.positions.lists[features.lists.index(name)]
        return rows.categorical[:, start:stop]
    return rows.categorical[:, features.categorical.index(name)]


def _is_present(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the values that are not missing, in the column's shape."""
    present: NDArray[np.bool_] = (
        ~np.isnan(values) if values.dtype == np.float32 else values != MISSING_CATEGORY
    )
    return present


def _mirrored(values: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[Any]:
    """Replace each of the ascending `values` by its mirror image at the median.

    For example, the highest value becomes the lowest. `counts` has the number of rows of each
    value.

    >>> _mirrored(np.array([0.0, 1.0, 5.0]), np.array([1, 1, 1])).tolist()
    [5.0, 1.0, 0.0]
    """
    up_to = np.cumsum(counts)
    above = counts.sum() - up_to
    mirrored: NDArray[Any] = values[np.searchsorted(up_to, above + (counts - 1) // 2, side="right")]
    return mirrored
