"""Encoded rows from HugeCTR's Parquet folders, as compact arrays in memory.

A row takes 160 bytes (ids as int32), so 100 million rows need 16 GB. Files are decoded one row group at a time. What
the columns mean is `contracts.criteo`'s; what is wrong with a folder is said here, before a long fit starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.errors import ContractError, first_line
from components.contracts.hugectr_folder import listed_files


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows in time order."""

    labels: NDArray[np.float32]
    """0 or 1, [n]."""
    dense: NDArray[np.float32]
    """Normalised values, [n, 13]."""
    ids: NDArray[np.int32]
    """Slot-local ids, [n, 26]."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def __getitem__(self, part: slice) -> Rows:
        """The rows of a slice, without a copy."""
        return Rows(labels=self.labels[part], dense=self.dense[part], ids=self.ids[part])


def read_rows(folder: Path, num_rows: int, slot_sizes: list[int]) -> Rows:
    """All rows of a HugeCTR Parquet folder, in the order of its `_file_list.txt`.

    Args:
        folder: Folder with Parquet files and `_file_list.txt`, whose paths may be those of another machine.
        num_rows: Number of rows that the manifest promises.
        slot_sizes: Number of ids per column.

    Raises:
        ContractError: a file is absent, damaged, has other columns or types, or nulls; another number of rows; a value
            that is not finite; a label other than 0 and 1; an id outside its slot.
    """
    rows = Rows(
        labels=np.empty(num_rows, np.float32),
        dense=np.empty((num_rows, NUM_DENSE), np.float32),
        ids=np.empty((num_rows, NUM_CATEGORICAL), np.int32),
    )
    at = 0
    for path in listed_files(folder):
        for table in _row_groups(path):
            if at + table.num_rows > num_rows:
                raise ContractError(f"{folder} holds more than the {num_rows} rows of its manifest")
            _decode(table, rows[at : at + table.num_rows], slot_sizes, source=f"{path}")
            at += table.num_rows
    if at != num_rows:
        raise ContractError(f"{folder} holds {at} rows, expected the {num_rows} of its manifest")
    return rows


def _row_groups(path: Path) -> Iterator[Any]:
    columns = [LABEL, *DENSE, *CATEGORICAL]
    try:
        with pq.ParquetFile(path) as file:
            if missing := set(columns) - set(file.schema_arrow.names):
                raise ContractError(f"{path} has no columns {sorted(missing)}")
            for number in range(file.num_row_groups):
                yield file.read_row_group(number, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise ContractError(f"training rows {path} cannot be read: {first_line(error)}") from error


def _decode(table: Any, into: Rows, slot_sizes: list[int], *, source: str) -> None:
    """Copies one row group's columns into `into`, checking each value's range once, here and not per batch."""

    def column(name: str, expected: Any) -> NDArray[Any]:
        values = table.column(name)
        if values.type != expected or values.null_count:
            raise ContractError(
                f"column {name} of {source} is {values.type} with {values.null_count} nulls, not {expected}"
            )
        decoded: NDArray[Any] = values.to_numpy()
        return decoded

    into.labels[:] = column(LABEL, pa.float32())
    if not np.isin(into.labels, (0, 1)).all():
        wrong = into.labels[~np.isin(into.labels, (0, 1))][0]
        raise ContractError(f"label in {source} is {wrong}, expected 0 or 1")
    for number, name in enumerate(DENSE):
        into.dense[:, number] = column(name, pa.float32())
        if not np.isfinite(into.dense[:, number]).all():
            raise ContractError(f"column {name} of {source} holds NaN or infinity, expected finite values")
    for number, (name, size) in enumerate(zip(CATEGORICAL, slot_sizes)):
        ids = column(name, pa.int64())
        if len(ids) and (ids.min() < 0 or ids.max() >= size):
            raise ContractError(f"ids of {name} in {source} are {ids.min()}..{ids.max()}, expected 0..{size - 1}")
        into.ids[:, number] = ids
