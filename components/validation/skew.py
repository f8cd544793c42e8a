"""Train/serve skew: differences between training rows and the rows that were served.

The training rows are compared with archived rows that were served in the same span of time. Rows
with the same key (request_id, row) are compared value by value. A difference is therefore an exact
result, not an estimate from two distributions. Values are equal if they have the same bits, except
for the sign of zero. Two missing values count as equal. If fewer than `_MIN_JOINED` rows join,
nothing is compared. Labels are never compared, because served rows have no labels yet.

With more than `_SAMPLED_ROWS` training rows, only some requests are compared, chosen by a hash of
the request id. Memory use is therefore independent of the window's length.
"""

import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY, Features, ListOptions
from evergreen.config.validation import ValidationSettings
from evergreen.contracts import raw_rows
from evergreen.contracts.category_texts import ShownValues
from evergreen.rows.archived_rows import (
    archived_files,
    arrow_schema,
    is_alike,
    parquet_file,
    reading_parquet,
)
from evergreen.rows.raw_schema import BATCH_ROWS
from evergreen.runtime.errors import ContractError
from evergreen.storage.objects import Objects
from evergreen.storage.uris import is_bucket_uri, local_path, open_objects

logger = logging.getLogger(__name__)

_MIN_JOINED = 100
"""Minimum number of joined rows for a comparison."""
_SAMPLED_ROWS = 262_144
"""Approximate number of compared training rows. Each row takes 280 bytes per side with 39
features."""
_EQUAL_RATIOS = 0.9
"""Minimum share of the ratios that must be close to their median. Otherwise no factor between
training and serving is reported."""


class EventSpan(NamedTuple):
    """An interval of event time, both ends included."""

    first: datetime
    last: datetime

    def days(self) -> list[str]:
        """Return all UTC days that the interval touches.

        >>> utc = timezone.utc
        >>> EventSpan(datetime(2026, 1, 1, 23, tzinfo=utc), datetime(2026, 1, 2, 1, tzinfo=utc)).days()
        ['2026-01-01', '2026-01-02']
        """  # noqa: E501
        first, last = (
            self.first.astimezone(timezone.utc).date(),
            self.last.astimezone(timezone.utc).date(),
        )
        return [str(first + timedelta(days=n)) for n in range((last - first).days + 1)]


@dataclass(frozen=True, kw_only=True)
class ServedRowFacts:
    """Summary of the rows that were compared."""

    served_uri: str
    first_event_time: str | None
    last_event_time: str | None
    """Newest event time of the compared training rows. None if the comparison has no rows."""
    one_request_in: int
    """Sampling interval of the compared requests. 1 means that all requests were compared, and 10
    means one request in ten."""
    num_joined: int
    num_only_training: int
    num_only_served: int
    unread: tuple[str, ...] = ()
    """One sentence for each file of served rows that was left out, with its name and the reason."""


@dataclass(frozen=True, kw_only=True)
class SkewEntry:
    """Differences of one feature on the joined rows."""

    feature: str
    drifted: bool
    """Whether the effect is larger than its threshold."""
    effect: float
    """Share of joined rows in which the feature differs."""
    threshold: float
    num_rows: int
    """Number of joined rows."""
    differing: int
    only_training: int
    """Number of differing rows that have a value only in training."""
    only_served: int
    factor: float | None
    """Training values divided by served values, if nearly all ratios are equal."""
    example: dict[str, Any] | None
    """First row that differs: request_id, row, and the values `training` and `served`, with
    categories by name. None if the column contains user ids."""


@dataclass(frozen=True, kw_only=True)
class Skew:
    """Result of the comparison."""

    facts: ServedRowFacts
    entries: tuple[SkewEntry, ...] = ()
    """Differences of each feature. The list is empty if too few rows joined."""


def open_served(uri: str) -> Objects:
    """Open the archive of served rows at an absolute path, `file://` or `gs://bucket/prefix`.

    Raises:
        ContractError: `uri` has another form, or is not a folder.
        PermanentError: There are no credentials for the bucket.
    """
    if not is_bucket_uri(uri) and not local_path(uri).is_dir():
        raise ContractError(
            f"served rows {local_path(uri)} is not a folder, expected the archive of a monitor"
        )
    return open_objects(uri)


def measure_skew(
    training: Sequence[Path],
    archive: Objects,
    *,
    features: Features,
    settings: ValidationSettings,
    excluded: Sequence[str] = (),
    shown: ShownValues,
    sampled_rows: int = _SAMPLED_ROWS,
) -> Skew:
    """Compare training rows with the archived rows of the same span of time.

    Args:
        training: Files of training rows.
        archive: Archive of the served rows, see `open_served`.
        features: The recommender's features.
        settings: The thresholds.
        excluded: Features that are not compared.
        shown: Names of the categories. Columns whose values are hidden have no example row.
        sampled_rows: Approximate number of training rows in the sample.

    Raises:
        ContractError: A file of training rows is corrupt, lacks a column or has a column of another
            type.
        TemporaryError, PermanentError: The archive's bucket cannot be read.
    """
    compared = [name for name in features.names if name not in excluded]
    types = raw_rows.raw_types(features)
    keys = (raw_rows.REQUEST_ID, raw_rows.ROW, raw_rows.EVENT_TIME)
    schema = arrow_schema({name: types[name] for name in (*keys, *compared)})
    one_in = max(
        1, -(-sum(int(pq.read_metadata(path).num_rows) for path in training) // sampled_rows)
    )
    mine = theirs = _sample_requests(_read_training(training, schema), one_in)
    span, unread = None, list[str]()
    if mine.num_rows:
        ends = pc.min_max(mine.column(raw_rows.EVENT_TIME)).as_py()
        span = EventSpan(ends["min"], ends["max"])
        string_columns = [name for name in compared if name in features.string_features]
        theirs = _sample_requests(
            read_served(archive, span, schema, string_columns=string_columns, unread=unread), one_in
        )
    joined = _join_rows(mine, theirs) if mine.num_rows and theirs.num_rows else None
    num_joined = joined.training.num_rows if joined else 0
    facts = ServedRowFacts(
        served_uri=archive.uri,
        first_event_time=span.first.isoformat() if span else None,
        last_event_time=span.last.isoformat() if span else None,
        one_request_in=one_in,
        num_joined=num_joined,
        num_only_training=mine.num_rows - num_joined,
        num_only_served=theirs.num_rows - num_joined,
        unread=tuple(unread),
    )
    if joined is None or num_joined < _MIN_JOINED:
        return Skew(facts=facts)
    options = {name: features.list_options_of(name) for name in features.lists}
    entries = (
        compare(joined, name, settings.skew_share, options=options.get(name), shown=shown)
        for name in compared
    )
    return Skew(facts=facts, entries=tuple(entries))


# -- reading the training rows and the served rows


def _read_training(files: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in files:
        with reading_parquet(path), parquet_file(path) as file:
            yield from _read_columns(file, str(path), schema)


def read_served(
    archive: Objects,
    span: EventSpan,
    schema: pa.Schema,
    *,
    unread: list[str],
    string_columns: Sequence[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield batches of the archived rows in the span, oldest day first.

    A batch has the columns of `schema`.

    A file is ignored if a column of `string_columns` contains text, because such rows were ingested
    by people and not served. A corrupt file is also ignored, and so is a file without one of the
    columns or with a column of another type. The reason for an ignored file is added to `unread`.
    The comparison continues with the other files.
    """
    for archived in archived_files(archive, days=span.days()):
        try:
            with archived.opened() as file:
                texts = (pa.string(), pa.list_(pa.string()))
                worded = [field.type for field in file.schema_arrow if field.name in string_columns]
                if any(is_alike(found, text) for found in worded for text in texts):
                    continue
                for batch in _read_columns(file, archived.uri, schema):
                    times = batch.column(raw_rows.EVENT_TIME)
                    yield batch.filter(
                        pc.and_(
                            pc.greater_equal(times, span.first), pc.less_equal(times, span.last)
                        )
                    )
        except ContractError as error:
            logger.warning("served rows are compared without a file that cannot be read: %s", error)
            unread.append(str(error))


def _read_columns(file: pq.ParquetFile, origin: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    found = file.schema_arrow
    for column in schema:
        kind = found.field(column.name).type if column.name in found.names else None
        if kind is None or not is_alike(kind, column.type):
            fault = "is missing" if kind is None else f"is {kind}"
            raise ContractError(f"column {column.name} {fault} in {origin}, expected {column.type}")
    for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=schema.names):
        arrays = [batch.column(column.name).cast(column.type) for column in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema.names)


def _sample_requests(batches: Iterable[pa.RecordBatch], one_in: int) -> pa.Table:
    """Return the rows of those requests that a hash of the request id selects.

    The hash selects the same requests among training rows and served rows.
    """
    kept = []
    for batch in batches:
        if one_in > 1:
            encoded = batch.column(raw_rows.REQUEST_ID).dictionary_encode()
            chosen = [
                zlib.crc32(text.encode()) % one_in == 0 for text in encoded.dictionary.to_pylist()
            ]
            batch = batch.filter(pa.array(chosen, pa.bool_()).take(encoded.indices))
        if batch.num_rows:
            kept.append(batch)
    return pa.Table.from_batches(kept) if kept else pa.table({})


# -- comparing


class JoinedRows(NamedTuple):
    """Rows of both sides in the same order.

    If a key occurs twice on one side, one of its rows is used.
    """

    training: pa.Table
    served: pa.Table


def _join_rows(training: pa.Table, served: pa.Table) -> JoinedRows:
    """Join both sides by request id and row, in the order of the training rows."""
    ids = pa.concat_arrays(
        [
            chunk
            for table in (training, served)
            for chunk in table.column(raw_rows.REQUEST_ID).chunks
        ]
    ).dictionary_encode()
    requests = ids.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    rows = np.concatenate(
        [table.column(raw_rows.ROW).to_numpy() for table in (training, served)]
    ).astype(np.int64)
    names = (requests << 32) | rows.astype(np.uint32).astype(np.int64)
    mine, first_mine = np.unique(names[: training.num_rows], return_index=True)
    theirs, first_theirs = np.unique(names[training.num_rows :], return_index=True)
    _, at_mine, at_theirs = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    order = np.argsort(first_mine[at_mine])
    return JoinedRows(
        training.take(pa.array(first_mine[at_mine][order])),
        served.take(pa.array(first_theirs[at_theirs][order])),
    )


def compare(
    joined: JoinedRows,
    name: str,
    threshold: float,
    *,
    shown: ShownValues,
    options: ListOptions | None = None,
) -> SkewEntry:
    """Return the differences of one feature in joined rows.

    The number of joined rows must not be 0.

    A feature with `options` is a list. Two lists differ if an element within the maximum length
    differs.
    """
    mine, theirs = (_column_values(table, name, options) for table in joined)
    is_number = mine.dtype == np.float32
    missing = [np.isnan(v) if is_number else v == MISSING_CATEGORY for v in (mine, theirs)]
    differs = (mine != theirs) & ~(missing[0] & missing[1])
    if options:
        differs, missing = differs.any(axis=1), [each.all(axis=1) for each in missing]
    example = None
    if differs.any() and name not in shown.hidden:
        at, text_of = int(differs.argmax()), partial(shown.text, name)
        example = {
            column: joined.training.column(column)[at].as_py()
            for column in (raw_rows.REQUEST_ID, raw_rows.ROW)
        }
        example |= {
            "training": _plain_value(mine[at], text_of),
            "served": _plain_value(theirs[at], text_of),
        }
    return SkewEntry(
        feature=name,
        drifted=bool(differs.mean() > threshold),
        effect=float(differs.mean()),
        threshold=threshold,
        num_rows=len(differs),
        differing=int(differs.sum()),
        only_training=int((differs & missing[1]).sum()),
        only_served=int((differs & missing[0]).sum()),
        factor=_common_factor(mine[differs], theirs[differs]) if is_number else None,
        example=example,
    )


def _column_values(table: pa.Table, name: str, options: ListOptions | None) -> NDArray[Any]:
    column = table.column(name)
    if options:
        return raw_rows.list_matrix(column.combine_chunks(), options)
    missing = np.nan if pa.types.is_floating(column.type) else MISSING_CATEGORY
    values: NDArray[Any] = column.fill_null(missing).to_numpy()
    return values


def _common_factor(mine: NDArray[np.float32], theirs: NDArray[np.float32]) -> float | None:
    """Return the factor between `mine` and `theirs` if nearly all ratios are equal, else None."""
    both = np.isfinite(mine) & np.isfinite(theirs) & (mine != 0) & (theirs != 0)
    ratios = mine[both].astype(np.float64) / theirs[both]
    if not len(ratios):
        return None
    middle = float(np.median(ratios))
    return middle if np.isclose(ratios, middle, rtol=1e-3).mean() >= _EQUAL_RATIOS else None


def _plain_value(value: Any, text_of: Callable[[int], str | None]) -> float | str | None:
    if isinstance(value, np.ndarray):
        return (
            ", ".join(
                text for each in value if each != MISSING_CATEGORY and (text := text_of(int(each)))
            )
            or None
        )
    if isinstance(value, np.integer):
        return None if value == MISSING_CATEGORY else text_of(int(value))
    return float(value) if math.isfinite(value) else None
