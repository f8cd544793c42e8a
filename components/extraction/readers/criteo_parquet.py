"""Criteo as Parquet: NVIDIA's form (int32 `label, I1..I13, C1..C26`, hashes signed), or hex strings in C1..C26.

A negative int32 hash is the unsigned one of the same bits, so both forms and the TSV name a category alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from components.contracts.criteo import CATEGORICAL, LABEL
from components.extraction.raw_schema import (
    BATCH_ROWS,
    CLICK_COLUMNS,
    RAW_SCHEMA,
    find_malformed,
    nan_to_null,
    open_parquet,
    raw_batch,
    set_rows_aside,
    unreadable,
    without_rows,
)
from components.extraction.readers.values import parse_hex
from components.extraction.set_aside import SetAside
from components.runtime.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class CriteoParquet:
    """One file of that form; a table in our own raw schema is read by `RawParquet`."""

    path: Path

    def batches(self, set_aside: SetAside) -> Iterator[Any]:
        """See `Reader.batches`."""
        file = open_parquet(self.path)
        names = {name.lower(): name for name in file.schema_arrow.names}
        wanted = [names[name.lower()] for name in CLICK_COLUMNS]
        first_row = 1
        try:
            for found in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                columns, reasons = self._parse(found.select(wanted))
                batch = raw_batch(columns)
                for at, reason in find_malformed(batch, keys=False).items():
                    reasons.setdefault(at, reason)
                set_rows_aside(found, reasons, path=self.path, first_row=first_row, set_aside=set_aside)
                first_row += found.num_rows
                set_aside.saw(self.path, found.num_rows)
                yield without_rows(batch, reasons)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(self.path, error) from error

    def _parse(self, found: Any) -> tuple[dict[str, Any], dict[int, str]]:
        columns: dict[str, Any] = {}
        reasons: dict[int, str] = {}
        for name, values in zip(CLICK_COLUMNS, found.columns):
            if name in CATEGORICAL:
                columns[name] = self._hashes(name, values, reasons)
            else:
                columns[name] = self._numbers(name, values)
        return columns, reasons

    def _numbers(self, name: str, values: Any) -> Any:
        if pa.types.is_null(values.type) or pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            target = RAW_SCHEMA.field(name).type
            if name == LABEL and pa.types.is_floating(values.type):
                values = nan_to_null(values)
            numbers = values.cast(target, safe=name == LABEL)
            return nan_to_null(numbers) if pa.types.is_floating(target) else numbers
        raise ContractError(f"{self.path} has {name} of type {values.type}, expected numbers")

    def _hashes(self, name: str, values: Any, reasons: dict[int, str]) -> Any:
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if pa.types.is_null(values.type):
            return values.cast(pa.int64())
        if values.type == pa.int32():
            return values.view(pa.uint32()).cast(pa.int64())
        if pa.types.is_integer(values.type) and values.type != pa.uint64():
            return values.cast(pa.int64())
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            raise ContractError(f"{self.path} has {name} of type {values.type}, expected integers or hex strings")
        encoded = values.cast(pa.string()).cast(pa.binary()).dictionary_encode()
        hashes = parse_hex(encoded.dictionary).take(encoded.indices)
        # An empty string is missing, as an empty field of the TSV is.
        wrong = pc.and_(hashes.is_null(), pc.greater(pc.fill_null(pc.binary_length(values), 0), 0))
        for at in pc.indices_nonzero(wrong).to_pylist():
            reasons.setdefault(at, f"{name} is {values[at].as_py()!r}, expected 1 to 8 hex digits or nothing")
        return hashes
