"""Which files of a folder are click logs, which form each has, and files with a user's own column names.

A user's files are Parquet, or text with a header; see `ColumnNames`. Numeric features are finite numbers; categories
whole numbers, in text decimal ones, or words; lists Parquet's lists of them, in text one field with `|` between
elements; the label is 0 or 1, or a boolean; a weight a finite number of at least 0. A time is a timestamp, which
without a zone is UTC, or seconds since the epoch. Columns that nobody named are not read.
"""

import csv
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.contracts.features import Features
from components.contracts.raw_rows import (
    EVENT_TIME,
    LABEL,
    REQUEST_ID,
    ROW,
    SEPARATOR,
    SERVED_BY,
    WEIGHT,
    ColumnNames,
    is_visible,
    list_lengths,
    raw_types,
)
from components.contracts.recommender import Recommender
from components.extraction.raw_schema import (
    BATCH_ROWS,
    BYTES,
    EXPECTED_WEIGHT,
    KEY_COLUMNS,
    TIME_TYPE,
    MalformedRows,
    categories,
    find_malformed,
    in_lists,
    is_list,
    lake_schema,
    nan_to_null,
    open_parquet,
    raw_batch,
    record_malformed,
    texts,
    without_rows,
)
from components.extraction.readers import criteo
from components.extraction.readers.parquet import RawParquet
from components.extraction.readers.text import TextColumn, TextFile, TextLayout, blocks, matching
from components.runtime.errors import ContractError, first_line
from components.store.archived_rows import reading_parquet

DELIMITERS = (",", "\t", ";")
MAX_SECONDS = 1e11
"""Of a time, about the year 5138: milliseconds since the epoch are more."""
_MISSING = ("", "nan", "NaN", "null", "NULL")
"""What stands for no value in a text."""
_WHOLE = r"^[+-]?[0-9]{1,19}(\.0*)?$"
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"
_SECONDS = r"^[0-9]{1,12}(\.[0-9]*)?$"
_DAY = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?$"


def columns_of(here: Sequence[str], recommender: Recommender, *, path: Path, with_keys: bool) -> dict[str, str]:
    """The name in a file of each raw column that is read.

    `with_keys`: whether request id, row and time are read, as far as they are there.

    Raises:
        ContractError: the file lacks a column, or has it twice.
    """
    features, names = recommender.features, recommender.data
    wanted = {LABEL: names.label, **{name: name for name in features.names}}
    if names.weight is not None:
        wanted[WEIGHT] = names.weight
    for raw, name in ((REQUEST_ID, names.request_id), (ROW, names.row), (EVENT_TIME, names.event_time)):
        # A name of the user's own is a promise; the default is none.
        if with_keys and (name in here or name != raw):
            wanted[raw] = name
    if missing := [name for name in wanted.values() if name not in here]:
        raise ContractError(f"{path} lacks the columns {missing} of recommender {recommender.name}, has {list(here)}")
    if twice := sorted({name for name in wanted.values() if list(here).count(name) > 1}):
        raise ContractError(f"{path} has the columns {twice} twice, expected each once")
    return wanted


# -- text


def text_layout(line: str, recommender: Recommender) -> TextLayout | None:
    """The layout of a file that begins with this line; None if it is no header that names the label."""
    for delimiter in DELIMITERS:
        fields = next(csv.reader([line], delimiter=delimiter), [])
        if recommender.data.label in fields:
            return TextLayout(
                delimiter=delimiter, fields=tuple(fields), has_header=True, has_quotes=True, missing=_MISSING
            )
    return None


def text_file(path: Path, layout: TextLayout, recommender: Recommender, *, with_keys: bool) -> TextFile:
    """The reader of a text file with that layout.

    Raises:
        ContractError: see `columns_of`.
    """
    columns = columns_of(layout.fields, recommender, path=path, with_keys=with_keys)
    return TextFile(
        path=path,
        layout=layout,
        columns={raw: _text_column(raw, name, recommender.features) for raw, name in columns.items()},
        schema=lake_schema(recommender.features, weighted=WEIGHT in columns),
        has_times=EVENT_TIME in columns,
    )


def _text_column(raw: str, field: str, features: Features) -> TextColumn:
    parse: Callable[[Any], Any]
    if raw in features.numeric:
        return TextColumn(field, _parse_numbers, "a finite number or nothing", is_required=False)
    if raw in (*features.categorical, *features.lists):
        parse, expected = _parse_integers, "a whole number of 64 bits"
        if raw in features.words:
            parse, expected = _parse_names, "a text in UTF-8"
        if raw in features.lists:
            parse, expected = partial(_parse_lists, parse), f"{expected}, or more with | between,"
        return TextColumn(field, parse, f"{expected} or nothing", is_required=False)
    parse, expected = {
        LABEL: (_parse_labels, "0, 1, true or false"),
        WEIGHT: (_parse_weights, EXPECTED_WEIGHT),
        REQUEST_ID: (_parse_names, "a text"),
        ROW: (_parse_rows, "a whole number"),
        EVENT_TIME: (parse_times, "an ISO 8601 time, or seconds since the epoch"),
    }[raw]
    return TextColumn(field, parse, expected, is_required=True)


def _parse_labels(distinct: Any) -> Any:
    numbers = matching(distinct, r"^[01](\.0*)?$").cast(pa.float64()).cast(pa.int32())
    words = pc.equal(pc.utf8_lower(matching(distinct, "^(?i)(true|false)$")), "true").cast(pa.int32())
    return pc.coalesce(numbers, words)


def _parse_numbers(distinct: Any) -> Any:
    numbers = matching(distinct, _NUMBER).cast(pa.float64()).cast(pa.float32())
    return pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, numbers.type))


def _parse_weights(distinct: Any) -> Any:
    numbers = _parse_numbers(distinct)
    return pc.if_else(pc.greater_equal(numbers, 0), numbers, pa.scalar(None, numbers.type))


def _parse_integers(distinct: Any) -> Any:
    found = pc.replace_substring_regex(matching(distinct, _WHOLE), r"\.0*$|^\+", "")
    in_range = [None if text is None or not -(2**63) <= int(text) < 2**63 else int(text) for text in found.to_pylist()]
    return pa.array(in_range, pa.int64())


def _parse_lists(parse: Callable[[Any], Any], distinct: Any) -> Any:
    """Lists of what `parse` makes of their elements; null where one of these is malformed."""
    split = pc.split_pattern(distinct, SEPARATOR)
    parts = split.flatten()
    elements, is_missing = parse(parts), pc.is_in(parts, value_set=pa.array(_MISSING, parts.type))
    is_wrong = pc.and_not(elements.is_null(), is_missing).to_numpy(zero_copy_only=False)
    list_of = np.repeat(np.arange(len(split)), list_lengths(split))
    has_wrong = pa.array(np.isin(np.arange(len(split)), list_of[is_wrong]))
    elements = pc.if_else(is_missing, pa.scalar(None, elements.type), elements)
    lists = pa.ListArray.from_arrays(split.offsets, elements)
    return pc.if_else(has_wrong, pa.scalar(None, lists.type), lists)


def _parse_rows(distinct: Any) -> Any:
    return matching(distinct, r"^[0-9]{1,9}(\.0*)?$").cast(pa.float64()).cast(pa.int32())


def _parse_names(distinct: Any) -> Any:
    try:
        return distinct.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_decoded(value) for value in distinct.to_pylist()], pa.string())


def _decoded(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def parse_times(distinct: Any) -> Any:
    """The times of texts (binary array), as `event_time`; null where a text is none.

    >>> texts = [b"1970-01-01 00:00:01", b"1970-01-01T01:00:00+01:00", b"1970-01-02", b"1.5", b"soon", b"1970-13-01"]
    >>> [None if time is None else time.timestamp() for time in parse_times(pa.array(texts)).to_pylist()]
    [1.0, 0.0, 86400.0, 1.5, None, None]
    """
    seconds = matching(distinct, _SECONDS).cast(pa.float64())
    seconds = pc.if_else(pc.less(seconds, MAX_SECONDS), seconds, pa.scalar(None, seconds.type))
    days = pc.binary_join_element_wise(matching(distinct, _DAY), "00:00:00", " ")
    texts = pc.coalesce(matching(distinct, _TIME), days)
    has_zone = pc.match_substring_regex(texts, r"(Z|:\d{2}(\.\d+)?[+-][\d:]+)$")
    texts = pc.if_else(has_zone, texts, pc.binary_join_element_wise(texts, "Z", ""))
    return pc.coalesce(_micros(seconds), _cast_texts(texts))


def _cast_texts(texts: Any) -> Any:
    exact = pa.timestamp("ns", tz="UTC")
    try:
        return texts.cast(exact).cast(TIME_TYPE, safe=False)
    except pa.ArrowInvalid:  # a text that looks like a time is none, such as the 31st of February
        if len(texts) > 1:
            middle = len(texts) // 2
            return pa.concat_arrays([_cast_texts(texts.slice(0, middle)), _cast_texts(texts.slice(middle))])
        return pa.nulls(len(texts), TIME_TYPE)


def _micros(seconds: Any) -> Any:
    return pc.round(pc.multiply(seconds.cast(pa.float64()), 1e6)).cast(pa.int64()).cast(TIME_TYPE)


# -- Parquet


@dataclass(frozen=True, kw_only=True)
class NamedParquet:
    """One Parquet file; see `forms.Reader`."""

    path: Path
    features: Features
    columns: Mapping[str, str]
    """See `columns_of`."""

    @property
    def has_times(self) -> bool:
        """See `Reader.has_times`."""
        return EVENT_TIME in self.columns

    @cached_property
    def _schema(self) -> Any:
        return lake_schema(self.features, weighted=WEIGHT in self.columns)

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """See `Reader.batches`."""
        file, schema = open_parquet(self.path), self._schema
        wanted = list(dict.fromkeys(self.columns.values()))
        keys = [name for name in KEY_COLUMNS if name in self.columns]
        first_row = 1
        with reading_parquet(self.path):
            for found in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                batch = raw_batch(
                    {raw: self._conform(raw, found.column(self.columns[raw])) for raw in self.columns}, schema
                )
                reasons = find_malformed(batch, self.features, keys=keys, names=self.columns)
                numbers = range(first_row, first_row + found.num_rows)
                record_malformed(found, reasons, path=self.path, numbers=numbers, malformed=malformed)
                first_row += found.num_rows
                malformed.count(self.path, found.num_rows)
                yield without_rows(batch, reasons)

    def _conform(self, raw: str, values: Any) -> Any:
        """The values in the type of the raw column; refuses those of a type, or with a value, that cannot be."""
        wanted = self._schema.field(raw).type
        if raw not in self.features.lists:
            return self._conform_values(raw, wanted, values)
        if not (is_list(values.type) or pa.types.is_null(values.type)):
            raise self._unfit(raw, values, "lists")
        return in_lists(values, partial(self._conform_values, raw, wanted.value_type))

    def _conform_values(self, raw: str, wanted: Any, values: Any) -> Any:
        """The values of a column, or the elements of a list, in the type `wanted`."""
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if pa.types.is_floating(values.type):
            values = nan_to_null(values)
        is_word = raw in self.features.words
        types, expected = _WORDS if is_word else _TYPES_OF.get(raw, _NUMBERS)
        if not pa.types.is_null(values.type) and not any(is_type(values.type) for is_type in types):
            raise self._unfit(raw, values, expected)
        try:
            if raw == EVENT_TIME:
                return self._times(values)
            if is_word:
                return texts(values)
            if raw in (*self.features.categorical, *self.features.lists) and pa.types.is_boolean(values.type):
                return categories(values)
            return values.cast(wanted, safe=raw not in (*self.features.numeric, WEIGHT))
        except pa.ArrowException as error:
            raise self._unfit(raw, values, f"{expected}: {first_line(error)}") from error

    def _times(self, values: Any) -> Any:
        kind = values.type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            if (most := pc.max(pc.abs(values.cast(pa.float64()))).as_py() or 0) >= MAX_SECONDS:
                raise self._unfit(EVENT_TIME, values, f"seconds since the epoch, not {most:.0f}")
            return _micros(values)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return parse_times(values.cast(pa.string()).cast(pa.binary()))
        return values.cast(TIME_TYPE, safe=False)

    def _unfit(self, raw: str, values: Any, expected: str) -> ContractError:
        return ContractError(f"{self.path} has {self.columns[raw]} of type {values.type}, expected {expected}")


_NUMBERS = (
    (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean),
    "numbers",
)
_TEXTS = (pa.types.is_string, pa.types.is_large_string)
_WORDS = ((*_TEXTS, *BYTES, pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating), "texts or whole numbers")
_TYPES_OF = {
    REQUEST_ID: ((*_TEXTS, pa.types.is_integer), "texts or whole numbers"),
    EVENT_TIME: (
        (*_TEXTS, pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer, pa.types.is_floating),
        "timestamps, or seconds since the epoch",
    ),
}
"""By raw column, which Arrow types are read, and how they are called in messages; of any other `_NUMBERS`."""

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(day_\d+(\.gz)?|.*\.(tsv|txt|csv)(\.gz)?|.*\.parquet)$", re.IGNORECASE)
_COMPANION = re.compile(r"(readme|license)\b.*", re.IGNORECASE)
"""Criteo's own archives hold these beside the rows."""
_TRAIN, _TEST = re.compile(r"train\b.*", re.IGNORECASE), re.compile(r"test\b.*", re.IGNORECASE)
"""Kaggle's archive holds rows without labels beside those with them."""
_SNIFFED_LINES = 20
_SNIFFED_BYTES = 1 << 16


class Reader(Protocol):
    """One file of click logs, in any form."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def has_times(self) -> bool:
        """Whether rows have event times."""

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """Record batches in the lake's schema, in file order; memory is bounded by a batch, not by the file.

        Columns that the form does not have (request id, event time ...) are null. `malformed` takes the malformed rows,
        and counts every row read.

        Raises:
            ContractError: the file is damaged, or too many of its rows are malformed.
        """


def click_log_files(path: Path) -> list[Path]:
    """The files to read: `path` itself, or the click logs directly in the folder, judged by their names.

    Natural order: `day_2` comes before `day_10`. Names that start with a dot or underscore are unfinished work or
    notes.

    Raises:
        ContractError: there is none; or one is there packed and unpacked, whose rows would be learnt and judged twice.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ContractError(f"{path} does not exist, expected a file of rows or a folder of them")
    others = passed_over(path)
    if others:
        logger.warning("passed over %d files in %s that are no click logs: %s", len(others), path, others[:5])
    files = [path / name for name in _visible_names(path) if name not in others]
    if not files:
        raise ContractError(f"{path} holds no file of rows, expected day_N[.gz], *.tsv, *.txt, *.csv or *.parquet")
    if twice := [file for file in files if file.suffix == ".gz" and file.with_suffix("") in files]:
        raise ContractError(f"{twice[0]} is there unpacked, too, expected each row in one file")
    return sorted(files, key=lambda p: natural_key(p.name))


def passed_over(path: Path) -> list[str]:
    """Names of the files in the folder `path` that `click_log_files` leaves out; none where `path` is a file."""
    names = _visible_names(path) if path.is_dir() else []
    logs = [name for name in names if _NAME.match(name) and not _COMPANION.match(name)]
    if any(_TRAIN.match(name) for name in logs):
        logs = [name for name in logs if not _TEST.match(name)]
    return sorted(set(names) - set(logs))


def _visible_names(path: Path) -> list[str]:
    return [p.name for p in path.iterdir() if p.is_file() and is_visible(p.name)]


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """A sort key that compares digits in a name by their value.

    >>> sorted(["day_10", "day_2"], key=natural_key)
    ['day_2', 'day_10']
    """
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def find_reader(path: Path, recommender: Recommender, *, with_keys: bool = True) -> Reader:
    """The reader for the form that `path` has.

    Criteo's own text is read for a recommender with exactly Criteo's features; it has neither times nor weights.
    `with_keys`: whether a user's request ids, rows and times are read; without them they are null.

    Raises:
        ContractError: none of the forms; says what the file looks like.
    """
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"PAR1" or path.suffix == ".parquet":
        return _parquet_reader(path, recommender, with_keys=with_keys)
    content = next((block.content for block in blocks(path, block_bytes=_SNIFFED_BYTES)), b"")
    decoded = [line.rstrip(b"\r").decode(errors="backslashreplace") for line in content.split(b"\n")]
    lines = [line for line in decoded if line][:_SNIFFED_LINES]
    if not lines:
        raise ContractError(f"{path} is empty, expected rows")
    layout = text_layout(lines[0], recommender)
    is_criteos = criteo.are_its(recommender.features) and not recommender.data.has_weights
    if layout is not None and not (is_criteos and recommender.data.event_time not in layout.fields):
        return text_file(path, layout, recommender, with_keys=with_keys)
    if is_criteos and (reader := criteo.text_file(path, lines)):
        return reader
    found = (
        f"its first line has {lines[0].count(chr(9)) + 1} tab-separated and {lines[0].count(',') + 1} comma-separated"
    )
    if is_criteos:
        raise ContractError(
            f"{path} is no Criteo file: {found} columns, expected {criteo.NUM_TSV_FIELDS} (label, 13 integers, "
            "26 categories), or a header with Label"
        )
    raise ContractError(
        f"{path} has no header that names the label {recommender.data.label!r}: {found} columns, expected a header, "
        "or Parquet"
    )


def _parquet_reader(path: Path, recommender: Recommender, *, with_keys: bool) -> Reader:
    schema, features, weighted = open_parquet(path).schema_arrow, recommender.features, recommender.data.has_weights
    raw = set(raw_types(features, weighted=weighted)) - set(SERVED_BY)
    has_raw_names = replace(recommender.data, user=None) == ColumnNames(weight=WEIGHT if weighted else None)
    if has_raw_names and raw <= set(schema.names) and pa.types.is_timestamp(schema.field(EVENT_TIME).type):
        return RawParquet(path=path, features=features, weighted=weighted, with_words=True)
    columns = columns_of(schema.names, recommender, path=path, with_keys=with_keys)
    return NamedParquet(path=path, features=features, columns=columns)
