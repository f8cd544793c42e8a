"""The proof that HugeCTR may read the written training set without looking.

HugeCTR checks neither types (the bits of an int32 label are read as a float) nor ranges (an id at or above its slot's
size lands in the next slot), so every file is checked here before it is published. Writing is NVTabular's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL
from components.runtime.errors import PermanentError

TYPES = {LABEL: "float", **dict.fromkeys(DENSE, "float"), **dict.fromkeys(CATEGORICAL, "int64")}


def expect_rows(num_rows: int, expected_rows: int, folder: Path) -> None:
    """Refuses a folder with other rows than were to be written.

    Raises:
        PermanentError: it has.
    """
    if num_rows != expected_rows:
        raise PermanentError(f"encoded folder {folder} has {num_rows} rows, expected {expected_rows}")


def verify_file(path: Path, slot_sizes: list[int]) -> int:
    """Proves that one file is in HugeCTR's form; gives its number of rows.

    Raises:
        PermanentError: a wrong column or type, a null, a value that is not finite, or an id outside [1, slot size).
    """
    file = pq.ParquetFile(path)
    found = {field.name: str(field.type) for field in file.schema_arrow}
    if list(found.items()) != list(TYPES.items()):
        raise PermanentError(f"columns of {path} are {found}, expected {TYPES} in this order")
    sizes = dict(zip(CATEGORICAL, slot_sizes))
    for batch in file.iter_batches():
        for name, column in zip(TYPES, batch.columns):
            if column.null_count:
                raise PermanentError(f"column {name} of {path} has {column.null_count} nulls, expected none")
            _verify_values(path, name, column.to_numpy(), sizes.get(name))
    return int(file.metadata.num_rows)


def _verify_values(path: Path, name: str, values: Any, slot_size: int | None) -> None:
    if slot_size is None:
        if wrong := int(np.count_nonzero(~np.isfinite(values))):
            raise PermanentError(f"column {name} of {path} has {wrong} values that are not finite, expected none")
    elif values.min() < 1 or values.max() >= slot_size:
        raise PermanentError(
            f"column {name} of {path} has ids from {values.min()} to {values.max()}, expected 1 to {slot_size - 1}"
        )
