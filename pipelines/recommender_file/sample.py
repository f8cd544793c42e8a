"""A look at a user's click log: the columns of its first rows, with what can be said of each.

CSV and TSV with a header, plain or gzip, and Parquet. What the columns mean for a recommender is left to `draft`.
"""

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.parquet as pq

from components.contracts.raw_rows import SEPARATOR
from components.runtime.errors import ContractError, first_line

SAMPLE_ROWS = 100_000
"""Rows of a file that are looked at, its first ones."""
INTEGER, FLOAT, BOOLEAN, TIME, TEXT, LIST, OTHER = "integer", "float", "boolean", "time", "text", "list", "other"
"""Kinds of columns. A column of floats that are all whole is `INTEGER`: pandas has no other integers beside gaps.
`LIST` holds whole numbers or texts; in a text file it is a column of texts of which many have `SEPARATOR` inside."""
_SEPARATED_SHARE = 0.25
"""Share of a column's distinct texts with a separator inside from which they look like lists."""
_BLOCK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 1 << 20
_GZIP_MAGIC, _BOM = b"\x1f\x8b", b"\xef\xbb\xbf"
_MAX_EXACT = 2.0**53


@dataclass(frozen=True, kw_only=True)
class SampledColumn:
    """One column of the sampled rows."""

    name: str
    kind: str
    """One of the kinds above."""
    type: str
    """As the file has it: an Arrow type, or `TEXT`, also of other kinds where a file has their values as text; of a
    list, `INTEGER` or `TEXT` as its elements are."""
    missing: float
    """Share of the rows without a value; NaN and an empty field are none."""
    distinct: int | None
    """Number of distinct values, of a list of distinct elements; None of the kind `OTHER`."""
    longest: int | None = None
    """Most elements of a row, of a list."""
    low: Any
    """Least value; None where there is none, or no order of the kind."""
    high: Any
    example: str
    """The first value, shortened; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class ColumnSample:
    """The first rows of one file."""

    path: Path
    num_rows: int
    num_ragged: int
    """Lines with another number of fields than the header; they are not among the rows."""
    columns: tuple[SampledColumn, ...]


def read_sample(path: Path, *, rows: int = SAMPLE_ROWS) -> ColumnSample:
    """The first `rows` rows of the file at `path`.

    Raises:
        ContractError: the file cannot be read as CSV, TSV or Parquet, has no header, no rows, or a column's name twice.
    """
    ragged: list[Any] = []
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
        is_parquet = magic == b"PAR1" or path.suffix == ".parquet"
        batches = _parquet_batches(path) if is_parquet else _text_batches(path, ragged)
        table = _first_rows(batches, rows)
    except pa.ArrowException as error:
        raise ContractError(f"{path} cannot be read: {first_line(error)}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ContractError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if table is None or not table.num_rows:
        raise ContractError(f"{path} holds no rows, expected some below its header")
    return ColumnSample(
        path=path,
        num_rows=table.num_rows,
        num_ragged=len(ragged),
        columns=tuple(
            _look_at(name, values, is_parquet=is_parquet) for name, values in zip(table.column_names, table.columns)
        ),
    )


def _first_rows(batches: Iterator[Any], rows: int) -> Any:
    found: list[Any] = []
    for batch in batches:
        found.append(batch)
        if sum(each.num_rows for each in found) >= rows:
            break
    return pa.Table.from_batches(found).slice(0, rows) if found else None


def _parquet_batches(path: Path) -> Iterator[Any]:
    file = pq.ParquetFile(path)
    _check_names(path, file.schema_arrow.names)
    yield from file.iter_batches()


def _text_batches(path: Path, ragged: list[Any]) -> Iterator[Any]:
    """The rows, every field as text; lines with another number of fields are added to `ragged`."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    stream = gzip.open(path) if is_gzip else open(path, "rb")  # noqa: SIM115
    line = stream.readline(_MAX_HEADER_BYTES).removeprefix(_BOM).rstrip(b"\r\n").decode(errors="replace")
    if not line:
        raise ContractError(f"{path} is empty or begins with an empty line, expected a header with the columns' names")
    delimiter = "\t" if "\t" in line else ","
    others = [each for each in ";|" if line.count(each) > line.count(delimiter)]
    if others:
        raise ContractError(f"{path} seems to be separated by {others[0]!r}, expected commas or tabs")

    def skip(row: Any) -> str:
        ragged.append(row.actual_columns)
        return "skip"

    names = next(csv.reader([line], delimiter=delimiter))
    _check_names(path, names)
    if numbers := [name for name in names if _is_number(name)]:
        raise ContractError(f"{path} begins with {numbers[0]!r} as a column's name, expected a header with names")
    if not stream.read(1):
        return iter(())
    stream.seek(0)
    return iter(
        pv.open_csv(
            stream,
            read_options=pv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
            parse_options=pv.ParseOptions(delimiter=delimiter, invalid_row_handler=skip),
            convert_options=pv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True
            ),
        )
    )


def _check_names(path: Path, names: list[str]) -> None:
    if not all(names):
        raise ContractError(f"{path} has a column without a name, expected a header that names each")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ContractError(f"{path} names the columns {twice} twice, expected each once")


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _look_at(name: str, column: Any, *, is_parquet: bool) -> SampledColumn:
    values = column.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    found, is_text = values.type, _is_text(values.type)
    values = values.filter(_is_present(values))
    missing = 1 - len(values) / len(column)
    example = str(values[0].as_py())[:40] if len(values) else ""
    if (lists := _as_lists(values, is_parquet=is_parquet)) is not None:
        elements = pc.unique(lists.flatten().drop_null())
        if not is_parquet:
            elements = _typed_text(elements, (pa.int64(),))
        return SampledColumn(
            name=name,
            kind=LIST,
            type=INTEGER if pa.types.is_integer(elements.type) else TEXT,
            missing=missing,
            distinct=len(elements),
            longest=pc.max(pc.list_value_length(lists)).as_py(),
            low=None,
            high=None,
            example=example,
        )
    kind = next((kind for kind, holds in _KINDS.items() if holds(found)), OTHER)
    distinct = pc.unique(values) if kind != OTHER else values
    if is_text:
        distinct = _typed_text(distinct, _TIMES if is_parquet else (pa.int64(), pa.float64(), *_TIMES))
        kind = next((kind for kind, holds in _KINDS.items() if holds(distinct.type)), TEXT)
    if kind == FLOAT and len(distinct) and _is_whole(distinct):
        kind, distinct = INTEGER, distinct.cast(pa.int64())
    is_ordered = kind in (INTEGER, FLOAT, TIME) and len(distinct)
    bounds = pc.min_max(distinct).as_py() if is_ordered else {"min": None, "max": None}
    return SampledColumn(
        name=name,
        kind=kind,
        type=TEXT if is_text else str(found),
        missing=missing,
        distinct=len(distinct) if kind != OTHER else None,
        low=bounds["min"],
        high=bounds["max"],
        example=example,
    )


def _as_lists(values: Any, *, is_parquet: bool) -> Any:
    """The column as an Arrow array of lists of whole numbers or texts; None where it is not one."""
    found = values.type
    if is_parquet:
        is_list = any(is_type(found) for is_type in _LISTS)
        return values if is_list and (pa.types.is_integer(found.value_type) or _is_text(found.value_type)) else None
    distinct = pc.unique(values)
    num_separated = pc.sum(pc.match_substring_regex(distinct, r"[^|]\|[^|]")).as_py() or 0
    return pc.split_pattern(values, SEPARATOR) if num_separated >= max(1, _SEPARATED_SHARE * len(distinct)) else None


_LISTS = (pa.types.is_list, pa.types.is_large_list)


def _is_text(found: Any) -> bool:
    return bool(pa.types.is_string(found) or pa.types.is_large_string(found))


_KINDS: dict[str, Callable[[Any], bool]] = {
    INTEGER: pa.types.is_integer,
    FLOAT: lambda found: pa.types.is_floating(found) or pa.types.is_decimal(found),
    BOOLEAN: pa.types.is_boolean,
    TIME: lambda found: pa.types.is_timestamp(found) or pa.types.is_date(found),
    TEXT: _is_text,
}


def _is_present(values: Any) -> Any:
    present = values.is_valid()
    if _is_text(values.type):
        present = pc.and_(present, pc.fill_null(pc.not_equal(values, ""), False))
    elif pa.types.is_floating(values.type):
        present = pc.and_(present, pc.fill_null(pc.invert(pc.is_nan(values)), False))
    return present


_TIMES = (pa.timestamp("us", tz="UTC"), pa.timestamp("us"))
"""Types that texts of Parquet may stand for; its numbers are no texts."""


def _typed_text(distinct: Any, types: Sequence[Any]) -> Any:
    """Texts as the first of these types that all of them are; else as they are."""
    if len(distinct):
        for wanted in types:
            try:
                return distinct.cast(wanted)
            except pa.ArrowInvalid:
                continue
    return distinct


def _is_whole(distinct: Any) -> bool:
    numbers = distinct.cast(pa.float64())
    small = pc.less_equal(pc.abs(numbers), _MAX_EXACT)
    return bool(pc.all(pc.and_(small, pc.equal(numbers, pc.round(numbers)))).as_py())
