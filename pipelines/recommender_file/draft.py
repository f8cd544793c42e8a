"""A first `recommender.yaml` for a click log: a look at its first rows, and a guess at each column with its reason.

Logs are CSV and TSV with a header, plain or gzip, and Parquet. People correct the guesses; columns that this version
cannot learn from are named in comments, with what is in the way.
"""

import csv
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
import pyarrow.parquet as pq

from components.contracts.features import Features
from components.contracts.raw_rows import EVENT_TIME, LABEL, OWN_COLUMNS, REQUEST_ID, ROW, SEPARATOR
from components.runtime.errors import ContractError, first_line
from pipelines.recommender_file.document import dump_text
from pipelines.recommender_file.form import FORMAT

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


NUMERIC, CATEGORICAL, LISTS = KINDS = ("numeric", "categorical", "lists")
"""Kinds of features."""
LEFT_OUT = "left out"
MAX_ELEMENTS = 50
"""Most elements of a list that a draft proposes to count."""
MAX_FEW = 50
"""Distinct values of an integer column that still look like categories."""
MANY = 20_000
"""Distinct values of a sample from which a column of categories may outgrow a server's memory."""
_WEIGHT = "weight"
_USUAL_NAMES = {
    LABEL: ("label", "clicked", "click", "isclick", "isclicked", "target", "converted", "y"),
    EVENT_TIME: ("eventtime", "timestamp", "ts", "time", "datetime", "eventtimestamp", "clicktime", "date"),
    REQUEST_ID: ("requestid", "request", "impressionid", "impression", "searchid", "queryid", "sessionid", "listid"),
    ROW: ("row", "slot"),
    _WEIGHT: ("sampleweight", "exampleweight", "instanceweight", "importanceweight", "rowweight"),
}
"""What click logs call the columns that rows have, letters and digits only, the likeliest name first."""
_OF_CATEGORIES = re.compile(
    r"(?:^|_)(?:id|ids|code|type|kind|category|class|zip|brand|shop|item|user|device)$|[a-z]Id$"
)
_OF_NUMBERS = re.compile(
    r"(?:^|_)(?:num|count|cnt|n|age|price|amount|qty|quantity|days|hours|rate|ctr|score|rank)(?:_|$)"
)


class Guess(NamedTuple):
    """What a column may be."""

    role: str
    """A field of `ColumnNames`, a kind of features, or `LEFT_OUT`."""
    why: str
    options: str = ""
    """What a feature's line says beside its name."""


def draft(sample: ColumnSample, *, name: str) -> str:
    """The text of a file with a comment on each column, sound once what it asks for is filled in.

    Raises:
        ContractError: no column can be a feature.
    """
    guesses = guess_roles(sample.columns)
    if not any(guess.role in KINDS for _, guess in guesses):
        reasons = "; ".join(f"{column.name}: {guess.why}" for column, guess in guesses if guess.role == LEFT_OUT)
        raise ContractError(f"{sample.path} has no column that can be a feature: {reasons}")
    ragged = f", {sample.num_ragged:,} lines with another number of fields aside" if sample.num_ragged else ""
    rows = f"the first {sample.num_rows:,} rows of {sample.path.name!r}{ragged}"
    lines = [
        f"# Drafted by `evergreen recommender init` from {rows}.",
        "# The columns' roles are guesses. Correct them, then: evergreen recommender check FILE",
        f"format: {FORMAT}",
        f"name: {name}",
        "",
        "# What the files call the columns that every row has.",
        "data:",
    ]
    by_role = {guess.role: (column, guess) for column, guess in guesses}
    lines += [_line_of_role(role, by_role.get(role)) for role in _USUAL_NAMES if role != _WEIGHT or role in by_role]
    lines += ["", "# The columns to learn from.", "features:"]
    for kind in KINDS:
        of_kind = [(column, guess) for column, guess in guesses if guess.role == kind]
        if kind == LISTS and not of_kind:
            continue
        lines += [f"  {kind}:"] if of_kind else [f"  {kind}: []  # none found"]
        lines += _aligned([(_line_of_feature(each, of_kind), _remark(*each)) for each in of_kind])
    if left := [(column, guess) for column, guess in guesses if guess.role == LEFT_OUT]:
        lines += ["", "# Left out:"]
        lines += [f"#   {_printable(column.name)}: {_remark(column, guess)}" for column, guess in left]
    lines += [
        "",
        "# Every setting has a default, listed in docs/recommender.md. Another value is said so:",
        "# training:",
        "#   learning_rate: 0.003",
    ]
    return "\n".join(lines) + "\n"


def _line_of_feature(feature: tuple[SampledColumn, Guess], of_kind: Sequence[tuple[SampledColumn, Guess]]) -> str:
    """One of a list of names, or of names with options where a feature of the kind has some."""
    name = dump_text(feature[0].name)
    if any(guess.options for _, guess in of_kind):
        return f"    {name}: {feature[1].options or '{}'}"
    return f"    - {name}"


def recommender_name(text: str) -> str:
    """A name that a recommender can have, made of `text`.

    >>> recommender_name("My Clicks-2026"), recommender_name("2026")
    ('my_clicks_2026', 'recommender')
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:63].lstrip("0123456789_") or "recommender"


def guess_roles(columns: Sequence[SampledColumn]) -> list[tuple[SampledColumn, Guess]]:
    """A guess at each column, in their order."""
    taken: dict[str, Guess] = {}
    whole = [column for column in columns if not column.missing]
    roles: tuple[tuple[str, Callable[[SampledColumn], bool], str | None], ...] = (
        (
            LABEL,
            lambda it: it.kind == BOOLEAN or (it.kind == INTEGER and {it.low, it.high} <= {0, 1}),
            "the first column that holds only 0 and 1",
        ),
        (EVENT_TIME, lambda it: it.kind == TIME, "the first column of times"),
        (REQUEST_ID, lambda it: it.kind in (INTEGER, TEXT), None),
        (ROW, lambda it: it.kind == INTEGER and it.low >= 0, None),
        (_WEIGHT, lambda it: it.kind in (INTEGER, FLOAT) and 0 <= it.low <= it.high < math.inf, None),
    )
    for role, looks_so, otherwise in roles:
        if role == ROW and not any(guess.role == REQUEST_ID for guess in taken.values()):
            continue
        free = [column for column in whole if column.name not in taken and looks_so(column)]
        named = [column for usual in _USUAL_NAMES[role] for column in free if _letters(column.name) == usual]
        if named:
            taken[named[0].name] = Guess(role, "by its name")
        elif free and otherwise:
            taken[free[0].name] = Guess(role, otherwise)
    return [(column, taken.get(column.name) or _guess_size(column, _guess_feature(column))) for column in columns]


def _guess_size(column: SampledColumn, guess: Guess) -> Guess:
    """The guess at a feature, with a word on its memory where it may have very many categories."""
    if guess.role not in (CATEGORICAL, LISTS) or (column.distinct or 0) < MANY:
        return guess
    return guess._replace(why=f"{guess.why}; many, and each has a vector: docs/scale.md says what they cost")


def _guess_feature(column: SampledColumn) -> Guess:
    if column.name in OWN_COLUMNS:
        return Guess(LEFT_OUT, "rows have a column of this name beside their features; rename it to learn from it")
    if not _is_name(column.name):
        return Guess(LEFT_OUT, "a feature has a printable name without a slash and without spaces around it; rename it")
    if column.distinct is not None and column.distinct < 2:
        return Guess(LEFT_OUT, "it says nothing, being the same in all rows")
    if column.kind == TEXT:
        return Guess(CATEGORICAL, "texts", _WORDS)
    if column.kind == TIME:
        return Guess(LEFT_OUT, "times cannot be learned from yet; write hours, days or ages as numbers")
    if column.kind == LIST:
        most = min(column.longest or 1, MAX_ELEMENTS)
        beyond = f", the newest {most} of {column.longest} count" if most != column.longest else ""
        why = f"a list{beyond}; `table: NAME` shares the vectors of a categorical feature"
        return Guess(LISTS, why, f"{{type: string, max: {most}}}" if column.type == TEXT else f"{{max: {most}}}")
    if column.kind == OTHER:
        return Guess(LEFT_OUT, f"columns of type {column.type} cannot be learned from yet")
    if column.kind == BOOLEAN:
        return Guess(CATEGORICAL, "true or false", _WORDS)
    if column.kind == FLOAT:
        if not (math.isfinite(column.low) and math.isfinite(column.high)):
            return Guess(LEFT_OUT, "infinite values cannot be learned from; leave them empty")
        return Guess(NUMERIC, "numbers with fractions", _BELOW_ZERO if column.low < 0 else "")
    return _guess_integer(column)


_WORDS = "{type: string}"
"""Of a categorical feature with other values than whole numbers."""
_BELOW_ZERO = "{transform: [standardize]}"
"""Of a numeric feature with values below 0, which the usual transform takes for 0."""


def _is_name(name: str) -> bool:
    try:
        Features(numeric=(name,), categorical=())
    except ContractError:
        return False
    return True


def _guess_integer(column: SampledColumn) -> Guess:
    is_named_so = _OF_CATEGORIES.search(column.name) is not None
    if is_named_so:
        return Guess(CATEGORICAL, "whole numbers, named like a category")
    if column.low < 0:
        return Guess(NUMERIC, "it has values below 0", _BELOW_ZERO)
    assert column.distinct is not None
    if column.distinct <= MAX_FEW and not _OF_NUMBERS.search(column.name.lower()):
        return Guess(CATEGORICAL, "whole numbers, and few of them")
    return Guess(NUMERIC, "whole numbers, not named like a category")


def _line_of_role(role: str, found: tuple[SampledColumn, Guess] | None) -> str:
    if found:
        column, guess = found
        return f"  {role}: {dump_text(column.name)}  # {_remark(column, guess)}"
    absent = {
        LABEL: "FILL IN: no column holds only 0 and 1",
        EVENT_TIME: "none found: `evergreen ingest` gives the rows times",
        REQUEST_ID: "none found: each row is a request of its own",
        ROW: "none found: the rows of a request are numbered in their order",
    }
    return f"  {'' if role == LABEL else '# '}{role}: {role}  # {absent[role]}"


def _remark(column: SampledColumn, guess: Guess) -> str:
    said = [column.type]
    if column.type == TEXT or column.kind == LIST:
        said = [f"list of {column.type}s" if column.kind == LIST else column.kind]
    if column.missing:
        said.append(f"{column.missing:.1%} missing")
    if column.distinct is not None:
        said.append(f"{column.distinct:,} distinct value{'' if column.distinct == 1 else 's'}")
    if column.low is not None:
        said[-1] += f", {column.low} to {column.high}"
    elif column.example:
        said[-1] += f" such as {_printable(column.example)}"
    return f"{'; '.join(said)}. {guess.why.capitalize()}"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    width = min(max(len(text) for text, _ in lines), 40) if lines else 0
    return [f"{text:<{width}}  # {remark}" for text, remark in lines]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
