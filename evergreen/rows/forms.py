"""Detect the format of a file of rows, and read the rows in the raw schema.

A file is Parquet, text with a header, JSON lines, or Criteo's text. `ColumnNames` has the names of
the file's columns. The values of every format are parsed by the same rules (`values`,
`time_forms`). Columns that the recommender does not name are not read.
"""

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evergreen.config.data import WEIGHT, ColumnNames
from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.contracts.raw_rows import (
    CLOCK_AHEAD_SECONDS,
    EVENT_TIME,
    LABEL,
    REQUEST_ID,
    ROW,
    SERVED_BY,
    is_visible,
    raw_types,
)
from evergreen.rows import criteo
from evergreen.rows.lines import LineCounts, Rejected
from evergreen.rows.parquet import RawParquet
from evergreen.rows.raw_schema import (
    MalformedRows,
    lake_schema,
    open_parquet,
    raw_batch,
    without_rows,
)
from evergreen.rows.text import Chunk, TextRows, json_rows, read_head, text_rows
from evergreen.rows.time_forms import EARLIEST, USUAL, TimeRule, find_form
from evergreen.rows.times import to_iso
from evergreen.rows.typed import ParquetRows, shown_value
from evergreen.rows.values import (
    CATEGORIES,
    LABELS,
    NUMBERS,
    POSITIONS,
    REQUEST_IDS,
    STRINGS,
    WEIGHTS,
    ListRule,
    ValueRule,
)
from evergreen.runtime.errors import ContractError

AnyRule = ValueRule | ListRule | TimeRule

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"(day_\d+(\.gz)?|\d{6}_\d+(\.gz)?|part-\d{5}(\.gz)?|.*\.(tsv|txt|csv|psv|jsonl|ndjson|json)(\.(gz|bz2|zst))?|.*\.parquet)$",
    re.IGNORECASE,
)
_COMPANION = re.compile(r"(readme|license)\b.*", re.IGNORECASE)
"""Files that Criteo's archives contain in addition to the rows."""
_TRAIN, _TEST = (re.compile(rf"{name}\.txt(\.gz)?", re.IGNORECASE) for name in ("train", "test"))
"""Files of Kaggle's archive: rows with labels, and rows without labels."""


class FileRows(Protocol):
    """Rows of a file in any format. The columns and their names are as in the file."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the columns of the file in file order.

        A column without a name in the file gets the name "".
        """

    def chunks(self, wanted: Sequence[str]) -> Iterator[Chunk]:
        """Yield the wanted columns of all rows in file order, in bounded memory."""


class Reader(Protocol):
    """Reader of one click log file for a recommender."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def has_times(self) -> bool:
        """Whether rows have event times."""

    @property
    def counts(self) -> LineCounts:
        """Return the counts of the lines read so far.

        In Parquet files, only rows and rejected rows are counted.
        """

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """Yield record batches in the lake's schema, in file order, in bounded memory.

        Columns that the format does not have, such as request id or event time, are null.

        Args:
            malformed: Collector of malformed rows. The collector also counts all rows that are
                read.

        Raises:
            ContractError: the file is corrupt, or too many of its rows are malformed.
        """


def click_log_files(path: Path) -> list[Path]:
    """Return the files to read: `path` itself, or the click logs directly in the folder `path`.

    Click logs are recognised by their names. Files are in natural order: `day_2` comes before
    `day_10`. Names that start with a dot or underscore are skipped, because they mark unfinished
    files or notes.

    Raises:
        ContractError: no file is found, or a file is present both compressed and uncompressed. If
            both forms of a file were read, its rows would be used twice.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ContractError(f"{path} does not exist, expected a file of rows or a folder of them")
    others = passed_over(path)
    if others:
        logger.warning(
            "skipped %d files in %s that are not click logs: %s", len(others), path, others[:5]
        )
    files = [path / name for name in _visible_names(path) if name not in others]
    if not files:
        raise ContractError(
            f"{path} holds no file of rows, expected day_N, *.csv, *.tsv, *.txt, *.jsonl (plain, "
            ".gz, .bz2 or .zst) or "
            "*.parquet"
        )
    unpacked = [
        file.with_suffix("") if file.suffix in (".gz", ".bz2", ".zst") else file for file in files
    ]
    if twice := [
        file for file, each in zip(files, unpacked) if file != each and unpacked.count(each) > 1
    ]:
        raise ContractError(
            f"{twice[0]} also exists unpacked or in another compression, expected each row in one "
            "file"
        )
    return sorted(files, key=lambda p: _natural_key(p.name))


def passed_over(path: Path) -> list[str]:
    """Return the names of the files in the folder `path` that `click_log_files` leaves out.

    Returns an empty list if `path` is a file.
    """
    names = _visible_names(path) if path.is_dir() else []
    logs = [name for name in names if _NAME.match(name) and not _COMPANION.match(name)]
    if any(_TRAIN.match(name) for name in logs):
        logs = [name for name in logs if not _TEST.match(name)]
    return sorted(set(names) - set(logs))


def _visible_names(path: Path) -> list[str]:
    return [p.name for p in path.iterdir() if p.is_file() and is_visible(p.name)]


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares runs of digits by their numeric value.

    >>> sorted(["day_10", "day_2"], key=_natural_key)
    ['day_2', 'day_10']
    """
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


def open_rows(path: Path) -> FileRows:
    """Open a file of Parquet, JSON lines, or text with a header, and return its rows.

    Raises:
        ContractError: The file has none of the supported formats, is empty or is corrupt.
    """
    if not path.is_file():
        raise ContractError(f"{path} is not a file, expected a file of rows")
    if _is_parquet(path):
        return ParquetRows.open(path)
    head = read_head(path)
    first = head.lines[0].lstrip()
    if first.startswith("["):
        raise ContractError(
            f"{path} begins with '[', expected JSON lines, one object in each, or text with a "
            "header"
        )
    return json_rows(path, head) if first.startswith("{") else text_rows(path, head)


def _is_parquet(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1" or path.suffix == ".parquet"


def unlabelled_reader(path: Path, recommender: Recommender) -> "FileReader":
    """Return the reader for a file of rows that need no labels, because they are only scored.

    The reader reads the features, but not label, ids and times. A feature that is served with a
    fixed value may be absent from the file.

    Raises:
        ContractError: The file has no known format, or lacks a column.
    """
    rows, features = open_rows(path), recommender.features
    if criteo.are_its(features) and isinstance(rows, TextRows):
        found = criteo.criteo_rows(path, read_head(path), rows, labelled=False)
        columns = {raw: name for raw, name in found.columns.items() if raw != LABEL}
        return FileReader(
            rows=found, recommender=recommender, columns=columns, rules=criteo.RULES, now=0.0
        )
    here = [name for name in features.names if name in rows.names or name in features.needed]
    columns = _present(rows.names, {name: name for name in here}, recommender, path=path)
    rules = {name: _rule_of(name, features) for name in columns}
    return FileReader(rows=rows, recommender=recommender, columns=columns, rules=rules, now=0.0)


def find_reader(
    path: Path, recommender: Recommender, *, with_times: bool = True, now: float | None = None
) -> Reader:
    """Return the reader for the format of a file.

    Criteo's text is read only for a recommender with exactly Criteo's features. Criteo's rows have
    neither times nor weights.

    Args:
        path: The file.
        recommender: Recommender of the rows.
        with_times: Whether times are read. If False, times are null.
        now: Current time in seconds since the epoch, to find rows in the future. None = the
            machine's clock.

    Raises:
        ContractError: The file has none of the formats, or lacks a column.
    """
    now = time.time() if now is None else now
    rows = _criteo_rows(path, recommender) or open_rows(path)
    if isinstance(rows, ParquetRows) and _is_raw(path, recommender):
        weighted = recommender.data.has_weights
        raw = RawParquet(
            path=path, features=recommender.features, weighted=weighted, with_strings=True
        )
        return RawReader(raw)
    if isinstance(rows, criteo.CriteoRows):
        return FileReader(
            rows=rows, recommender=recommender, columns=rows.columns, rules=criteo.RULES, now=now
        )
    if recommender.data.label not in rows.names:
        raise ContractError(
            f"{path} has the columns {_shown_names(rows.names)}, expected also "
            f"{recommender.data.label!r}, which is the label of recommender {recommender.name}"
        )
    columns = columns_of(rows.names, recommender, path=path)
    has_times = EVENT_TIME in columns
    if not with_times:
        columns.pop(EVENT_TIME, None)
    rules = {raw: _rule_of(raw, recommender.features) for raw in columns if raw != EVENT_TIME}
    return FileReader(
        rows=rows,
        recommender=recommender,
        columns=columns,
        rules=rules,
        now=now,
        has_times=has_times,
    )


@dataclass(frozen=True)
class RawReader:
    """Reader of a file in the raw schema (see `Reader`)."""

    file: RawParquet
    counts: LineCounts = field(default_factory=LineCounts)
    has_times = True

    @property
    def path(self) -> Path:
        """See `Reader.path`."""
        return self.file.path

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """See `Reader.batches`."""
        before = malformed.num_rows
        for batch in self.file.batches(malformed):
            self.counts.rows += batch.num_rows
            yield batch
        self.counts.rejected += malformed.num_rows - before


def _shown_names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown


def _criteo_rows(path: Path, recommender: Recommender) -> "criteo.CriteoRows | None":
    """Return the rows of one of Criteo's text files.

    Returns None if the file or the recommender does not have Criteo's columns.
    """
    if (
        not criteo.are_its(recommender.features)
        or recommender.data.has_weights
        or _is_parquet(path)
    ):
        return None
    head = read_head(path)
    rows = text_rows(path, head)
    if recommender.data.label in rows.names and recommender.data.event_time in rows.names:
        return None
    return criteo.criteo_rows(path, head, rows)


def _is_raw(path: Path, recommender: Recommender) -> bool:
    """Return whether a Parquet file has the raw schema of a lake, not a user's columns."""
    schema, features, weighted = (
        open_parquet(path).schema_arrow,
        recommender.features,
        recommender.data.has_weights,
    )
    raw = set(raw_types(features, weighted=weighted)) - set(SERVED_BY)
    usual = replace(recommender.data, user=None, item=None, time_format=None)
    if usual != ColumnNames(weight=WEIGHT if weighted else None) or not raw <= set(schema.names):
        return False
    return bool(pa.types.is_timestamp(schema.field(EVENT_TIME).type))


def columns_of(here: Sequence[str], recommender: Recommender, *, path: Path) -> dict[str, str]:
    """Return the file's column name for each raw column that is read.

    Args:
        here: Names of the columns in the file.
        recommender: Recommender of the file's rows.
        path: The file, for messages.

    Raises:
        ContractError: The file lacks a column, or has a column twice.
    """
    features, names = recommender.features, recommender.data
    wanted = {LABEL: names.label, **{name: name for name in features.names}}
    if names.weight is not None:
        wanted[WEIGHT] = names.weight
    for raw, name in (
        (REQUEST_ID, names.request_id),
        (ROW, names.row),
        (EVENT_TIME, names.event_time),
    ):
        # A column that the user named explicitly must be present.
        if name in here or name != raw:
            wanted[raw] = name
    return _present(here, wanted, recommender, path=path)


def _present(
    here: Sequence[str], wanted: dict[str, str], recommender: Recommender, *, path: Path
) -> dict[str, str]:
    """Check that the file has each of the `wanted` columns exactly once, and return `wanted`."""
    if missing := [name for name in wanted.values() if name not in here]:
        raise ContractError(
            f"{path} lacks the columns {missing}, which recommender {recommender.name} names; the "
            f"file has {list(here)}"
        )
    if twice := sorted({name for name in wanted.values() if list(here).count(name) > 1}):
        raise ContractError(f"{path} has the columns {twice} twice, expected each once")
    return wanted


_RULES: dict[str, ValueRule] = {
    LABEL: LABELS,
    WEIGHT: WEIGHTS,
    REQUEST_ID: REQUEST_IDS,
    ROW: POSITIONS,
}


def _rule_of(raw: str, features: Features) -> ValueRule | ListRule:
    """Return the parsing rule for a raw column other than the time."""
    if raw in features.lists:
        element = STRINGS if raw in features.string_features else CATEGORIES
        return ListRule(element, features.list_options_of(raw).separator)
    if raw in features.categorical:
        return STRINGS if raw in features.string_features else CATEGORIES
    return NUMBERS if raw in features.numeric else _RULES[raw]


class NumberedRows(NamedTuple):
    """Some rows of a file, with the position of each row."""

    batch: Any
    """Well-formed rows, in the lake's schema."""
    numbers: NDArray[np.int64]
    """Line number of each row, or its row number in Parquet, from 1."""
    rejected: list[Rejected]
    """Rejected lines between these rows, and malformed rows among these rows, ordered by line."""
    features: frozenset[str]
    """Features that the file contains."""

    def first(self, num_rows: int) -> "NumberedRows":
        """Return the first rows. Malformed rows count towards `num_rows`."""
        lines = sorted([*self.numbers.tolist(), *(each.line for each in self.rejected)])[:num_rows]
        num_kept = int(np.searchsorted(self.numbers, lines[-1], side="right")) if lines else 0
        rejected = [each for each in self.rejected if lines and each.line <= lines[-1]]
        return self._replace(
            batch=self.batch.slice(0, num_kept), numbers=self.numbers[:num_kept], rejected=rejected
        )


@dataclass(kw_only=True)
class FileReader:
    """Reader that returns the rows of a user's file in the lake's schema (see `Reader`)."""

    rows: FileRows
    recommender: Recommender
    columns: Mapping[str, str]
    """Name that each raw column has in the file, as returned by `columns_of`."""
    rules: Mapping[str, ValueRule | ListRule]
    """Parsing rule of each column except the time."""
    now: float
    """Current time in seconds since the epoch."""
    has_times: bool = False
    """See `Reader.has_times`."""
    counts: LineCounts = field(default_factory=LineCounts)
    num_ahead: int = 0
    """Number of malformed rows whose time is in the future."""
    span: tuple[int, int] | None = None
    """Times of the oldest and the newest row so far, in microseconds since the epoch. None without
    rows."""

    @property
    def path(self) -> Path:
        """See `Reader.path`."""
        return self.rows.path

    @cached_property
    def _schema(self) -> Any:
        return lake_schema(self.recommender.features, weighted=WEIGHT in self.columns)

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """See `Reader.batches`."""
        for found in self.numbered():
            for line, reason, text in found.rejected:
                malformed.add(self.path, line, reason, text=text)
            malformed.count(self.path, len(found.numbers) + len(found.rejected))
            if found.batch.num_rows:
                yield found.batch
        self._log_span()

    def numbered(self) -> Iterator[NumberedRows]:
        """Yield the rows with their line numbers in file order, including malformed rows."""
        rules: dict[str, AnyRule] = dict(self.rules)
        wanted = list(dict.fromkeys(self.columns.values()))
        for chunk in self.rows.chunks(wanted):
            if EVENT_TIME in self.columns and EVENT_TIME not in rules and chunk.rows.num_rows:
                rules[EVENT_TIME] = TimeRule(form=self._time_form(chunk))
            batch, reasons = self._read(chunk, rules)
            rejected = [
                Rejected(number := int(chunk.numbers[at]), reason, chunk.texts.of(at, number))
                for at, reason in reasons.items()
            ]
            self.counts.add(replace(chunk.counts, rows=chunk.counts.rows - len(reasons)))
            self.counts.rejected += len(reasons)
            batch, numbers = without_rows(batch, reasons), np.delete(chunk.numbers, list(reasons))
            if batch.num_rows:
                self._note_span(batch)
            yield NumberedRows(
                batch, numbers, sorted([*chunk.rejected, *rejected]), frozenset(self.columns)
            )

    def _time_form(self, chunk: Chunk) -> str:
        name = self.columns[EVENT_TIME]
        found = self.recommender.data.time_format
        if found is None:
            found = find_form(chunk.rows.column(name), now=self.now, name=f"{self.path}: {name}")
            logger.info("%s: %s is read as %s", self.path, name, found)
        return found

    def _read(self, chunk: Chunk, rules: Mapping[str, AnyRule]) -> tuple[Any, dict[int, str]]:
        """Return the rows of a chunk in the lake's schema, and the reason for each malformed row.

        The reasons are keyed by the row's position in the chunk.
        """
        reasons: dict[int, str] = {}
        columns: dict[str, Any] = {}
        if not chunk.rows.num_rows:
            return raw_batch({LABEL: pa.array([], pa.int32())}, self._schema), reasons
        for raw, name in self.columns.items():
            rule, column = rules[raw], chunk.rows.column(name)
            parsed = rule.parse(column)
            columns[raw] = parsed.values
            for at in _positions(parsed.is_wrong):
                value = shown_value(column[at])
                reasons.setdefault(at, f"{name} is {_shortened(value)}, expected {rule.expected}")
            if rule.is_required:
                for at in _positions(parsed.is_missing):
                    reasons.setdefault(at, f"{name} is missing, expected {rule.expected}")
        if EVENT_TIME in columns:
            self._find_outside(columns[EVENT_TIME], reasons)
        return raw_batch(columns, self._schema), reasons

    def _find_outside(self, times: Any, reasons: dict[int, str]) -> None:
        """Add a reason for each row whose time is in the future, or too early for a click log."""
        latest = round((self.now + CLOCK_AHEAD_SECONDS) * 1e6)
        micros, name = times.cast(pa.int64()), self.columns[EVENT_TIME]
        for at in _positions(
            pc.fill_null(pc.or_(pc.greater(micros, latest), pc.less(micros, EARLIEST)), False)
        ):
            if at in reasons:
                continue
            time_of_row = micros[at].as_py()
            if time_of_row > latest:
                self.num_ahead += 1
                expected = f"in the future, expected no time after {to_iso(latest)}"
            else:
                expected = f"expected no time before {to_iso(EARLIEST)}"
            reasons[at] = f"{name} is {times[at].cast(pa.string())}, {expected}"

    def _note_span(self, batch: Any) -> None:
        if EVENT_TIME not in self.columns:
            return
        bounds = pc.min_max(batch.column(EVENT_TIME).cast(pa.int64())).as_py()
        first, last = self.span or (bounds["min"], bounds["max"])
        self.span = min(first, bounds["min"]), max(last, bounds["max"])

    def _log_span(self) -> None:
        if self.span is None:
            return
        first, last = self.span
        message = f"{self.path}: rows from {to_iso(first)} to {to_iso(last)}"
        if first < USUAL:
            logger.warning(
                "%s: some times are before 2000. If they are wrong, set data.time_format",
                message,
            )
        else:
            logger.info("%s", message)


def _positions(mask: Any) -> list[int]:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist()  # type: ignore[no-any-return]


def _shortened(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."
