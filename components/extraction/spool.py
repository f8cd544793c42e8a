"""Rows of a user's files on disk: which event each row is, and all of them in order, by DuckDB and out of memory.

A row is an event with an identity, (request id, row). Files that say neither give each row an id made of its content,
so that the same row in a renamed or grown file is the same event. A file may hold a row again: an equal copy is
dropped, of different copies the last one written counts. Rows that are in the lake already are left out.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.contracts.features import Features
from components.contracts.raw_rows import EVENT_TIME, LABEL, REQUEST_ID, ROW, WEIGHT
from components.extraction.copies import Copies
from components.extraction.raw_schema import (
    BATCH_ROWS,
    TIME_TYPE,
    click_columns,
    lake_schema,
    open_parquet,
    raw_batch,
)
from components.extraction.readers.text import sql_text
from components.runtime.errors import ContractError, PermanentError, first_line
from components.runtime.forked import available_cores

_MEMORY = "1GB"
"""Most that sorting holds; what is more goes to disk."""
_PLACE = "_place"
"""Column of a row's place in the files, from 0."""
_TIME = "_time"
"""Column of a row's time, microseconds since the epoch."""
OWN_ID = "row-"
"""How ids made of a row's content begin."""


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """What became of the rows that were spooled."""

    rows: int
    """Events that are left."""
    clicks: int
    """Of these, with label 1."""
    copies: Copies
    """Earlier copies of rows, dropped: the last one written counts."""
    known: int
    """Rows left out since the lake holds them already."""


class Spool:
    """A user's rows in a folder; written once, then read in order.

    Args:
        folder: Existing folder for the spool and for what sorting puts aside.
        features: Of the rows.
        weighted: Whether rows have weights.
    """

    def __init__(self, folder: Path, *, features: Features, weighted: bool) -> None:
        self._features, self._weighted = features, weighted
        self._schema = lake_schema(features, weighted=weighted)
        self._path, self._folder, self._stack = folder / "spool.parquet", folder, ExitStack()
        fields = [field for field in self._schema if field.name != EVENT_TIME]
        self._spooled = pa.schema([*fields, pa.field(_TIME, pa.int64()), pa.field(_PLACE, pa.int64())])
        self._writer = self._stack.enter_context(pq.ParquetWriter(self._path, self._spooled, compression="lz4"))
        self.num_rows = 0

    def write(self, batch: Any) -> None:
        """Add rows in the lake's schema; request id, row and time may be null."""
        named = {name: batch.column(name) for name in batch.schema.names}
        named[_TIME] = named.pop(EVENT_TIME).cast(pa.int64())
        named[_PLACE] = pa.array(self.num_rows + np.arange(batch.num_rows, dtype=np.int64))
        self._writer.write_batch(raw_batch(named, self._spooled))
        self.num_rows += batch.num_rows

    def close(self) -> "Events":
        """End writing, and return the events that the rows are.

        Raises:
            PermanentError: The disk has no room.
        """
        self._stack.close()
        return Events(self)

    def columns_of_content(self) -> list[str]:
        """Return what a row says beside its label: the same in every copy of an event."""
        names = [name for name in click_columns(self._features, weighted=self._weighted) if name != LABEL]
        return [name for name in names if name != WEIGHT]


class Events:
    """The events of a closed spool; a context that removes what DuckDB holds."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": available_cores(),
            "memory_limit": _MEMORY,
            "temp_directory": str(spool._folder / "sorting"),
        }
        self._connection = duckdb.connect(str(spool._folder / "events.duckdb"), config=config)
        self._num_known = 0
        content = _digest(spool.columns_of_content())
        self._execute(
            f"""
            CREATE TABLE events AS
            WITH spooled AS (
                SELECT {_PLACE} AS place, {LABEL} AS label, {_TIME} AS time, {REQUEST_ID} AS request, {ROW} AS number,
                    md5({content}) AS content, {_weight(spool._weighted)} AS weight,
                    md5(concat_ws(chr(31), {content}, coalesce({_TIME}, 0))) AS identity
                FROM read_parquet({sql_text(str(spool._path))})
            ), numbered AS (
                SELECT *, row_number() OVER (PARTITION BY coalesce(request, identity) ORDER BY place) - 1 AS nth
                FROM spooled
            )
            SELECT place, label, time, content, weight, request IS NOT NULL AND number IS NOT NULL AS is_named,
                coalesce(request, '{OWN_ID}' || identity || '-' || nth) AS request,
                (CASE WHEN request IS NULL THEN 0 ELSE coalesce(number, nth) END)::INTEGER AS number
            FROM numbered
            """
        )
        self._execute("CREATE TABLE dropped (place BIGINT, kind VARCHAR)")
        # Only rows that a file names can be there twice: ids made here differ.
        self._execute(
            """
            INSERT INTO dropped
            WITH copies AS (
                SELECT *, count(*) OVER key AS copies, last_value(place) OVER whole AS newest,
                    last_value(content) OVER whole AS new_content, last_value(label) OVER whole AS new_label,
                    last_value(time) OVER whole AS new_time, last_value(weight) OVER whole AS new_weight
                FROM events WHERE is_named
                WINDOW key AS (PARTITION BY request, number),
                    whole AS (PARTITION BY request, number ORDER BY place
                        ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)
            )
            SELECT place, CASE WHEN content <> new_content THEN 'conflicting'
                WHEN label <> new_label OR time IS DISTINCT FROM new_time OR weight <> new_weight THEN 'updated'
                ELSE 'equal' END
            FROM copies WHERE copies > 1 AND place <> newest
            """
        )

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def leave_out_known(self, files: Sequence[Path], *, with_times: bool) -> int:
        """Leave out the events that Parquet files of a lake hold with the same content; returns how many.

        Args:
            files: In the lake's schema.
            with_times: Whether an event must lie at the same time, too.

        Raises:
            ContractError: A file is not readable Parquet, or not in the lake's schema.
        """
        if not files:
            return 0
        listed, schema = "[" + ", ".join(sql_text(str(path)) for path in files) + "]", self._spool._schema
        present = {name for path in files for name in open_parquet(path).schema_arrow.names}
        absent = set(schema.names) - present
        names = [f"NULL AS {_name(name)}" if name in absent else _name(name) for name in schema.names]
        same_time = "AND known.time = events.time" if with_times else ""
        weight = _weight(self._spool._weighted)
        before = self._count("SELECT count(*) FROM dropped")
        self._execute(
            f"""
            INSERT INTO dropped
            WITH known AS (
                SELECT DISTINCT {REQUEST_ID} AS request, {ROW} AS number, {LABEL} AS label,
                    epoch_us({EVENT_TIME}) AS time,
                    md5({_digest(self._spool.columns_of_content())}) AS content, {weight} AS weight
                FROM (SELECT {", ".join(names)} FROM read_parquet({listed}, union_by_name = true))
            )
            SELECT place, 'known' FROM events
            SEMI JOIN known ON known.request = events.request AND known.number = events.number
                AND known.label = events.label AND known.content = events.content AND known.weight = events.weight
                {same_time}
            WHERE place NOT IN (SELECT place FROM dropped)
            """
        )
        return self._count("SELECT count(*) FROM dropped") - before

    def days(self) -> list[int]:
        """Return the days on which events lie, as days since 1970; empty where they have no times."""
        query = "SELECT DISTINCT time // 86400000000 FROM events WHERE time IS NOT NULL ORDER BY 1"
        return [day for (day,) in self._connection.execute(query).fetchall()]

    def counts(self) -> RowCounts:
        """Return what became of all rows."""
        kinds = dict(self._connection.execute("SELECT kind, count(*) FROM dropped GROUP BY kind").fetchall())
        ((rows, clicks),) = self._connection.execute(
            "SELECT count(*), coalesce(sum(label), 0) FROM events WHERE place NOT IN (SELECT place FROM dropped)"
        ).fetchall()
        found = self._connection.execute(
            "SELECT request, number FROM events JOIN dropped USING (place) WHERE kind = 'conflicting' "
            "ORDER BY place LIMIT 1"
        ).fetchall()
        copies = Copies(
            num_equal=kinds.get("equal", 0),
            num_updated=kinds.get("updated", 0),
            num_conflicting=kinds.get("conflicting", 0),
            example=f"{REQUEST_ID} {found[0][0]!r}, row {found[0][1]}" if found else "",
        )
        return RowCounts(rows=rows, clicks=int(clicks), copies=copies, known=kinds.get("known", 0))

    def in_time_order(self) -> Iterator[Any]:
        """Yield the events as batches in the lake's schema, by time, then request and row."""
        yield from self._batches("time", "time, request, number")

    def spread(self, *, start: int, length: int) -> Iterator[Any]:
        """Yield the events in file order, with times spread evenly over [start, start + length) microseconds.

        Event i of n lies at start + floor(i * length / n); the rows of a request lie at the time of its first.
        """
        number = "(row_number() OVER (ORDER BY place) - 1)::HUGEINT"
        evenly = f"({start} + {number} * {length} // count(*) OVER ())::BIGINT"
        self._execute(
            f"""
            CREATE OR REPLACE TABLE spread AS
            SELECT place, min(even) OVER (PARTITION BY request) AS spread_time FROM (
                SELECT place, request, {evenly} AS even FROM events WHERE place NOT IN (SELECT place FROM dropped)
            )
            """
        )
        yield from self._batches("spread_time", "spread_time, place", "JOIN spread USING (place)")

    def _batches(self, time: str, order: str, join: str = "") -> Iterator[Any]:
        schema = self._spool._schema
        own = {REQUEST_ID: "events.request", ROW: "events.number", EVENT_TIME: time}
        columns = ", ".join(f"{own.get(name, 'spooled.' + _name(name))} AS {_name(name)}" for name in schema.names)
        query = (
            f"SELECT {columns} FROM read_parquet({sql_text(str(self._spool._path))}) AS spooled "
            f"JOIN events ON events.place = spooled.{_PLACE} {join} "
            f"WHERE events.place NOT IN (SELECT place FROM dropped) ORDER BY {order}"
        )
        try:
            for found in self._connection.sql(query).to_arrow_reader(BATCH_ROWS):
                named = dict(zip(schema.names, found.columns))
                named[EVENT_TIME] = named[EVENT_TIME].cast(pa.int64()).cast(TIME_TYPE)
                yield raw_batch({name: named[name].cast(schema.field(name).type) for name in schema.names}, schema)
        except duckdb.Error as error:
            raise PermanentError(f"rows in {self._spool._folder} cannot be sorted: {first_line(error)}") from error

    def _execute(self, query: str) -> None:
        try:
            self._connection.execute(query)
        except (duckdb.InvalidInputException, duckdb.ConversionException, duckdb.BinderException) as error:
            raise ContractError(f"rows cannot be compared: {first_line(error)}") from error
        except duckdb.Error as error:
            raise PermanentError(f"rows in {self._spool._folder} cannot be sorted: {first_line(error)}") from error

    def _count(self, query: str) -> int:
        ((number,),) = self._connection.execute(query).fetchall()
        return int(number)


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _digest(columns: Sequence[str]) -> str:
    """Return an SQL expression: the values of columns as one text, which differs where one of them does."""
    values = ", ".join(f"coalesce({_name(name)}::VARCHAR, chr(30))" for name in columns)
    return f"concat_ws(chr(31), {values})"


def _weight(weighted: bool) -> str:
    return f"coalesce({WEIGHT}, 1)" if weighted else "1"
