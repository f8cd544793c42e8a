"""Users' Parquet files, read by DuckDB in the same chunks as text files."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from evergreen.rows.lines import LineCounts
from evergreen.rows.raw_schema import open_parquet
from evergreen.rows.text import Chunk, sql_path
from evergreen.runtime.errors import ContractError, first_line
from evergreen.runtime.forked import available_cores

_CHUNK_ROWS = 65_536
_MEMORY = "2GB"
"""Memory limit of DuckDB for one file. Larger pages are refused."""


class _RowTexts:
    """Texts of a chunk's rows as JSON (see `text.Texts`)."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def of(self, at: int, number: int) -> str:
        """Return the row at a position of the chunk."""
        values = {
            name: shown_value(column[at])
            for name, column in zip(self._rows.schema.names, self._rows.columns)
        }
        return json.dumps(values, default=str)[:2000]


def shown_value(scalar: Any) -> Any:
    """Return a value of an Arrow array for display.

    A time in nanoseconds becomes text, because Python has no type for nanoseconds.
    """
    try:
        return scalar.as_py()
    except ValueError:
        return str(scalar)


@dataclass(frozen=True, kw_only=True)
class ParquetRows:
    """The rows of one Parquet file of a user."""

    path: Path
    names: tuple[str, ...]
    _own: tuple[str, ...] = ()
    """Names that DuckDB gives to the columns. The names are unique without regard to case."""

    @classmethod
    def open(cls, path: Path) -> "ParquetRows":
        """Open a Parquet file of a user and read its footer.

        Raises:
            ContractError: The file is not a complete Parquet file.
        """
        names = open_parquet(path).schema_arrow.names
        with _reading(path), _connected() as connection:
            found = connection.execute(f"DESCRIBE SELECT * FROM {_table(path)}").fetchall()
        if len(found) != len(names):
            raise ContractError(
                f"{path} has {len(names)} columns, but DuckDB reads {len(found)}, expected as many"
            )
        return cls(path=path, names=tuple(names), _own=tuple(name for name, *_ in found))

    def chunks(self, wanted: Sequence[str]) -> Iterator[Chunk]:
        """Yield the requested columns of all rows in file order. Only one chunk is in memory.

        Raises:
            ContractError: The file is corrupt.
        """
        own = [self._own[self.names.index(name)] for name in wanted]
        columns = ", ".join('"' + name.replace('"', '""') + '"' for name in own)
        first = 1
        with _reading(self.path), _connected() as connection:
            query = connection.sql(f"SELECT {columns} FROM {_table(self.path)}")
            for rows in query.to_arrow_reader(_CHUNK_ROWS):
                numbers = first + np.arange(rows.num_rows, dtype=np.int64)
                first += rows.num_rows
                named = pa.record_batch(rows.columns, names=list(wanted))
                yield Chunk(named, numbers, [], LineCounts(rows=rows.num_rows), _RowTexts(named))


def _table(path: Path) -> str:
    return f"read_parquet({sql_path(path)}, hive_partitioning = false)"


def _connected() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"threads": available_cores(), "memory_limit": _MEMORY})
    connection.execute("SET TimeZone = 'UTC'")
    return connection


class _reading:
    """Converts errors of DuckDB to errors about the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, duckdb.Error | pa.ArrowException):
            raise ContractError(
                f"{self._path} is not a readable Parquet file: {first_line(error)}"
            ) from error
