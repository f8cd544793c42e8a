"""Rows of Parquet files: our own raw schema, and Criteo as others write it (signed hashes, hex strings, any case)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, FEATURES, LABEL, MAX_CATEGORY, MISSING_CATEGORY
from components.contracts.criteo import parse_category as parse
from components.runtime.errors import ContractError

Batch = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int32]]


def columns_of(path: Path, *, labelled: bool) -> list[str]:
    """The file's own names of label (if `labelled`) and features, in our order.

    Raises:
        ContractError: no Parquet file, or a column is absent.
    """
    try:
        names = {name.lower(): name for name in pq.read_schema(path).names}
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"data {path} is no readable Parquet file: {error}") from error
    if missing := [name for name in FEATURES if name.lower() not in names]:
        raise ContractError(f"data {path} lacks columns {missing}, expected {FEATURES[0]}..{FEATURES[-1]}")
    if labelled and LABEL not in names:
        raise ContractError(f"data {path} lacks column {LABEL}, expected 0 or 1 for each row")
    return [names[name.lower()] for name in ((LABEL, *FEATURES) if labelled else FEATURES)]


def read_parquet_rows(path: Path, *, labelled: bool, batch_rows: int) -> Iterator[Batch]:
    """Dense [n, 13], categorical [n, 26] and labels [n] (zeros unless `labelled`), batch by batch.

    Raises:
        ContractError: a column is absent or not of a type that holds its values, or a value is none of its column's.
    """
    names = columns_of(path, labelled=labelled)
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=batch_rows, columns=names):
            yield _tensors(batch.select(names), path, labelled)
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"data {path} is no readable Parquet file: {error}") from error


def _tensors(batch: Any, path: Path, labelled: bool) -> Batch:
    n, first = batch.num_rows, int(labelled)
    dense = np.empty((n, len(DENSE)), dtype=np.float32)
    categorical = np.empty((n, len(CATEGORICAL)), dtype=np.int64)
    label = np.zeros(n, dtype=np.int32)
    name = LABEL
    try:
        if labelled:
            label = batch.column(0).cast(pa.int32()).fill_null(-1).to_numpy()
        for name, values in zip(FEATURES, batch.columns[first:]):
            if name in DENSE:
                numbers = values.cast(pa.float32(), safe=False)
                dense[:, DENSE.index(name)] = numbers.to_numpy(zero_copy_only=False)
            else:
                categorical[:, CATEGORICAL.index(name)] = _hashes(values)
    except (pa.ArrowException, ValueError) as error:
        raise ContractError(f"column {name} of {path} does not have its raw type: {error}") from error
    if not ((label == 0) | (label == 1)).all():
        raise ContractError(f"column {LABEL} of {path} holds values other than 0 and 1")
    outside = (categorical < MISSING_CATEGORY) | (categorical > MAX_CATEGORY)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        value = categorical[row, column]
        raise ContractError(f"column {CATEGORICAL[column]} of {path} holds {value}, expected a hash of 32 bits")
    return dense, categorical, label


def _hashes(values: Any) -> NDArray[np.int64]:
    """Categories, missing ones as `MISSING_CATEGORY`; a negative int32 is the unsigned hash of the same bits."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        encoded = values.fill_null("").dictionary_encode()
        meanings = np.array([parse(text) for text in encoded.dictionary.to_pylist()], dtype=np.int64)
        hashes: NDArray[np.int64] = meanings[encoded.indices.to_numpy()]
        return hashes
    if values.type == pa.int32():
        values = values.view(pa.uint32())
    numbers: NDArray[np.int64] = values.cast(pa.int64()).fill_null(MISSING_CATEGORY).to_numpy()
    return numbers
