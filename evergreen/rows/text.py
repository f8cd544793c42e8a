"""Files of delimited text and of JSON lines, split into columns by DuckDB.

`lines` first decides which lines form a record, so that DuckDB gets only complete records. An error
is raised if DuckDB does not return exactly one row per record. The columns of JSON lines are texts
too. A JSON number is returned as it is written, and a JSON list as its text in brackets.
"""

import csv
import re
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evergreen.rows.lines import (
    BLOCK_BYTES,
    Block,
    Dialect,
    LineCounts,
    LineTexts,
    Records,
    Rejected,
    read_blocks,
    split_records,
)
from evergreen.runtime.errors import ContractError, first_line
from evergreen.runtime.forked import available_cores

_DELIMITERS = (",", "\t", ";", "|")
_HEAD_BYTES = 1 << 20
_HEAD_LINES = 5_000
_JSON = Dialect(delimiter="\x01", num_fields=1, has_quotes=False)
"""Dialect of JSON lines, in which each line is a record. The delimiter is a control character,
because JSON text contains no control characters."""


_IS_OBJECT = "coalesce(try(json_type(line)) = 'OBJECT', false)"
"""SQL condition that the text `line` is a JSON object."""


class Chunk(NamedTuple):
    """Some rows of a file, in file order."""

    rows: Any
    """Arrow record batch of the requested columns. The columns have their names in the file. In
    text files, all columns are strings."""
    numbers: NDArray[np.int64]
    """Line number of each row in the file, or its row number in Parquet, from 1."""
    rejected: list[Rejected]
    """Rejected lines between the rows of this chunk."""
    counts: LineCounts
    texts: "Texts"


class Texts(Protocol):
    """Original texts of rows, for display."""

    def of(self, at: int, number: int) -> str:
        """Return the text of a row.

        Args:
            at: Position of the row within the chunk.
            number: Number of the row in the file.
        """


class _Lines:
    """Original text of each row, for a file that has one row per record (see `Texts`)."""

    def __init__(self, lines: LineTexts) -> None:
        self._lines = lines

    def of(self, at: int, number: int) -> str:
        return self._lines.of(number)


@dataclass(frozen=True, kw_only=True)
class TextRows:
    """The rows of one text file."""

    path: Path
    names: tuple[str, ...]
    """Names of the columns in file order. A column without a name in the file gets the name ""."""
    dialect: Dialect
    is_json: bool = False
    num_skipped: int = 0
    """Blank lines and comments before the header."""

    def chunks(self, wanted: Sequence[str]) -> Iterator[Chunk]:
        """Yield the requested columns of all rows in file order. Only a few blocks are in memory.

        Raises:
            ContractError: The file is corrupt, as in `lines.read_blocks`.
        """
        cores = available_cores()
        with (
            tempfile.TemporaryDirectory(prefix="rows.") as folder,
            ThreadPoolExecutor(cores) as pool,
        ):
            parser, waiting = _Parser(self, wanted, Path(folder)), deque[Future[Chunk]]()
            for records in self._records():
                waiting.append(pool.submit(parser.parse, records))
                if len(waiting) > cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _records(self) -> Iterator[Records]:
        rest: Block | None = None
        for found in read_blocks(self.path, block_bytes=BLOCK_BYTES):
            block = (
                found
                if rest is None
                else Block(rest.first_line, rest.content + found.content, found.is_last)
            )
            try:
                records = split_records(block, self.dialect)
            except ContractError as error:
                raise ContractError(f"{self.path}: {error}") from error
            rest = records.rest
            yield records


class _Parser:
    """Parser that splits records into columns. Several threads use one parser."""

    def __init__(self, rows: TextRows, wanted: Sequence[str], folder: Path) -> None:
        self._rows, self._wanted, self._folder = rows, list(wanted), folder
        self._local = threading.local()

    def parse(self, records: Records) -> Chunk:
        num_rows = len(records.numbers)
        rejected, counts = records.rejected, replace(records.counts)
        if not num_rows:
            columns = [pa.array([], pa.string()) for _ in self._wanted]
            batch = pa.record_batch(columns, names=self._wanted)
            return Chunk(batch, records.numbers, rejected, counts, _Lines(records.texts))
        try:
            found = self._json(records) if self._rows.is_json else self._fields(records)
        except duckdb.Error as error:
            first, last = int(records.numbers[0]), int(records.numbers[-1])
            raise ContractError(
                f"{self._rows.path} cannot be read between line {first} and {last}: "
                f"{first_line(error)}"
            ) from error
        if found.num_rows != num_rows:
            raise ContractError(
                f"{self._rows.path} has {num_rows} records from line {int(records.numbers[0])} on, "
                "but "
                f"{found.num_rows} were parsed, expected as many"
            )
        numbers = records.numbers
        if self._rows.is_json:
            valid = np.asarray(found.column("valid").to_numpy(zero_copy_only=False), bool)
            for number in numbers[~valid].tolist():
                text = records.texts.of(number)
                rejected.append(Rejected(number, "the line has no JSON object", text))
            rejected.sort()
            counts.rows, counts.rejected = int(valid.sum()), counts.rejected + int((~valid).sum())
            found, numbers = found.filter(pa.array(valid)).drop_columns(["valid"]), numbers[valid]
        batch = pa.record_batch(
            [column.combine_chunks() for column in found.columns], names=self._wanted
        )
        return Chunk(batch, numbers, rejected, counts, _Lines(records.texts))

    def _fields(self, records: Records) -> Any:
        dialect = self._rows.dialect
        path = self._folder / f"{threading.get_ident()}.csv"
        path.write_bytes(records.content)
        positions = [self._rows.names.index(name) for name in self._wanted]
        has_quotes = dialect.has_quotes and b'"' in records.content
        options = {
            "header": "false",
            "auto_detect": "false",
            "delim": sql_text(dialect.delimiter),
            "quote": sql_text('"' if has_quotes else ""),
            "escape": sql_text(dialect.escape if has_quotes else ""),
            "new_line": "'\\n'",
            "nullstr": "''",
            "max_line_size": str(len(records.content) + 1),
            "parallel": "false",
            "columns": "{"
            + ", ".join(f"'c{i}': 'VARCHAR'" for i in range(dialect.num_fields))
            + "}",
        }
        arguments = ", ".join(f"{name} = {value}" for name, value in options.items())
        columns = ", ".join(f"c{at} AS w{i}" for i, at in enumerate(positions)) or "1 AS w0"
        found = self._connection.sql(
            f"SELECT {columns} FROM read_csv({sql_path(path)}, {arguments})"
        ).to_arrow_table()
        return found if positions else found.select([])

    def _json(self, records: Records) -> Any:
        lines = pa.array(records.content[:-1].decode().split("\n"), pa.string())
        paths = ", ".join(sql_text(_json_path(name)) for name in self._wanted)
        self._connection.register("lines", pa.table({"line": lines}))
        columns = "".join(f", found[{i + 1}] AS w{i}" for i in range(len(self._wanted)))
        return self._connection.sql(
            f"SELECT valid{columns} FROM (SELECT {_IS_OBJECT} AS valid, "
            f"CASE WHEN {_IS_OBJECT} THEN json_extract_string(line, [{paths}]::VARCHAR[]) END AS "
            "found FROM lines)"
        ).to_arrow_table()

    @property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        if not hasattr(self._local, "connection"):
            # DuckDB uses one thread per block, because several blocks are parsed in parallel.
            self._local.connection = duckdb.connect(config={"threads": 1})
        return self._local.connection  # type: ignore[no-any-return]


def sql_text(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def sql_path(path: Path) -> str:
    """Return a file's path as an SQL literal, escaping glob characters."""
    return sql_text(re.sub(r"[\[*?]", r"[\g<0>]", str(path)))


def _json_path(name: str) -> str:
    return '$."' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


# -- formats


class Head(NamedTuple):
    """First lines of a text file."""

    lines: list[str]
    """First lines of the file, without blank lines. There are at most `_HEAD_LINES` lines, and each
    line ends with a line feed."""
    num_skipped: int
    """Number of comments at the start of the file."""


def read_head(path: Path) -> Head:
    """Return the first lines of a text file.

    Raises:
        ContractError: The file is empty, binary or corrupt.
    """
    content = next(read_blocks(path, block_bytes=_HEAD_BYTES)).content
    found = [
        line.decode(errors="backslashreplace") + "\n"
        for line in content.split(b"\n")[: 2 * _HEAD_LINES]
    ]
    lines = [line for line in found if line.strip()][:_HEAD_LINES]
    if not lines:
        raise ContractError(f"{path} is empty, expected a header with the columns' names, and rows")
    num_skipped = next((i for i, line in enumerate(lines) if not line.startswith("#")), 0)
    return Head(lines, 1 if re.fullmatch(r"sep=.\r?\n", lines[0]) else num_skipped)


def text_rows(path: Path, head: Head) -> TextRows:
    """Return the rows of a file of delimited text with a header.

    The function chooses the dialect that fits most of the first lines.
    """
    lines = _without_comments(head)
    delimiter = max(_DELIMITERS, key=lambda each: _fit(lines, each))
    header = lines[0]
    names = [name.strip() for name in _split(header, delimiter)]
    while (
        len(names) > 1
        and not names[-1]
        and _usual_length(lines[1:], delimiter, len(names)) < len(names)
    ):
        names.pop()  # the header ends with a delimiter, but the rows do not
    quoted = [line for line in lines[1:] if '"' in line]
    plain = Dialect(
        delimiter=delimiter,
        num_fields=len(names),
        header=header.removesuffix("\n").encode(),
        has_comments=len(lines) < len(head.lines),
    )
    slashed = replace(plain, escape="\\")
    is_slashed = sum(map(slashed.is_record, quoted)) > sum(map(plain.is_record, quoted))
    if names[0].startswith("#"):
        names[0] = names[0].lstrip("# ")
    return TextRows(path=path, names=tuple(names), dialect=slashed if is_slashed else plain)


def json_rows(path: Path, head: Head) -> TextRows:
    """Return the rows of a file of JSON objects, one per line.

    The keys of the objects in the first lines become the columns.

    Raises:
        ContractError: The first lines contain no JSON object.
    """
    names: dict[str, None] = {}
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("lines", pa.table({"line": pa.array(head.lines)}))
        for (keys,) in connection.execute(
            f"SELECT CASE WHEN {_IS_OBJECT} THEN json_keys(line) END FROM lines"
        ).fetchall():
            names.update(dict.fromkeys(keys or ()))
    if not names:
        raise ContractError(
            f"{path} begins with {head.lines[0][:40]!r}, expected one JSON object in each line"
        )
    return TextRows(path=path, names=tuple(names), dialect=_JSON, is_json=True)


def _without_comments(head: Head) -> list[str]:
    first, following = head.lines[0], head.lines[head.num_skipped : head.num_skipped + 1]
    if (
        head.num_skipped == 1
        and following
        and any(
            len(_split(first, each)) == len(_split(following[0], each)) > 1 for each in _DELIMITERS
        )
    ):
        return head.lines  # the header itself begins with #
    return head.lines[head.num_skipped :]


def _split(line: str, delimiter: str) -> list[str]:
    text = line.removesuffix("\n").replace("\r", "").replace("\0", "")
    try:
        return next(csv.reader([text], delimiter=delimiter), [])
    except csv.Error:  # a field exceeds the limit of the reader
        return text.split(delimiter)


def _fit(lines: list[str], delimiter: str) -> tuple[float, int]:
    """Return the share of lines that fit the header, and the number of fields in the header."""
    num_fields = len(_split(lines[0], delimiter))
    if num_fields == 1:
        return 0.0, 1
    lengths = [len(_split(line, delimiter)) for line in lines[1:100]]
    fitting = sum(num_fields <= length <= num_fields + 1 for length in lengths)
    return round(fitting / len(lengths), 1) if lengths else 1.0, num_fields


def _usual_length(lines: list[str], delimiter: str, num_fields: int) -> int:
    lengths = [len(_split(line, delimiter)) for line in lines]
    return max(set(lengths), key=lengths.count) if lengths else num_fields
