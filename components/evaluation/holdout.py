"""The held-out rows, read in batches: raw as they were logged, and encoded as the candidate was trained on them.

The two folders hold the same rows in the same order; counts and labels are checked, because scores of different rows
must never be compared. Scoring is left to `scoring`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import (
    CATEGORICAL,
    DENSE,
    EVENT_TIME,
    LABEL,
    MISSING_CATEGORY,
    feature_matrix,
)
from components.contracts.hugectr_folder import FILE_LIST, listed_files
from components.runtime.errors import ContractError, first_line

BATCH_ROWS = 8192


class RawBatch(NamedTuple):
    """Raw rows in the served form."""

    labels: NDArray[np.int8]
    event_seconds: NDArray[np.float64]
    """Since the epoch, UTC."""
    dense: NDArray[np.float32]
    """[n, 13], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, 26], `MISSING_CATEGORY` = missing."""


class EncodedBatch(NamedTuple):
    """Encoded rows."""

    labels: NDArray[np.int8]
    dense: NDArray[np.float32]
    """[n, 13], normalised."""
    ids: NDArray[np.int64]
    """[n, 26], slot-local."""


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of `folder` in row order: that of HugeCTR's file list where there is one, else of the names.

    Raises:
        ContractError: there is none, or the list is wrong.
    """
    files = listed_files(folder) if (folder / FILE_LIST).exists() else sorted(folder.glob("*.parquet"))
    if not files:
        raise ContractError(f"{folder} holds no Parquet files")
    return files


def check_counts(raw: Path, encoded: Path, raw_stated: int, encoded_stated: int) -> int:
    """Number of held-out rows, on which the two folders and the two manifests agree.

    Raises:
        ContractError: they do not; names both numbers.
    """
    num_raw, num_encoded = _num_rows(raw), _num_rows(encoded)
    if num_raw != num_encoded:
        raise ContractError(f"raw holdout has {num_raw} rows and encoded holdout {num_encoded}, expected the same rows")
    for name, stated in (("raw", raw_stated), ("encoded", encoded_stated)):
        if stated != num_raw:
            raise ContractError(f"{name} holdout has {num_raw} rows, expected the {stated} of its manifest")
    return num_raw


def raw_batches(folder: Path, batch_rows: int = BATCH_ROWS) -> Iterator[RawBatch]:
    """The raw rows of `folder` in order."""
    for batch in _batches(folder, [LABEL, EVENT_TIME, *DENSE, *CATEGORICAL], batch_rows):
        time = batch.column(EVENT_TIME).cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        yield RawBatch(
            labels=_labels(batch),
            event_seconds=time.to_numpy(zero_copy_only=False) / 1e6,
            dense=feature_matrix(batch, DENSE, "float32", missing=np.nan),
            categorical=feature_matrix(batch, CATEGORICAL, "int64", missing=MISSING_CATEGORY),
        )


def encoded_batches(folder: Path, batch_rows: int = BATCH_ROWS) -> Iterator[EncodedBatch]:
    """The encoded rows of `folder` in order."""
    for batch in _batches(folder, [LABEL, *DENSE, *CATEGORICAL], batch_rows):
        yield EncodedBatch(
            labels=_labels(batch),
            dense=feature_matrix(batch, DENSE, "float32", missing=np.nan),
            ids=feature_matrix(batch, CATEGORICAL, "int64", missing=MISSING_CATEGORY),
        )


def _num_rows(folder: Path) -> int:
    num_rows = 0
    for path in parquet_files(folder):
        with _readable(path):
            num_rows += pq.read_metadata(path).num_rows
    return num_rows


def _batches(folder: Path, columns: list[str], batch_rows: int) -> Iterator[Any]:
    for path in parquet_files(folder):
        with _readable(path), pq.ParquetFile(path) as file:
            if absent := set(columns) - set(file.schema_arrow.names):
                raise ContractError(f"{path} lacks the columns {sorted(absent)}")
            yield from file.iter_batches(batch_rows, columns=columns)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns pyarrow's failures over `path` into ContractError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"held-out rows {path} cannot be read: {first_line(error)}") from error


def _labels(batch: Any) -> NDArray[np.int8]:
    labels = batch.column(LABEL).to_numpy(zero_copy_only=False)
    if not np.isin(labels, (0, 1)).all():
        raise ContractError(f"labels hold {sorted(set(labels.tolist()) - {0, 1}, key=str)[:5]}, expected 0 and 1")
    whole: NDArray[np.int8] = labels.astype(np.int8)
    return whole
