"""Train/serve skew: what the model is trained on beside what it was served.

The training rows are compared with the archived rows that were served in the same span of time. Rows that were trained
on and served under one name (request_id, row) are compared value by value: a feature that differs there differs for
certain, whatever its distribution looks like. Values are the same if they are the same bits, except for the sign of
zero; two missing values are the same. If fewer than `MIN_JOINED` rows join, distributions are compared instead, which
is weaker evidence: the rows may be of other users. Labels are not compared, because what is served has no label yet.

Rows are joined in parts by a hash of the request id, which pass through a scratch folder if they are many.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts import criteo
from components.drift_statistics.effects import wilson_interval
from components.runtime.errors import ContractError, first_line
from components.storage.downloads import fetched_files
from components.storage.locations import open_objects
from components.storage.objects import Objects
from components.storage.uris import is_bucket_uri, local_path
from components.store.archived_rows import archived_files, arrow_schema
from components.validation.drift import DriftEntry, measure_drift
from components.validation.reference import ReferenceCounter
from components.validation.rows import BATCH_ROWS, reading_parquet
from components.validation.settings import ValidationSettings
from components.validation.windows import KeptWindows, WindowSummary

logger = logging.getLogger(__name__)

ROWS, DISTRIBUTIONS = "rows", "distributions"
MIN_JOINED = 100
"""Joined rows from which on they alone are judged."""
PART_ROWS = 262_144
"""Rows of both sides together in a part, on average; 280 bytes each."""
MAX_RATIOS = 20_000
"""Values of a feature whose ratio is kept for its median."""
EQUAL_RATIOS = 0.9
"""Share of the ratios that must agree with their median before it is reported as a factor."""


class EventSpan(NamedTuple):
    """A span of event time, both ends included."""

    first: datetime
    last: datetime

    def days(self) -> list[str]:
        """The UTC days that it touches.

        >>> utc = timezone.utc
        >>> EventSpan(datetime(2026, 1, 1, 23, tzinfo=utc), datetime(2026, 1, 2, 1, tzinfo=utc)).days()
        ['2026-01-01', '2026-01-02']
        """
        first, last = self.first.astimezone(timezone.utc).date(), self.last.astimezone(timezone.utc).date()
        return [str(first + timedelta(days=n)) for n in range((last - first).days + 1)]


@dataclass(frozen=True, kw_only=True)
class ServedRowFacts:
    """Which rows were compared."""

    served_uri: str
    method: str
    """`rows` or `distributions`."""
    first_event_time: str | None
    last_event_time: str | None
    """Of the training rows; None if there are none."""
    num_joined: int
    num_only_training: int
    num_only_served: int


@dataclass(frozen=True, kw_only=True)
class SkewEntry:
    """One feature on the joined rows."""

    feature: str
    drifted: bool
    """Whether `effect` is above `threshold`."""
    effect: float
    """Share of the joined rows that differ."""
    effect_low: float
    effect_high: float
    """95 % interval, in which rows of a request count as alike."""
    threshold: float
    num_rows: int
    """Joined rows."""
    differing: int
    only_training: int
    """Differing rows that have a value in training alone."""
    only_served: int
    factor: float | None
    """Training over served values, if nearly all differ by one factor."""
    example: dict[str, Any] | None
    """The first row that differs: request_id, row, and the values `training` and `served`."""


@dataclass(frozen=True, kw_only=True)
class Skew:
    """What was found. One of `rows` and `distributions` is empty; both are if no row of the span was served."""

    facts: ServedRowFacts
    rows: tuple[SkewEntry, ...] = ()
    distributions: tuple[DriftEntry, ...] = ()
    """From served (before) to training (now)."""


def open_served(uri: str) -> Objects:
    """The archive of served rows at `uri`: an absolute path, `file://` or `gs://bucket/prefix`.

    Raises:
        ContractError: `uri` is none of these, or not a folder.
        PermanentError: there are no credentials for the bucket.
    """
    if not is_bucket_uri(uri) and not local_path(uri).is_dir():
        raise ContractError(f"served rows {local_path(uri)} is not a folder, expected the archive of a monitor")
    return open_objects(uri)


def measure_skew(
    training: Sequence[Path],
    archive: Objects,
    scratch: Path,
    *,
    settings: ValidationSettings,
    excluded: Sequence[str] = (),
    part_rows: int = PART_ROWS,
) -> Skew:
    """Compares the rows of the files `training` with those that `archive` holds of the same span of time.

    Args:
        training: Parquet files in the raw schema.
        archive: From `open_served`.
        scratch: Folder for fetched files and parts; nothing stays in it.
        settings: How large a difference must be to matter.
        excluded: Features that the run left out; not compared.
        part_rows: See `PART_ROWS`.

    Raises:
        ContractError: a file on either side lacks a column or holds it in another type.
        TemporaryError, PermanentError: the archive's bucket cannot be read, or a file changed meanwhile.
    """
    features = [name for name in criteo.FEATURES if name not in excluded]
    span = span_of(training)
    if span is None:
        return Skew(facts=_make_facts(archive, span, RowJoin([]), ROWS))
    scratch.mkdir(parents=True, exist_ok=True)
    with served_files(archive, span, features, scratch) as files:
        joined = RowJoin(features)
        if files:
            joined = _join_files(training, files, span, scratch, features=features, part_rows=part_rows)
            logger.info("joined %d training rows with served ones; %d had none", joined.joined, joined.only_training)
        if joined.joined >= MIN_JOINED or not joined.only_served + joined.joined:
            entries = [joined.entry(name, settings.skew_share) for name in features] if joined.joined else []
            return Skew(facts=_make_facts(archive, span, joined, ROWS), rows=tuple(entries))
        now = _summarize_window(read_columns(training, features), excluded)
        before = _summarize_window(within(read_columns(files, features), span), excluded)
    entries_of_drift = measure_drift(now, KeptWindows((before,)), settings)
    return Skew(facts=_make_facts(archive, span, joined, DISTRIBUTIONS), distributions=tuple(entries_of_drift))


def _make_facts(archive: Objects, span: EventSpan | None, joined: RowJoin, method: str) -> ServedRowFacts:
    return ServedRowFacts(
        served_uri=archive.uri,
        method=method,
        first_event_time=span.first.isoformat() if span else None,
        last_event_time=span.last.isoformat() if span else None,
        num_joined=joined.joined,
        num_only_training=joined.only_training,
        num_only_served=joined.only_served,
    )


def _summarize_window(batches: Iterator[pa.RecordBatch], excluded: Sequence[str]) -> WindowSummary:
    counter = ReferenceCounter(excluded=excluded)
    for batch in batches:
        counter.add(batch)
    return counter.window()


# -- reading both sides


@contextmanager
def served_files(archive: Objects, span: EventSpan, features: Sequence[str], scratch: Path) -> Iterator[list[Path]]:
    """Yields Parquet files with at least the rows of the span, oldest day first.

    Of an archive in a bucket, only the rows of the span are kept on this machine: about as many as the training rows,
    however much else was served on those days.

    Args:
        archive: Where served rows are.
        span: Files of its days may hold other rows.
        features: Columns to read beside those that name and date a row.
        scratch: Folder for what has to be fetched; nothing stays in it.

    Raises:
        ContractError: a file is damaged, or lacks a column.
        TemporaryError, PermanentError: it cannot be fetched; TemporaryError also if it changes meanwhile.
    """
    wanted = [each.info for each in archived_files(archive, days=span.days())]
    in_place = [path for each in wanted if (path := archive.local(each.name)) is not None]
    if len(in_place) == len(wanted):
        yield in_place
        return
    size = sum(each.size for each in wanted) / 1e6
    logger.info("served rows %s: %d files of %d days, %.1f MB", archive.uri, len(wanted), len(span.days()), size)
    with TemporaryDirectory(dir=scratch, prefix=".served-") as kept:
        files = []
        for number, (info, fetched) in enumerate(fetched_files(archive, wanted, Path(kept))):
            path = Path(kept, f"{number}.parquet")
            try:
                is_any = _write_batches(within(read_columns([fetched], features), span), path)
            except ContractError as error:
                raise ContractError(str(error).replace(str(fetched), f"{archive.uri}/{info.name}")) from error
            files += [path] if is_any else []
        yield files


def _write_batches(batches: Iterator[pa.RecordBatch], path: Path) -> bool:
    """Writes the rows to a Parquet file; if there are none, no file."""
    first = next(batches, None)
    if first is None:
        return False
    with pq.ParquetWriter(path, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
    return True


def span_of(files: Sequence[Path]) -> EventSpan | None:
    """From the oldest to the newest row of `files`; None without rows.

    Raises:
        ContractError: a file is not Parquet, or has no event times.
    """
    ends: list[datetime] = []
    for path in files:
        try:
            for batch in pq.ParquetFile(path).iter_batches(columns=[criteo.EVENT_TIME]):
                ends += [time for time in pc.min_max(batch.column(0)).as_py().values() if time is not None]
        except (pa.ArrowException, OSError, KeyError, IndexError) as error:
            raise ContractError(f"{path} has no event times: {first_line(error)}") from error
    return EventSpan(min(ends), max(ends)) if ends else None


def within(batches: Iterable[pa.RecordBatch], span: EventSpan) -> Iterator[pa.RecordBatch]:
    """The rows of `batches` in the span; empty batches are left out."""
    kind = pa.timestamp("us", tz="UTC")
    first, last = (pa.scalar(end.astimezone(timezone.utc), kind) for end in span)
    for batch in batches:
        times = batch.column(batch.schema.get_field_index(criteo.EVENT_TIME))
        kept = batch.filter(pc.and_(pc.greater_equal(times, first), pc.less_equal(times, last)))
        if kept.num_rows:
            yield kept


def read_columns(files: Sequence[Path], features: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of `files` in batches, in the raw types: request id, row, event time and `features`.

    Raises:
        ContractError: a file is damaged, or lacks a column or holds it in another type.
    """
    names = [criteo.REQUEST_ID, criteo.ROW, criteo.EVENT_TIME, *features]
    expected = arrow_schema({name: criteo.RAW_TYPES[name] for name in names})
    for path in files:
        with reading_parquet(path):
            file = pq.ParquetFile(path)
            for column in expected:
                found = file.schema_arrow.field(column.name).type if column.name in file.schema_arrow.names else None
                if found != column.type:
                    fault = "is missing" if found is None else f"is {found}"
                    raise ContractError(f"column {column.name} {fault} in {path}, expected {column.type}")
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=names):
                yield pa.RecordBatch.from_arrays([batch.column(name) for name in names], names)


# -- joining


def _join_files(
    training: Sequence[Path],
    served: Sequence[Path],
    span: EventSpan,
    scratch: Path,
    *,
    features: Sequence[str],
    part_rows: int,
) -> RowJoin:
    joined = RowJoin(features)
    sides = [read_columns(training, features), within(read_columns(served, features), span)]
    rows = sum(int(pq.read_metadata(path).num_rows) for path in (*training, *served))
    num_parts = max(1, -(-rows // part_rows))
    if num_parts == 1:
        joined.add(*(_make_table(list(side)) for side in sides))
        return joined
    with TemporaryDirectory(dir=scratch, prefix=".skew-") as folder:
        for number, side in enumerate(sides):
            _write_parts(side, num_parts, Path(folder, str(number)))
        for part in range(num_parts):
            joined.add(*(_read_part(Path(folder, str(number), f"{part}.arrow")) for number in range(len(sides))))
    return joined


def _write_parts(batches: Iterator[pa.RecordBatch], num_parts: int, folder: Path) -> None:
    """Writes each row to the file of the hash of its request id."""
    folder.mkdir()
    writers: dict[int, Any] = {}
    with ExitStack() as stack:
        for batch in batches:
            encoded = batch.column(0).dictionary_encode()
            hashes = [zlib.crc32(text.encode()) % num_parts for text in encoded.dictionary.to_pylist()]
            part_of = np.array(hashes, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]
            for part in np.unique(part_of).tolist():
                if part not in writers:
                    writers[part] = stack.enter_context(pa.ipc.new_file(str(folder / f"{part}.arrow"), batch.schema))
                writers[part].write_batch(batch.take(pa.array(np.flatnonzero(part_of == part))))


def _read_part(path: Path) -> pa.Table:
    if not path.exists():
        return _make_table([])
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    path.unlink()
    return table


def _make_table(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches) if batches else pa.table({})


@dataclass
class _FeatureDifferences:
    """What was seen of one feature on the joined rows."""

    differing: int = 0
    only_training: int = 0
    only_served: int = 0
    squares: float = 0.0
    """Sum over requests of (rows that differ)^2."""
    products: float = 0.0
    """Sum over requests of rows that differ times rows."""
    ratios: list[NDArray[np.float64]] = field(default_factory=list)
    """Training over served, if both are numbers and not zero; of the first rows that differ."""
    example: dict[str, Any] | None = None

    def factor(self) -> float | None:
        """The one factor between training and served values; None if there is none."""
        ratios = np.concatenate(self.ratios) if self.ratios else np.zeros(0)
        if not len(ratios):
            return None
        middle = float(np.median(ratios))
        return middle if np.isclose(ratios, middle, rtol=1e-3).mean() >= EQUAL_RATIOS else None


class RowJoin:
    """Compares parts of two sides; request ids of one part are in no other."""

    def __init__(self, features: Sequence[str]) -> None:
        """Nothing is compared yet."""
        self._differences = {name: _FeatureDifferences() for name in features}
        self.joined = self.only_training = self.only_served = 0
        self._requests = 0
        """Requests with a joined row."""
        self._square_sizes = 0.0

    def add(self, training: pa.Table, served: pa.Table) -> None:
        """Compares one part; a name that appears twice on a side counts once, by its first row."""
        if not training.num_rows or not served.num_rows:
            self.only_training += training.num_rows
            self.only_served += served.num_rows
            return
        of_training, of_served, requests = _join_names(training, served)
        self.joined += len(of_training)
        self.only_training += training.num_rows - len(of_training)
        self.only_served += served.num_rows - len(of_served)
        if not len(of_training):
            return
        _, group = np.unique(requests, return_inverse=True)
        sizes = np.bincount(group)
        self._requests += len(sizes)
        self._square_sizes += float((sizes.astype(np.float64) ** 2).sum())
        mine, theirs = training.take(pa.array(of_training)), served.take(pa.array(of_served))
        for name, differences in self._differences.items():
            _compare_values(name, mine, theirs, group=group, sizes=sizes, differences=differences)

    def interval(self, name: str) -> tuple[float, float] | None:
        """95 % interval of the share of rows in which the feature differs; None without joined rows.

        Wilson's, for as many independent rows as give the variance of the ratio over requests (Korn and Graubard,
        Confidence intervals for proportions with small expected number of positive counts, 1998); if all rows or none
        differ, for as many as there are requests.
        """
        if not self.joined:
            return None
        found, rows, requests = self._differences[name], self.joined, self._requests
        share = found.differing / rows
        effective = float(requests)
        if 0 < share < 1 and requests > 1:
            spread = found.squares - 2 * share * found.products + share**2 * self._square_sizes
            variance = max(spread, 0.0) / rows**2 * requests / (requests - 1)
            effective = min(float(rows), share * (1 - share) / variance) if variance > 0 else float(rows)
        return wilson_interval(share, effective)

    def entry(self, name: str, threshold: float) -> SkewEntry:
        """What was found of the feature; rows must have joined."""
        found, interval = self._differences[name], self.interval(name)
        assert interval is not None
        share = found.differing / self.joined
        return SkewEntry(
            feature=name,
            drifted=share > threshold,
            effect=share,
            effect_low=interval[0],
            effect_high=interval[1],
            threshold=threshold,
            num_rows=self.joined,
            differing=found.differing,
            only_training=found.only_training,
            only_served=found.only_served,
            factor=found.factor(),
            example=found.example,
        )


def _join_names(training: pa.Table, served: pa.Table) -> tuple[Any, Any, Any]:
    """Positions [n] in both tables of the rows that both have, in training's order, and a number per row's request."""
    ids = pa.concat_arrays(
        [chunk for table in (training, served) for chunk in table.column(criteo.REQUEST_ID).chunks]
    ).dictionary_encode()
    requests = ids.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    rows = np.concatenate([table.column(criteo.ROW).to_numpy() for table in (training, served)]).astype(np.int64)
    names = (requests << 32) | rows.astype(np.uint32).astype(np.int64)
    mine, first_mine = np.unique(names[: training.num_rows], return_index=True)
    theirs, first_theirs = np.unique(names[training.num_rows :], return_index=True)
    both, at_mine, at_theirs = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    of_training, of_served = first_mine[at_mine], first_theirs[at_theirs]
    order = np.argsort(of_training)
    return of_training[order], of_served[order], (both >> 32)[order]


def _compare_values(
    name: str, training: pa.Table, served: pa.Table, *, group: Any, sizes: Any, differences: _FeatureDifferences
) -> None:
    mine, theirs = _column_values(training, name), _column_values(served, name)
    is_dense = name in criteo.DENSE
    missing_mine, missing_theirs = (np.isnan(v) if is_dense else v == criteo.MISSING_CATEGORY for v in (mine, theirs))
    differs = (mine != theirs) & ~(missing_mine & missing_theirs)
    if not differs.any():
        return
    of_request = np.bincount(group, weights=differs, minlength=len(sizes))
    differences.differing += int(differs.sum())
    differences.only_training += int((differs & missing_theirs).sum())
    differences.only_served += int((differs & missing_mine).sum())
    differences.squares += float((of_request**2).sum())
    differences.products += float((of_request * sizes).sum())
    if differences.example is None:
        at = int(differs.argmax())
        names = {column: training.column(column)[at].as_py() for column in (criteo.REQUEST_ID, criteo.ROW)}
        values = {"training": _plain_value(name, mine[at]), "served": _plain_value(name, theirs[at])}
        differences.example = {**names, **values}
    if is_dense and sum(map(len, differences.ratios)) < MAX_RATIOS:
        both = differs & np.isfinite(mine) & np.isfinite(theirs) & (mine != 0) & (theirs != 0)
        differences.ratios.append(mine[both].astype(np.float64)[:MAX_RATIOS] / theirs[both][:MAX_RATIOS])


def _column_values(table: pa.Table, name: str) -> Any:
    kind, missing = ("float32", np.nan) if name in criteo.DENSE else ("int64", criteo.MISSING_CATEGORY)
    return table.column(name).cast(kind).fill_null(missing).to_numpy()


def _plain_value(name: str, value: Any) -> float | int | None:
    if name in criteo.CATEGORICAL:
        return None if value == criteo.MISSING_CATEGORY else int(value)
    return float(value) if math.isfinite(value) else None
