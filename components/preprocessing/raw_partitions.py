"""The raw rows as a Dask collection in the order of file names, with types that NVTabular encodes exactly.

NVTabular's own Parquet reader is passed over for two reasons: it sorts files by the numbers in their names (a raw
folder's row order is that of plain names), and a column's type depends on whether a partition holds a null. Here a
category is always float64 (exact below 2^53, null = NaN) and a dense value float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts.criteo import CATEGORICAL, DENSE, FEATURES, LABEL, MAX_CATEGORY, RAW_TYPES
from components.contracts.errors import ContractError, first_line

Partition = tuple[str, tuple[int, ...]]
"""A file and the row groups of it that one task reads."""

READ_TYPES = {LABEL: "float32", **dict.fromkeys(DENSE, "float32"), **dict.fromkeys(CATEGORICAL, "float64")}


def raw_files(folder: Path) -> list[Path]:
    """The Parquet files of a raw folder in row order.

    Raises:
        ContractError: the folder is absent or holds none.
    """
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise ContractError(f"raw folder {folder} has no .parquet file, expected at least one")
    return files


def plan_partitions(folder: Path, *, expected_rows: int, partition_rows: int) -> list[Partition]:
    """Partitions of about `partition_rows` rows each, none empty, in row order; only the files' footers are read.

    Raises:
        ContractError: an unreadable file, a column that is absent or of another type, or a number of rows that is
            not `expected_rows` or is 0.
    """
    partitions: list[Partition] = []
    num_rows = 0
    for path in raw_files(folder):
        metadata = _checked_footer(path)
        num_rows += metadata.num_rows
        partitions += [(str(path), groups) for groups in _grouped(metadata, partition_rows)]
    if num_rows != expected_rows or num_rows == 0:
        raise ContractError(
            f"raw folder {folder} has {num_rows} rows, expected the manifest's {expected_rows} and at least 1"
        )
    return partitions


def read_partition(partition: Partition) -> Any:
    """The label and the features of a partition as a pandas frame of `READ_TYPES`.

    Raises:
        ContractError: the file is damaged, a label is null, a dense value infinite, or a category outside [0, 2^32).
    """
    path, groups = partition
    try:
        table = pq.ParquetFile(path).read_row_groups(list(groups), columns=list(READ_TYPES)).select(list(READ_TYPES))
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"raw file {path} cannot be read as Parquet: {first_line(error)}") from error
    if nulls := table[LABEL].null_count:
        raise ContractError(f"column {LABEL} of {path} has {nulls} nulls, expected none")
    for name in CATEGORICAL:
        extremes = pc.min_max(table[name]).as_py()
        if extremes["min"] is not None and (extremes["min"] < 0 or extremes["max"] > MAX_CATEGORY):
            raise ContractError(
                f"column {name} of {path} has values from {extremes['min']} to {extremes['max']}, "
                f"expected 0 to {MAX_CATEGORY}, and null for missing"
            )
    frame = table.to_pandas().astype(READ_TYPES)
    infinite = np.isinf(frame[list(DENSE)].to_numpy()).sum(axis=0)
    if infinite.any():
        raise ContractError(f"column {DENSE[infinite.argmax()]} of {path} has {infinite.max()} infinite values")
    return frame


def read_lazily(partitions: list[Partition]) -> Any:
    """The partitions as a Dask frame."""
    import dask.dataframe as dd
    import pandas as pd

    empty = pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in READ_TYPES.items()})
    return dd.from_map(read_partition, partitions, meta=empty, enforce_metadata=False)


def _grouped(metadata: Any, partition_rows: int) -> list[tuple[int, ...]]:
    """Consecutive row groups, put together up to `partition_rows` rows."""
    groups: list[list[int]] = []
    filled = partition_rows
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if rows == 0:
            continue
        if filled + rows > partition_rows:
            groups.append([])
            filled = 0
        groups[-1].append(group)
        filled += rows
    return [tuple(group) for group in groups]


def _checked_footer(path: Path) -> Any:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ContractError(f"raw file {path} cannot be read as Parquet: {first_line(error)}") from error
    schema = file.schema_arrow
    for name in (LABEL, *FEATURES):
        found = str(schema.field(name).type) if name in schema.names else "absent"
        found = "float32" if found == "float" else found
        if found != RAW_TYPES[name]:
            raise ContractError(f"column {name} of {path} is {found}, expected {RAW_TYPES[name]}")
    return file.metadata
