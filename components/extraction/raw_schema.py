"""The raw schema as Arrow types, and the row checks that every Parquet form shares.

Takes its facts from `contracts.raw_rows`.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts import raw_rows
from components.contracts.features import MAX_CATEGORY, Features, category_of
from components.extraction.columns import is_list
from components.extraction.malformed_rows import MalformedRows
from components.store.archived_rows import arrow_schema, reading_parquet

BATCH_ROWS = 65_536
"""Rows of a batch in memory and of a row group on disk."""


KEY_COLUMNS = (raw_rows.REQUEST_ID, raw_rows.ROW, raw_rows.EVENT_TIME)
TIME_TYPE = pa.timestamp("us", tz="UTC")
"""Of `event_time`."""
EXPECTED_WEIGHT = "a finite number of at least 0"
"""What a sample weight is, for people."""
BYTES = (pa.types.is_binary, pa.types.is_large_binary)
"""Arrow types by which some writers keep texts."""


def raw_schema(features: Features, *, weighted: bool = False) -> Any:
    """The raw schema of rows with these features."""
    return arrow_schema(raw_rows.raw_types(features, weighted=weighted))


def lake_schema(features: Features, *, weighted: bool = False) -> Any:
    """The schema of rows that a person's files bring to a lake."""
    return arrow_schema(raw_rows.lake_types(features, weighted=weighted))


def click_columns(features: Features, *, weighted: bool = False) -> list[str]:
    """What a row says by itself; the other columns of the raw schema say where it came from."""
    return [raw_rows.LABEL, *features.names, *(raw_rows.WEIGHT_TYPES if weighted else ())]


def open_parquet(path: Path) -> Any:
    """The Parquet file at `path`, footer read.

    Raises:
        ContractError: not a whole Parquet file.
    """
    with reading_parquet(path):
        return pq.ParquetFile(path)


def raw_batch(columns: dict[str, Any], schema: Any) -> Any:
    """A record batch in the raw schema `schema` from some of its columns; the others are null."""
    num_rows = len(next(iter(columns.values())))
    arrays = [columns.get(f.name) for f in schema]
    return pa.record_batch(
        [a if a is not None else pa.nulls(num_rows, f.type) for a, f in zip(arrays, schema)], schema=schema
    )


def texts(values: Any) -> Any:
    """The words (Arrow string) that `categories` sees in texts, bytes, truth values or whole numbers.

    Raises:
        pa.ArrowException: as `categories`.
    """
    return (values.cast(pa.int64()) if pa.types.is_floating(values.type) else values).cast(pa.string())


def categories(values: Any) -> Any:
    """The categories (Arrow int64) that whole numbers, texts or truth values stand for; each distinct one hashed once.

    An empty text is missing, as it is in a text file and for the client.

    Raises:
        pa.ArrowException: a number is no whole one, or bytes are no UTF-8.
    """
    if any(is_type(values.type) for is_type in (pa.types.is_boolean, *BYTES)):
        values = values.cast(pa.string())
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        values = values.cast(pa.int64()) if not pa.types.is_uint64(values.type) else values
        is_own = pc.and_(pc.greater_equal(values, 0), pc.less_equal(values, MAX_CATEGORY))
        if pc.all(is_own).as_py() is not False:
            return values.cast(pa.int64())
        values = values.cast(pa.string())
    encoded = values.dictionary_encode()
    found = [category_of(text) if text else None for text in encoded.dictionary.to_pylist()]
    return pa.array(found, pa.int64()).take(encoded.indices)


def in_lists(values: Any, convert: Callable[[Any], Any]) -> Any:
    """The lists (Arrow) with their elements, all at once, as `convert` makes them: without nulls, and null where empty.

    Raises:
        pa.ArrowException: the values are no lists, or as `convert`.
    """
    if pa.types.is_null(values.type):
        values = values.cast(pa.list_(pa.int64()))
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    if not is_list(values.type):
        raise pa.ArrowTypeError("they are no lists")
    elements = convert(values.flatten())
    list_of = np.repeat(np.arange(len(values)), raw_rows.list_lengths(values))
    is_there = elements.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.bincount(list_of[is_there], minlength=len(values))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, mask=np.append(lengths == 0, False)), elements.drop_null())


def nan_to_null(values: Any) -> Any:
    """`values` (floating) with NaN, the tensors' missing value, as null."""
    return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)


def find_malformed(
    batch: Any, features: Features, *, keys: Collection[str] = (), names: Mapping[str, str] | None = None
) -> dict[int, str]:
    """Why rows of a raw batch break the contract, by row position; the first reason of each.

    A weight is judged where there is the column. `keys` are those of `KEY_COLUMNS` that must have a value as well;
    `names` is what the file calls columns, where it calls them otherwise.
    """
    reasons: dict[int, str] = {}

    def note(wrong: Any, name: str, expected: str) -> None:
        # Null means missing, which only the required columns forbid; their `wrong` is never null.
        if pc.any(wrong).as_py():
            for at in np.flatnonzero(wrong.fill_null(False).to_numpy(zero_copy_only=False)):
                value = batch.column(name)[int(at)].as_py()
                reasons.setdefault(int(at), f"{(names or {}).get(name, name)} is {value!r}, expected {expected}")

    label = batch.column(raw_rows.LABEL)
    note(pc.invert(pc.is_in(label, value_set=pa.array([0, 1], label.type))), raw_rows.LABEL, "0 or 1")
    for name in features.numeric:
        note(pc.invert(pc.is_finite(batch.column(name))), name, "a finite number")
    if raw_rows.WEIGHT in batch.schema.names:
        weight = batch.column(raw_rows.WEIGHT)
        is_weight = pc.and_(pc.is_finite(weight), pc.greater_equal(weight, 0))
        note(pc.invert(is_weight.fill_null(False)), raw_rows.WEIGHT, EXPECTED_WEIGHT)
    for name in keys:
        note(pc.is_null(batch.column(name)), name, "a value")
    return reasons


def record_malformed(
    batch: Any, reasons: dict[int, str], *, path: Path, first_row: int, malformed: MalformedRows
) -> None:
    """Records the rows of `batch` that `reasons` names as malformed, under their row number in `path`."""
    for at, reason in sorted(reasons.items()):
        text = json.dumps(batch.slice(at, 1).to_pylist()[0], default=str)
        malformed.add(path, first_row + at, reason, text=text)


def without_rows(batch: Any, positions: Iterable[int]) -> Any:
    """`batch` without the rows at `positions`."""
    sound = np.ones(batch.num_rows, dtype=bool)
    sound[list(positions)] = False
    return batch if sound.all() else batch.filter(pa.array(sound))
