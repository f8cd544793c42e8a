"""Temporary storage on disk for rows that a user imports.

DuckDB sorts the rows and removes duplicates.

DuckDB uses the disk if the rows do not fit into its memory limit. A row is an event with an
identity, (request id, row). A row without a request id gets an id from a hash of its content.
Therefore the same row in a renamed or longer file is the same event. If files contain several
copies of a row, equal copies are dropped. Among different copies of a row, the last copy is kept.
Rows that the lake already has are left out.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.extraction.copies import Copies
from evergreen.config.data import WEIGHT
from evergreen.config.features import Features
from evergreen.contracts.raw_rows import EVENT_TIME, LABEL, REQUEST_ID, ROW
from evergreen.rows.archived_rows import reading_parquet
from evergreen.rows.raw_schema import (
    BATCH_ROWS,
    TIME_TYPE,
    click_columns,
    lake_schema,
    open_parquet,
    raw_batch,
)
from evergreen.rows.text import sql_path, sql_text
from evergreen.runtime.errors import PermanentError, first_line
from evergreen.runtime.forked import available_cores

_MEMORY = "1GB"
"""Memory limit of DuckDB. Larger sorts use the disk."""
_POSITION = "_position"
"""Column with a row's position in the files, from 0."""
_OWN_ID = "row-"
"""Prefix of ids that are made from a row's content."""


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Numbers of kept and dropped rows."""

    rows: int
    """Events that were kept."""
    clicks: int
    """Number of kept events with label 1."""
    copies: Copies
    """Number of dropped copies. The last copy of each row is kept."""
    known: int
    """Rows that were left out because the lake already has the rows."""
    repeated: int
    """Number of kept events that equal an earlier event except for the label. Only events without
    an id of their own are counted."""


class Known(NamedTuple):
    """Comparison of events with the rows of a lake."""

    num_equal: int
    """Events that are in the lake."""
    num_others: int
    """Events whose key is in the lake with other features."""
    example: str
    """Example for messages: the key of one event that `num_others` counts."""


class Spool:
    """Temporary folder for rows that a user imports. The rows are written once, then read in order.

    Args:
        folder: Existing folder for the rows and for DuckDB's temporary files.
        features: Features of the rows.
        weighted: Whether rows have weights.
        salt: Salt of the ids that are computed from a row's content. Rows with the same content get
            different ids under different salts.
    """

    def __init__(self, folder: Path, *, features: Features, weighted: bool, salt: str = "") -> None:
        self._features, self._weighted, self.salt = features, weighted, salt
        self._schema = lake_schema(features, weighted=weighted)
        # Columns are named by position, because DuckDB ignores case in names.
        self._columns = {name: f"c{i}" for i, name in enumerate(self._schema.names)}
        self._path, self._folder, self._stack = folder / "spool.parquet", folder, ExitStack()
        self._spooled = pa.schema([*self._plain_fields(), pa.field(_POSITION, pa.int64())])
        self._writer = self._stack.enter_context(
            pq.ParquetWriter(self._path, self._spooled, compression="lz4")
        )
        self.num_rows = 0

    def _plain_fields(self) -> list[Any]:
        return [
            pa.field(self._columns[each.name], pa.int64() if each.name == EVENT_TIME else each.type)
            for each in self._schema
        ]

    def write(self, batch: Any) -> None:
        """Append rows in the lake's schema. Request id, row and time may be null."""
        positions = pa.array(self.num_rows + np.arange(batch.num_rows, dtype=np.int64))
        self._writer.write_batch(
            pa.record_batch([*self._plain(batch), positions], schema=self._spooled)
        )
        self.num_rows += batch.num_rows

    def _plain(self, batch: Any) -> list[Any]:
        """Return the columns of a batch in the schema's order, with times as numbers.

        Absent columns become null.
        """
        here, found = set(batch.schema.names), []
        for each, plain in zip(self._schema, self._plain_fields()):
            column = (
                batch.column(each.name)
                if each.name in here
                else pa.nulls(batch.num_rows, each.type)
            )
            found.append(
                (column.cast(TIME_TYPE) if each.name == EVENT_TIME else column).cast(plain.type)
            )
        return found

    def plain_batches(self, path: Path) -> Iterator[Any]:
        """Yield the rows of a lake's Parquet file with the spool's column names.

        Raises:
            ContractError: the file is not readable Parquet, or a column has an unexpected type.
        """
        with reading_parquet(path):
            file = open_parquet(path)
            present = [name for name in self._schema.names if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=present):
                yield pa.record_batch(self._plain(batch), schema=pa.schema(self._plain_fields()))

    def close(self) -> "Events":
        """Finish writing and return the events.

        Raises:
            PermanentError: the disk is full.
        """
        self._stack.close()
        return Events(self)

    def rows_of(self, source: str, *, more: str = "") -> str:
        """Return an SQL query that selects key, label, time, weight and a digest of the features.

        The digest covers the names and values of all features that are not null. The order of the
        features, or a new feature without a value, does not change the digest.
        """
        column = self._columns
        names = sorted(
            name for name in click_columns(self._features, weighted=False) if name != LABEL
        )
        values = ", ".join(
            f"{sql_text(name)} || '=' || {self._text_of(name)}"
            for name in names  # null if the value is null
        )
        weight = f"coalesce({column[WEIGHT]}, 1)" if self._weighted else "1"
        content = f"md5(to_json(list_filter([{values}], lambda value: value IS NOT NULL))::VARCHAR)"
        return (
            f"SELECT {column[LABEL]} AS label, {column[EVENT_TIME]} AS time, {column[REQUEST_ID]} "
            f"AS request, {column[ROW]} AS number, {weight} AS weight, {content} AS content{more} "
            f"FROM {source}"
        )

    def _text_of(self, name: str) -> str:
        column = self._columns[name]
        return (
            f"to_json({column})::VARCHAR" if name in self._features.lists else f"{column}::VARCHAR"
        )


class Events:
    """The events of a closed spool. Leaving the context closes DuckDB."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        config: dict[str, str | bool | int | float | list[str]] = {
            "threads": available_cores(),
            "memory_limit": _MEMORY,
            "temp_directory": str(spool._folder / "sorting"),
        }
        with self._translated():
            self._connection = duckdb.connect(str(spool._folder / "events.duckdb"), config=config)
        self._rows = f"read_parquet({sql_path(spool._path)}, hive_partitioning = false)"
        self._execute(
            f"""
            CREATE TABLE events AS
            WITH spooled AS (
                SELECT *, md5(content || coalesce(time, 0)) AS identity
                FROM ({spool.rows_of(self._rows, more=f", {_POSITION} AS row_position")})
            ), numbered AS (
                -- Clicked rows come first, so each id has the same label for any order of the rows.
                SELECT *, row_number() OVER (PARTITION BY coalesce(request, identity)
                    ORDER BY CASE WHEN request IS NULL THEN -label END, row_position) - 1 AS nth
                FROM spooled
            )
            SELECT row_position, label, time, content, weight, request IS NOT NULL AS is_named,
                request IS NULL AND nth > 0 AS is_repeated,
                coalesce(request, '{_OWN_ID}{spool.salt}' || identity || '-' || nth) AS request,
                (CASE WHEN request IS NULL THEN 0 ELSE coalesce(number, nth) END)::INTEGER AS number
            FROM numbered
            """
        )
        self._execute("CREATE TABLE dropped (row_position BIGINT, kind VARCHAR)")
        # Ids that are made from content are unique, so only rows with an id of their own can have
        # copies.
        self._execute(
            """
            INSERT INTO dropped
            WITH copies AS (
                SELECT *, count(*) OVER key AS copies,
                    last_value(row_position) OVER whole AS newest,
                    last_value(content) OVER whole AS new_content,
                    last_value(label) OVER whole AS new_label,
                    last_value(time) OVER whole AS new_time,
                    last_value(weight) OVER whole AS new_weight
                FROM events WHERE is_named
                WINDOW key AS (PARTITION BY request, number),
                    whole AS (PARTITION BY request, number ORDER BY row_position
                        ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)
            )
            SELECT row_position, CASE WHEN content <> new_content THEN 'conflicting'
                WHEN label <> new_label OR time IS DISTINCT FROM new_time OR weight <> new_weight
                THEN 'updated'
                ELSE 'equal' END
            FROM copies WHERE copies > 1 AND row_position <> newest
            """
        )

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def leave_out_known(self, files: Sequence[Path], *, with_times: bool) -> Known:
        """Leave out the events that occur with the same content in a lake's Parquet files.

        Args:
            files: Files in the lake's schema.
            with_times: Whether an event is a copy of a row only if the event and the row also have
                the same time.

        Returns:
            The number of events that were left out, and the number of events that are in the lake
            with other features.

        Raises:
            ContractError: a file is not readable Parquet, or not in the lake's schema.
        """
        self._execute(
            "CREATE OR REPLACE TABLE known (label INTEGER, time BIGINT, request VARCHAR, number "
            "INTEGER, weight DOUBLE, content VARCHAR)"
        )
        for path in files:
            for batch in self._spool.plain_batches(path):
                self._connection.register("held", pa.Table.from_batches([batch]))
                self._execute(f"INSERT INTO known {self._spool.rows_of('held')}")
        same_time = "AND known.time = events.time" if with_times else ""
        before = self._count("SELECT count(*) FROM dropped")
        self._execute(
            f"""
            INSERT INTO dropped
            SELECT row_position, 'known' FROM events
            SEMI JOIN known ON known.request = events.request AND known.number = events.number
                AND known.label = events.label AND known.content = events.content
                AND known.weight::FLOAT = events.weight::FLOAT {same_time}
            WHERE row_position NOT IN (SELECT row_position FROM dropped)
            """
        )
        num_known = self._count("SELECT count(*) FROM dropped") - before
        others = (
            "FROM events SEMI JOIN known ON known.request = events.request AND known.number = "
            "events.number AND known.content <> events.content WHERE row_position NOT IN "
            "(SELECT row_position FROM dropped)"
        )
        num_others = self._count(f"SELECT count(*) {others}")
        example = self._fetch(f"SELECT request, number {others} ORDER BY row_position LIMIT 1")
        return Known(
            num_known, num_others, f"{example[0][0]!r}, {example[0][1]}" if example else ""
        )

    def days(self) -> list[int]:
        """Return the days that have events, as numbers of days since 1970.

        The list is empty if the events have no times.
        """
        query = "SELECT DISTINCT time // 86400000000 FROM events WHERE time IS NOT NULL ORDER BY 1"
        return [day for (day,) in self._fetch(query)]

    def counts(self) -> RowCounts:
        """Return the counts of kept and dropped rows."""
        kinds = dict(self._fetch("SELECT kind, count(*) FROM dropped GROUP BY kind"))
        ((rows, clicks, repeated),) = self._fetch(
            "SELECT count(*), coalesce(sum(label), 0), count(*) FILTER (is_repeated) FROM events "
            "WHERE row_position NOT IN (SELECT row_position FROM dropped)"
        )
        found = self._fetch(
            "SELECT request, number FROM events JOIN dropped USING (row_position) WHERE kind = "
            "'conflicting' ORDER BY row_position LIMIT 1"
        )
        copies = Copies(
            num_equal=kinds.get("equal", 0),
            num_updated=kinds.get("updated", 0),
            num_conflicting=kinds.get("conflicting", 0),
            example=f"{REQUEST_ID} {found[0][0]!r}, row {found[0][1]}" if found else "",
        )
        return RowCounts(
            rows=rows,
            clicks=int(clicks),
            copies=copies,
            known=kinds.get("known", 0),
            repeated=repeated,
        )

    def in_time_order(self) -> Iterator[Any]:
        """Yield batches of events in the lake's schema, sorted by time, then request, then row."""
        yield from self._batches("time", "time, request, number")

    def spread(self, *, start: int, length: int) -> Iterator[Any]:
        """Yield the events in file order, with times spread evenly over an interval.

        The interval is [start, start + length) in microseconds. Event i of n gets the time start +
        floor(i * length / n). All rows of a request get the time of its first row.
        """
        number = "(row_number() OVER (ORDER BY row_position) - 1)::HUGEINT"
        evenly = f"({start} + {number} * {length} // count(*) OVER ())::BIGINT"
        self._execute(
            f"""
            CREATE OR REPLACE TABLE spread AS
            SELECT row_position, min(even) OVER (PARTITION BY request) AS spread_time FROM (
                SELECT row_position, request, {evenly} AS even FROM events
                WHERE row_position NOT IN (SELECT row_position FROM dropped)
            )
            """
        )
        yield from self._batches(
            "spread_time", "spread_time, row_position", "JOIN spread USING (row_position)"
        )

    def _batches(self, time: str, order: str, join: str = "") -> Iterator[Any]:
        schema, columns = self._spool._schema, self._spool._columns
        own = {REQUEST_ID: "events.request", ROW: "events.number", EVENT_TIME: time}
        listed = ", ".join(
            f"{own.get(name, f'spooled.{column}')} AS {column}" for name, column in columns.items()
        )
        query = (
            f"SELECT {listed} FROM {self._rows} AS spooled JOIN events ON events.row_position = "
            f"spooled.{_POSITION} {join} WHERE events.row_position NOT IN "
            f"(SELECT row_position FROM dropped) ORDER BY {order}"
        )
        with self._translated():
            for found in self._connection.sql(query).to_arrow_reader(BATCH_ROWS):
                named = dict(zip(schema.names, found.columns))
                named[EVENT_TIME] = named[EVENT_TIME].cast(pa.int64()).cast(TIME_TYPE)
                yield raw_batch(
                    {name: named[name].cast(schema.field(name).type) for name in schema.names},
                    schema,
                )

    def _execute(self, query: str) -> None:
        with self._translated():
            self._connection.execute(query)

    def _fetch(self, query: str) -> list[tuple[Any, ...]]:
        with self._translated():
            return self._connection.execute(query).fetchall()

    def _count(self, query: str) -> int:
        ((number,),) = self._fetch(query)
        return int(number)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate errors of DuckDB to PermanentError with the folder's name.

        The messages contain no data of users, because the SQL contains none.
        """
        try:
            yield
        except duckdb.Error as error:
            raise PermanentError(
                f"rows cannot be sorted in {self._spool._folder.parent}: {first_line(error)}"
            ) from error
