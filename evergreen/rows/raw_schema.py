"""Raw rows in Parquet: Arrow types, the columns of a run, malformed rows, and writing files.

`contracts.raw_rows` defines the columns. `RawDataset.excluded_columns` names the features that the
run excludes. Preprocessing treats excluded features as missing, and validation ignores them.
Readers skip excluded features and return null for them, unless the champion uses them. The gate
scores the candidate and the champion on the same held-out rows. A champion without one of its
features would lose to any candidate.

Extraction writes rows in the raw schema. If the type of a feature became text, extraction casts the
feature if possible. A column that is not in the schema is not read. Validation cannot see these
changes, so `RawDataset.schema_mismatches` reports them. A column that is absent or cannot be cast
stops the step (`rows.parquet`).

Malformed rows are counted and stored with their reason. The step stops if a file has too many
malformed rows. A reader records each row that it cannot use, and counts all rows that it has read.
Each malformed row is a line of a JSONL file: `file`, `line` (from 1; the row's number in a Parquet
file), `reason`, `text` (the original).

If the written files are read in the order of their names, the rows are in their original order. The
caller publishes a folder as a whole.
"""

import json
import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evergreen.config.data import WEIGHT
from evergreen.config.extraction import ExtractionSettings
from evergreen.config.features import BOOLEAN_TEXTS, MAX_CATEGORY, Features, category_of
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import Model
from evergreen.contracts.values import EXACT_BELOW, NoCategory, is_missing_text, text_of_value
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.registry.models import verified_part
from evergreen.rows import archived_rows
from evergreen.rows.archived_rows import (
    arrow_schema,
    is_list,
    parquet_writer,
    reading_parquet,
)
from evergreen.rows.times import TimeSpan
from evergreen.rows.unfit import UnfitFiles
from evergreen.runtime.durable import whole_file
from evergreen.runtime.errors import ContractError


def excluded_columns(columns: Sequence[str], features: Features) -> list[str]:
    """Return the features that are not in `columns`, in the order of files.

    If `columns` is empty, no feature is excluded.

    Raises:
        ContractError: a name is not a feature or occurs twice, or a list is named without the
            feature whose table it uses.

    >>> features = Features(numeric=("price", "age"), categorical=("item",))
    >>> excluded_columns(["item", "price"], features)
    ['age']
    """
    names = list(columns or features.names)
    if unknown := [name for name in names if name not in features.names]:
        raise ContractError(f"columns name {unknown}, expected some of {', '.join(features.names)}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ContractError(f"columns name {twice} twice, expected each once")
    excluded = [name for name in features.names if name not in names]
    for name in features.lists:
        if (table := features.list_options_of(name).table) in excluded and name not in excluded:
            raise ContractError(
                f"columns name {name} and not its table {table}, expected both or none"
            )
    return excluded


def unread_columns(excluded: Collection[str], champion: Model | None) -> frozenset[str]:
    """Return the excluded features that no reader needs.

    The result contains each excluded feature that the champion does not use. Without a champion,
    the result contains all excluded features.

    Raises:
        ContractError: the champion's workflow is corrupt.
    """
    if not excluded or champion is None:
        return frozenset(excluded)
    workflow = FeatureWorkflow.load(verified_part(champion, Model.WORKFLOW))
    return frozenset(excluded) & frozenset(workflow.excluded)


class SchemaMismatch(NamedTuple):
    """An unexpected column of one file."""

    column: str
    arrow_type: str
    """Arrow type of the column in the file."""
    expected: str | None
    """Type of the column in the raw schema. None if the column is not in the raw schema."""
    file: str
    """First file in which the column has this type."""


def find_schema_mismatches(
    schema: Any,
    path: Path,
    features: Features,
    *,
    unread: Container[str] = (),
    weighted: bool = False,
) -> list[SchemaMismatch]:
    """Return the unexpected columns of a file, in file order.

    Some differences are accepted: numbers of another width, whole numbers in a column of floats,
    and a boolean label.

    Args:
        schema: Arrow schema of the file.
        path: The file.
        features: Features of the recommender.
        unread: Features that are not checked.
        weighted: Whether rows have weights. If False, a weight column counts as unexpected.
    """
    found = []
    weight = tuple(raw_rows.WEIGHT_TYPES) if weighted else ()
    types, known, numbers = (
        raw_rows.lake_types(features, weighted=weighted),
        raw_rows.known_columns(features).union(weight),
        (raw_rows.LABEL, *features.names, *weight),
    )
    for each in schema:
        if each.name not in known:
            found.append(SchemaMismatch(each.name, str(each.type), None, str(path)))
        elif each.name in numbers and each.name not in unread:
            of_values = (
                each.type.value_type
                if each.name in features.lists and is_list(each.type)
                else each.type
            )
            is_fit = _is_number(of_values) or (
                each.name in features.string_features and is_text(of_values)
            )
            if each.name in features.lists and not pa.types.is_null(each.type):
                is_fit = is_fit and is_list(each.type)
            if not is_fit:
                found.append(SchemaMismatch(each.name, str(each.type), types[each.name], str(path)))
    return found


def is_text(found: Any) -> bool:
    """Return whether an Arrow type is text or bytes, possibly dictionary-encoded."""
    values = found.value_type if pa.types.is_dictionary(found) else found
    types = pa.types
    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_of(values) for is_of in kinds)


def _is_number(found: Any) -> bool:
    values = found.value_type if pa.types.is_dictionary(found) else found
    # pandas writes a column without values with the type null. The type null does not count as a
    # mismatch.
    kinds = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_boolean,
        pa.types.is_null,
    )
    return any(is_of(values) for is_of in kinds)


logger = logging.getLogger(__name__)

CHECKED_FROM_ROWS = 10_000
"""Number of rows from which on the share of malformed rows is checked while a file is read. If the
share is too large, the step stops without reading the rest of the file. The share is checked again
at the end of each file."""
_NUM_EXAMPLES = 3
Named = Callable[[Path], str]
"""Function that converts the path of a file to its displayed name."""


@dataclass
class _FileCounts:
    num_rows: int = 0
    num_malformed: int = 0
    examples: list[str] = field(default_factory=list)


class MalformedRows:
    """Collector of malformed rows. The collector writes the rows to the JSONL file at `path`.

    If no row is malformed, no file is created. The folder of `path` is either published or
    discarded as a unit.

    Args:
        path: The JSONL file.
        max_fraction: Maximum share of malformed rows in a file, in [0, 1].
        named: Function that returns the displayed name of a file: its path, or the source of a
            copied file.
        collects_unfit: Whether to collect all unfit files before an error is raised. If False, the
            first unfit file stops the reading.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_fraction: float = ExtractionSettings.max_malformed_fraction,
        named: Named = str,
        collects_unfit: bool = False,
    ) -> None:
        self.path = path
        self.num_rows = 0
        """Number of malformed rows so far, over all files."""
        self._max_fraction, self._named = max_fraction, named
        self.collects_unfit = collects_unfit
        """Whether unfit files are reported together at the end."""
        self._unfit: dict[Path, str] = {}
        self._counts: dict[Path, _FileCounts] = {}
        self._mismatches: dict[str, SchemaMismatch] = {}
        self._absent: dict[Path, tuple[int, frozenset[str]]] = {}
        """For each file, the start of its day and the names of the features that it lacks."""
        self._file: IO[str] | None = None

    def __enter__(self) -> "MalformedRows":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def of_part(self, number: int) -> "MalformedRows":
        """Return a new collector for one part of the rows. Another process may read the part.

        After the reading, merge the part's collector into this collector.
        """
        path = self.path.with_name(f"{self.path.name}.{number}")
        return MalformedRows(
            path,
            max_fraction=self._max_fraction,
            named=self._named,
            collects_unfit=self.collects_unfit,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of the collector, which another process can merge.

        The state excludes the open file and the function that shortens file names for messages.
        """
        return {**self.__dict__, "_file": None, "_named": str}

    def merge(self, part: "MalformedRows") -> None:
        """Add the rows of another collector, which must be closed.

        The file of the other collector is deleted.
        """
        if part.num_rows:
            self._opened().write(part.path.read_text(encoding="utf-8"))
            part.path.unlink()
        self.num_rows += part.num_rows
        for path, each in part._counts.items():
            counts = self._counts.setdefault(path, _FileCounts())
            counts.num_rows += each.num_rows
            counts.num_malformed += each.num_malformed
            counts.examples = [*counts.examples, *each.examples][:_NUM_EXAMPLES]
        self.add_mismatches(part._mismatches.values())
        self._absent |= part._absent
        self._unfit |= part._unfit

    def _opened(self) -> IO[str]:
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8")
        return self._file

    def add(self, path: Path, line: int, reason: str, *, text: str) -> None:
        """Record one malformed row. The caller must also count the row with the method `count`."""
        described = {"file": self._named(path), "line": line, "reason": reason, "text": text}
        self._opened().write(json.dumps(described) + "\n")
        self.num_rows += 1
        counts = self._counts.setdefault(path, _FileCounts())
        counts.num_malformed += 1
        if len(counts.examples) < _NUM_EXAMPLES:
            counts.examples.append(f"line {line}: {reason}")

    def add_unfit(self, path: Path, error: ContractError) -> None:
        """Record a file whose rows cannot be read.

        Raises:
            ContractError: `error` itself, if unfit files are not collected.
        """
        if not self.collects_unfit:
            raise error
        self._unfit.setdefault(path, str(error))

    def add_unfit_of(self, other: "MalformedRows") -> None:
        """Add the unfit files that another collector has recorded."""
        self._unfit |= other._unfit

    def add_mismatches(self, columns: Iterable[SchemaMismatch]) -> None:
        """Add a file's columns that do not match the schema.

        Only the first mismatch of each column is recorded.
        """
        for each in columns:
            self._mismatches.setdefault(each.column, each)

    def add_absent(self, path: Path, features: Iterable[str], *, day: TimeSpan) -> None:
        """Record the features that a file lacks, with the day of the file.

        Absent features count as missing in the rows of the file.
        """
        self._absent[path] = (day.start or 0, frozenset(features))

    @property
    def schema_mismatches(self) -> list[dict[str, Any]]:
        """See `RawDataset.schema_mismatches`."""
        return [
            each._replace(file=self._named(Path(each.file)))._asdict()
            for each in self._mismatches.values()
        ]

    def count(self, path: Path, num_rows: int) -> None:
        """Count rows of `path`, including malformed ones.

        If enough rows of the file are counted, the share of its malformed rows is checked.

        Raises:
            ContractError: too many of the counted rows are malformed.
        """
        counts = self._counts.setdefault(path, _FileCounts())
        counts.num_rows += num_rows
        if counts.num_rows >= CHECKED_FROM_ROWS:
            self._check_file(path, counts)

    def check(self) -> None:
        """Check every file that was read.

        If a feature was added to a recommender, the files of earlier days lack it. A file may
        therefore lack a feature that files of later days have. But if a file has a feature, all
        files of later days must have it.

        Raises:
            ContractError: too many of a file's rows are malformed, or a file lacks a feature that
                it must have. The message names the file, the counts and the first examples.
            UnfitFiles: at least one file is unfit, and unfit files are reported together.
        """
        for path, counts in self._counts.items():
            try:
                self._check_file(path, counts)
            except ContractError as error:
                self.add_unfit(path, error)
            if counts.num_malformed:
                logger.warning(
                    "%s: %d of %d rows are malformed", path, counts.num_malformed, counts.num_rows
                )
        self.report_unfit()
        for feature in sorted(frozenset().union(*(absent for _, absent in self._absent.values()))):
            self._check_absence(feature)
        self.report_unfit()

    def report_unfit(self) -> None:
        """Report the unfit files that were collected.

        Raises:
            UnfitFiles: at least one file is unfit.
        """
        if self._unfit:
            raise UnfitFiles(self._unfit)

    def _check_absence(self, feature: str) -> None:
        without = {path: day for path, (day, absent) in self._absent.items() if feature in absent}
        with_it = [day for path, (day, _) in self._absent.items() if path not in without]
        last = max(without, key=lambda path: without[path])
        if not with_it:
            others = f" and {len(without) - 1} other files" if len(without) > 1 else ""
            raise ContractError(
                f"{self._named(last)}{others} lack the column {feature}, expected it in at least "
                "one "
                "file of the window: ingest rows with it, or accept a recommender without it"
            )
        if without[last] > min(with_it):
            for path in [path for path, day in without.items() if day > min(with_it)]:
                message = (
                    f"{self._named(path)} lacks the column {feature}, which a file of an earlier "
                    "day has; expected the column in the files of all later days"
                )
                self.add_unfit(path, ContractError(message))
            return
        logger.warning(
            "%d of %d files lack the column %s", len(without), len(self._absent), feature
        )

    def _check_file(self, path: Path, counts: _FileCounts) -> None:
        if counts.num_malformed > self._max_fraction * counts.num_rows:
            share = counts.num_malformed / max(counts.num_rows, 1)
            raise ContractError(
                f"{path}: {counts.num_malformed} of {counts.num_rows} rows are malformed "
                f"({share:.2%}), expected at "
                f"most {self._max_fraction:.2%}; first: {'; '.join(counts.examples)}; correct "
                "them, or raise "
                "extraction.max_malformed_fraction"
            )


BATCH_ROWS = 65_536
"""Number of rows in a batch in memory, and in a row group on disk."""


KEY_COLUMNS = (raw_rows.REQUEST_ID, raw_rows.ROW, raw_rows.EVENT_TIME)
TIME_TYPE = pa.timestamp("us", tz="UTC")
"""Arrow type of `event_time`."""
_EXPECTED_WEIGHT = "a finite number of at least 0"
"""Rule for valid sample weights, for error messages."""
BYTES = (pa.types.is_binary, pa.types.is_large_binary)
"""Functions that recognize Arrow's types for bytes. Some writers store texts as bytes."""


def raw_schema(features: Features, *, weighted: bool = False) -> Any:
    """Return the raw schema of rows with these features."""
    return arrow_schema(raw_rows.raw_types(features, weighted=weighted))


def lake_schema(features: Features, *, weighted: bool = False) -> Any:
    """Return the schema of rows that are written to a lake.

    The rows come from a user's files.
    """
    return arrow_schema(raw_rows.lake_types(features, weighted=weighted))


def click_columns(features: Features, *, weighted: bool = False) -> list[str]:
    """Return the names of the label, the features and the weight."""
    return [raw_rows.LABEL, *features.names, *(raw_rows.WEIGHT_TYPES if weighted else ())]


def open_parquet(path: Path) -> Any:
    """Open the Parquet file at `path` and read its footer.

    Raises:
        ContractError: the file is not a complete Parquet file, or it cannot contain rows
            (`archived_rows.open_parquet`).
    """
    with reading_parquet(path):
        return archived_rows.open_parquet(path)


def raw_batch(columns: dict[str, Any], schema: Any) -> Any:
    """Return a record batch in the raw schema that contains the given columns.

    All other columns of the schema are null.
    """
    num_rows = len(next(iter(columns.values())))
    arrays = [columns.get(f.name) for f in schema]
    return pa.record_batch(
        [a if a is not None else pa.nulls(num_rows, f.type) for a, f in zip(arrays, schema)],
        schema=schema,
    )


def texts(values: Any, *, is_string: bool = True) -> Any:
    """Return the texts (Arrow string) of a column's values, in the spelling of `text_of_value`.

    Args:
        values: Arrow array of texts, bytes, booleans or whole numbers.
        is_string: Whether the type of the feature is `string`.

    Raises:
        pa.ArrowException: A value is not a category, or is bytes that are not UTF-8.
    """
    kind = values.type
    if is_text(kind):
        return _of_distinct(values, lambda word: word, pa.string(), is_string=is_string)
    if pa.types.is_floating(kind):
        values = _exact_whole(values)
    elif pa.types.is_decimal(kind):
        values = values.cast(pa.decimal128(38, 0))
    return values.cast(pa.string())


def categories(values: Any, *, is_string: bool = True) -> Any:
    """Convert values to their categories (Arrow int64). Each distinct value is hashed once.

    Raises:
        pa.ArrowException: See `texts`.
    """
    if pa.types.is_floating(values.type):
        values = _exact_whole(values)
    if pa.types.is_integer(values.type) or pa.types.is_null(values.type):
        signed = values.cast(
            pa.int64(), safe=False
        )  # unsigned numbers of 2^63 or more become negative
        is_own = pc.and_(pc.greater_equal(signed, 0), pc.less_equal(signed, MAX_CATEGORY))
        if pc.all(is_own).as_py() is not False:
            return signed
    if not is_text(values.type):
        values = texts(values)
    return _of_distinct(values, category_of, pa.int64(), is_string=is_string)


def whole_numbers(values: Any) -> Any:
    """Convert the values of a feature of type `int64` to the form in which a lake stores them.

    The Arrow type of the result is int64.

    Booleans, and numbers that need 64 unsigned bits, are stored as their categories. A stored
    category does not change when it is converted again.

    Raises:
        pa.ArrowException: See `texts`.
    """
    kind = values.type
    if pa.types.is_floating(kind):
        return _exact_whole(values)
    if pa.types.is_boolean(kind):
        return categories(values)
    if pa.types.is_uint64(kind) or pa.types.is_decimal(kind):
        values = texts(values)
    if is_text(values.type):
        return _of_distinct(values, _number_or_category, pa.int64(), is_string=False)
    return values.cast(pa.int64())


def _number_or_category(word: str) -> int:
    if word in BOOLEAN_TEXTS or int(word) >= 2**63:
        return category_of(word)
    return int(word)


def _exact_whole(values: Any) -> Any:
    """Convert floats (Arrow) that are exactly whole numbers to int64. NaN becomes null.

    Raises:
        pa.ArrowException: A value is not whole, or is too large to be exact.
    """
    exact_below = EXACT_BELOW[str(values.type)]
    values = nan_to_null(values.cast(pa.float64()))
    is_large = pc.greater_equal(pc.abs(values), float(exact_below))
    if pc.any(is_large).as_py():
        try:
            text_of_value(
                values.filter(is_large)[0].as_py(), is_string=False, exact_below=exact_below
            )
        except NoCategory as error:
            raise pa.ArrowInvalid(str(error)) from error
    return values.cast(pa.int64())


def _of_distinct(values: Any, convert: Callable[[str], Any], kind: Any, *, is_string: bool) -> Any:
    """Apply `convert` to the canonical form of each text, once for each distinct text.

    The Arrow type of the result is `kind`. Missing texts become null.
    """
    encoded = values.cast(pa.string()).dictionary_encode()
    found: list[Any] = []
    for text in encoded.dictionary.to_pylist():
        try:
            word = text_of_value(text, is_string=is_string)
        except NoCategory as error:
            raise pa.ArrowInvalid(str(error)) from error
        found.append(None if word is None else convert(word))
    return pa.array(found, kind).take(encoded.indices)


def in_lists(values: Any, convert: Callable[[Any], Any]) -> Any:
    """Apply `convert` to all elements of an Arrow array of lists at once, and return the new lists.

    Elements that are null are dropped, and an empty list becomes null.

    Raises:
        pa.ArrowException: the values are not lists, or `convert` fails.
    """
    if pa.types.is_null(values.type):
        values = values.cast(pa.list_(pa.int64()))
    if pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    if not is_list(values.type):
        raise pa.ArrowTypeError("the values are not lists")
    return regrouped(convert(values.flatten()), list_positions(values), num_lists=len(values))


def list_positions(lists: Any) -> NDArray[np.int64]:
    """Return for each element of `lists` (Arrow) the position of its list."""
    positions: NDArray[np.int64] = np.repeat(np.arange(len(lists)), raw_rows.list_lengths(lists))
    return positions


def regrouped(
    elements: Any,
    positions: NDArray[np.int64],
    *,
    num_lists: int,
    malformed: NDArray[np.bool_] | None = None,
) -> Any:
    """Return lists (Arrow) of the elements that are not null.

    Args:
        elements: Arrow array, in the order of the lists.
        positions: Position of each element's list (`list_positions`).
        num_lists: Number of lists. A list without elements is null.
        malformed: Mask of the lists that become null although they have elements. None = no such
            lists.
    """
    is_there = elements.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.bincount(positions[is_there], minlength=num_lists)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    is_null = lengths == 0 if malformed is None else (lengths == 0) | malformed
    return pa.ListArray.from_arrays(
        pa.array(offsets, mask=np.append(is_null, False)), elements.drop_null()
    )


def nan_to_null(values: Any) -> Any:
    """Return floats (Arrow) in which null replaces NaN."""
    return pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)


def without_missing_texts(values: Any) -> Any:
    """Return texts (Arrow) of a numeric column. Texts that mean "no value" become null."""
    encoded = values.dictionary_encode()
    is_missing = pa.array(
        [is_missing_text(text) for text in encoded.dictionary.to_pylist()], pa.bool_()
    )
    return pc.if_else(is_missing.take(encoded.indices), pa.scalar(None, values.type), values)


def find_malformed(
    batch: Any,
    features: Features,
    *,
    keys: Collection[str] = (),
    names: Mapping[str, str] | None = None,
) -> dict[int, str]:
    """Return the first reason that was found for each malformed row of a raw batch.

    Args:
        batch: The rows. If the batch has a weight column, the weights are checked too.
        features: Features of the recommender.
        keys: Columns of `KEY_COLUMNS` that must also have a value in every row.
        names: Name of each column in the file, if it differs from the name in the batch.

    Returns:
        The reason for each malformed row, by the row's position.
    """
    reasons: dict[int, str] = {}

    def note(wrong: Any, name: str, expected: str) -> None:
        # The mask is null where the value is missing. Missing values are allowed, except in
        # required columns, where the mask is never null.
        if pc.any(wrong).as_py():
            for at in np.flatnonzero(wrong.fill_null(False).to_numpy(zero_copy_only=False)):
                value = batch.column(name)[int(at)].as_py()
                reasons.setdefault(
                    int(at), f"{(names or {}).get(name, name)} is {value!r}, expected {expected}"
                )

    label = batch.column(raw_rows.LABEL)
    note(
        pc.invert(pc.is_in(label, value_set=pa.array([0, 1], label.type))), raw_rows.LABEL, "0 or 1"
    )
    for name in features.numeric:
        numbers = batch.column(name).to_numpy(zero_copy_only=False)
        note(pa.array(raw_rows.is_infinite(numbers)), name, raw_rows.FINITE)
    if WEIGHT in batch.schema.names:
        weight = batch.column(WEIGHT)
        is_weight = pc.and_(pc.is_finite(weight), pc.greater_equal(weight, 0))
        note(pc.invert(is_weight.fill_null(False)), WEIGHT, _EXPECTED_WEIGHT)
    for name in keys:
        note(pc.is_null(batch.column(name)), name, "a value")
    return reasons


def record_malformed(
    batch: Any,
    reasons: dict[int, str],
    *,
    path: Path,
    numbers: Sequence[int],
    malformed: MalformedRows,
) -> None:
    """Record each malformed row of `batch`.

    Args:
        batch: The rows.
        reasons: Reason for each malformed row, by its position in the batch.
        path: File of the rows.
        numbers: Row number in the file, for each row.
        malformed: Collector.
    """
    for at, reason in sorted(reasons.items()):
        row = {name: plain_value(batch.column(name)[at]) for name in batch.schema.names}
        text = json.dumps(row, default=str)
        malformed.add(path, numbers[at], reason, text=text)


def plain_value(value: Any) -> Any:
    """Return an Arrow scalar as a Python value.

    A time that Python does not support is returned as text.
    """
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return f"{value.value} of {value.type}"


def without_rows(batch: Any, positions: Iterable[int]) -> Any:
    """Return `batch` without the rows at `positions`."""
    is_valid = np.ones(batch.num_rows, dtype=bool)
    is_valid[list(positions)] = False
    return batch if is_valid.all() else batch.filter(pa.array(is_valid))


FILE_ROWS = 4 * BATCH_ROWS
"""Rows per file: 262,144, about 40 MB. With files of this size, later steps can stream and
distribute the rows. The number of rows is a multiple of the row group's size."""
_DICTIONARY_BYTES = 128 << 10
"""Maximum size of a column's dictionary in a row group: 16,384 categories. When a column has more
distinct values, its remaining pages are written without a dictionary. The limit saves a sixth of
the processor time and does not change the file size. pyarrow's default of 1 MiB would have no
effect, because a row group of 65,536 rows never reaches it."""


class PartFile(NamedTuple):
    """A written file."""

    path: Path
    num_rows: int


class PartWriter:
    """Writer of raw rows to files `<prefix>-00000.parquet` and so on, in a folder that it creates.

    All row groups are full except the last one.
    """

    def __init__(self, folder: Path, *, prefix: str = "part", first_number: int = 0) -> None:
        self.parts: list[PartFile] = []
        self._folder, self._prefix, self._number = folder, prefix, first_number
        self._pending: list[Any] = []
        self._num_pending = 0
        self._open_file = ExitStack()
        self._writer: Any = None
        self._num_written = 0

    def __enter__(self) -> "PartWriter":
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None and self._num_pending:
            self._write_group(self._num_pending)
        self._open_file.__exit__(kind, error, at)

    def write(self, table: Any) -> None:
        """Add the rows of a table or record batch in the raw schema."""
        self._pending.extend(table.to_batches() if isinstance(table, pa.Table) else [table])
        self._num_pending += table.num_rows
        while self._num_pending >= (size := min(BATCH_ROWS, FILE_ROWS - self._num_written)):
            self._write_group(size)

    def _write_group(self, num_rows: int) -> None:
        pending = pa.Table.from_batches(self._pending)
        if self._writer is None:
            path = self._folder / f"{self._prefix}-{self._number:05d}.parquet"
            # The file is written atomically. A worker that was assumed to be dead may still write
            # the same rows.
            file = self._open_file.enter_context(whole_file(path))
            options = {"dictionary_pagesize_limit": _DICTIONARY_BYTES}
            self._writer = self._open_file.enter_context(
                parquet_writer(file, pending.schema, **options)
            )
            self.parts.append(PartFile(path, 0))
            self._number += 1
        self._writer.write_table(
            pending.slice(0, num_rows).combine_chunks(), row_group_size=num_rows
        )
        self._pending = pending.slice(num_rows).to_batches()
        self._num_pending -= num_rows
        self._num_written += num_rows
        self.parts[-1] = PartFile(self.parts[-1].path, self._num_written)
        if self._num_written == FILE_ROWS:
            self._finish_file()

    def _finish_file(self) -> None:
        self._open_file.close()
        self._writer, self._num_written = None, 0
