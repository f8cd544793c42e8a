"""Rows of click files: Parquet under the recommender's names, in any order, with or without labels.

A file may lack a column that is served as one value. Other files become Parquet by `evergreen ingest`, which keeps
malformed rows apart; scoring stops at the first malformed value and names its file and row.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.raw_rows import LABEL
from components.contracts.recommender import Recommender, nearest
from components.runtime.errors import ContractError, first_line
from inference_client.rows import FeatureRows, WrongValue, feature_rows, numbers

_BATCH_ROWS = 4096


class LabelledRows(NamedTuple):
    """Some rows of a file."""

    features: FeatureRows
    label: NDArray[np.int32]
    """[n] 1 = click; zeros where labels were not requested."""


def row_files(path: Path) -> list[Path]:
    """The files that `path` names: itself, or a folder's Parquet files at any depth.

    Raises:
        ContractError: There are none.
    """
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ContractError(f"data {path} does not exist or holds no Parquet file")
    return files


def read_rows(files: Sequence[Path], recommender: Recommender, *, labelled: bool = True) -> Iterator[LabelledRows]:
    """The rows of the files, batch by batch, in order; the label has the user's own name, else the one of raw rows.

    Raises:
        ContractError: A file is damaged or no Parquet, lacks a column, or a value is not of its column's type; the
            message names the file and the row.
    """
    for path in files:
        try:
            yield from _read_file(path, recommender, labelled)
        except (pa.ArrowException, OSError) as error:
            raise ContractError(f"data {path} cannot be read: {first_line(error)}") from error


def first_rows(path: Path, recommender: Recommender, *, num_rows: int | None = None) -> FeatureRows:
    """The first rows that `path` holds, at most `num_rows`; all without a number.

    Raises:
        ContractError: It holds none, or as `read_rows`.
    """
    parts, found = [], 0
    for batch in read_rows(row_files(path), recommender, labelled=False):
        parts.append(batch.features)
        found += len(batch.label)
        if num_rows is not None and found >= num_rows:
            break
    if not found:
        raise ContractError(f"data {path} holds no rows, expected at least 1")
    return concatenated(parts).take(slice(num_rows))


def concatenated(parts: Sequence[FeatureRows]) -> FeatureRows:
    """All rows of the parts, of which there is at least one."""
    return FeatureRows(
        dense=np.concatenate([part.dense for part in parts]),
        categorical=np.concatenate([part.categorical for part in parts]),
    )


def _read_file(path: Path, recommender: Recommender, labelled: bool) -> Iterator[LabelledRows]:
    here, features = pq.read_schema(path).names, recommender.features
    names = [name for name in features.names if name in here or name in features.needed]
    label = LABEL if LABEL in here else recommender.data.label
    wanted = [label, *names] if labelled else names
    if missing := [name for name in wanted if name not in here]:
        raise ContractError(
            f"data {path} lacks columns {missing} of recommender {recommender.name}{nearest(missing[0], here)}"
        )
    first_row = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
            named = {name: batch.column(name) for name in wanted}
            try:
                labels = _labels(label, named.pop(label)) if labelled else np.zeros(batch.num_rows, dtype=np.int32)
                yield LabelledRows(feature_rows(named, features), labels)
            except WrongValue as error:
                raise ContractError(
                    f"{path} row {first_row + error.row}: {error.column} is {error.value!r}, expected {error.expected}"
                ) from error
            first_row += batch.num_rows


def _labels(name: str, values: pa.Array) -> NDArray[np.int32]:
    found = numbers(name, values)
    wrong = np.flatnonzero((found != 0) & (found != 1))
    if len(wrong):
        row = int(wrong[0])
        raise WrongValue(column=name, row=row, value=values[row].as_py(), expected="0 or 1")
    return found.astype(np.int32)
