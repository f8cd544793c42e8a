"""Train/serve skew: what the model is trained on beside what it was served.

The training rows are compared with the archived rows that were served in the same span of time. Rows that were trained
on and served under one name (request_id, row) are compared value by value: a feature that differs there differs for
certain, whatever its distribution looks like. Values are the same if they are the same bits, except for the sign of
zero; two missing values are the same. If fewer than `MIN_JOINED` rows join, nothing is compared. Labels never are: what
is served has no label yet.

The served rows of the span are kept in a scratch folder; both sides are joined in parts, by a hash of the request id.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
from components.drift_statistics.clustered import Clustered, correlations, own_designs
from components.drift_statistics.effects import wilson_interval
from components.runtime.errors import ContractError
from components.storage.locations import open_objects
from components.storage.objects import Objects
from components.storage.uris import is_bucket_uri, local_path
from components.store.archived_rows import archived_files, arrow_schema
from components.validation.rows import BATCH_ROWS, reading_parquet
from components.validation.settings import ValidationSettings

logger = logging.getLogger(__name__)

MIN_JOINED = 100
"""Fewest joined rows that are judged."""
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
    """What was found."""

    facts: ServedRowFacts
    entries: tuple[SkewEntry, ...] = ()
    """Per feature; empty if too few rows joined."""


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
        scratch: Folder for the served rows of the span and for parts; nothing stays in it.
        settings: How large a difference must be to matter.
        excluded: Features that the run left out; not compared.
        part_rows: See `PART_ROWS`.

    Raises:
        ContractError: a file on either side lacks a column or holds it in another type.
        TemporaryError, PermanentError: the archive's bucket cannot be read.
    """
    features = [name for name in criteo.FEATURES if name not in excluded]
    span, joined = span_of(training), RowJoin(features)
    if span is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=scratch, prefix=".skew-") as folder:
            served = keep_served(archive, span, features, Path(folder, "served.parquet"))
            _join_files(joined, training, served, Path(folder), features=features, part_rows=part_rows)
        logger.info("joined %d training rows with served ones; %d had none", joined.joined, joined.only_training)
    facts = ServedRowFacts(
        served_uri=archive.uri,
        first_event_time=span.first.isoformat() if span else None,
        last_event_time=span.last.isoformat() if span else None,
        num_joined=joined.joined,
        num_only_training=joined.only_training,
        num_only_served=joined.only_served,
    )
    compared = features if joined.joined >= MIN_JOINED else []
    return Skew(facts=facts, entries=tuple(joined.entry(name, settings.skew_share) for name in compared))


# -- reading both sides


def keep_served(archive: Objects, span: EventSpan, features: Sequence[str], path: Path) -> Path:
    """Writes the archived rows of the span, oldest day first, as the Parquet file `path`, which it returns.

    About as many rows as training has, however much else was served on those days.

    Args:
        archive: Where served rows are.
        span: Files of its days may hold other rows.
        features: Columns to keep beside those that name and date a row.
        path: A new file.

    Raises:
        ContractError: a file is damaged, or lacks a column or holds it in another type.
        TemporaryError, PermanentError: a file cannot be fetched.
    """
    with pq.ParquetWriter(path, arrow_schema(_column_types(features))) as writer:
        for archived in archived_files(archive, days=span.days()):
            with archived.opened() as file:
                for batch in _batches_of(file, archived.uri, features):
                    times = batch.column(criteo.EVENT_TIME)
                    writer.write_batch(
                        batch.filter(pc.and_(pc.greater_equal(times, span.first), pc.less_equal(times, span.last)))
                    )
    return path


def span_of(files: Sequence[Path]) -> EventSpan | None:
    """From the oldest to the newest row of `files`; None without rows.

    Raises:
        ContractError: a file is damaged or has no event times.
    """
    ends = [pc.min_max(batch.column(criteo.EVENT_TIME)).as_py() for batch in read_columns(files, [])]
    times = [time for end in ends for time in end.values() if time is not None]
    return EventSpan(min(times), max(times)) if times else None


def read_columns(files: Sequence[Path], features: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of `files` in batches, in the raw types: request id, row, event time and `features`.

    Raises:
        ContractError: a file is damaged, or lacks a column or holds it in another type.
    """
    for path in files:
        with reading_parquet(path), pq.ParquetFile(path) as file:
            yield from _batches_of(file, str(path), features)


def _batches_of(file: pq.ParquetFile, origin: str, features: Sequence[str]) -> Iterator[pa.RecordBatch]:
    found, expected = file.schema_arrow, arrow_schema(_column_types(features))
    for column in expected:
        kind = found.field(column.name).type if column.name in found.names else None
        if kind != column.type:
            fault = "is missing" if kind is None else f"is {kind}"
            raise ContractError(f"column {column.name} {fault} in {origin}, expected {column.type}")
    for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=expected.names):
        yield pa.RecordBatch.from_arrays([batch.column(name) for name in expected.names], expected.names)


def _column_types(features: Sequence[str]) -> dict[str, str]:
    names = (criteo.REQUEST_ID, criteo.ROW, criteo.EVENT_TIME, *features)
    return {name: criteo.RAW_TYPES[name] for name in names}


# -- joining


def _join_files(
    joined: RowJoin,
    training: Sequence[Path],
    served: Path,
    scratch: Path,
    *,
    features: Sequence[str],
    part_rows: int,
) -> None:
    sides = [training, [served]]
    rows = sum(int(pq.read_metadata(path).num_rows) for side in sides for path in side)
    num_parts = max(1, -(-rows // part_rows))
    folders = [scratch / "training", scratch / "served"]
    for side, folder in zip(sides, folders):
        _write_parts(read_columns(side, features), num_parts, folder)
    for part in range(num_parts):
        joined.add(*(_read_part(folder / f"{part}.arrow") for folder in folders))


def _write_parts(batches: Iterator[pa.RecordBatch], num_parts: int, folder: Path) -> None:
    """Writes each row to the file of the hash of its request id."""
    folder.mkdir()
    writers: dict[int, Any] = {}
    with ExitStack() as stack:
        for batch in batches:
            encoded = batch.column(criteo.REQUEST_ID).dictionary_encode()
            hashes = [zlib.crc32(text.encode()) % num_parts for text in encoded.dictionary.to_pylist()]
            part_of = np.array(hashes, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]
            for part in np.unique(part_of).tolist():
                if part not in writers:
                    writers[part] = stack.enter_context(pa.ipc.new_file(str(folder / f"{part}.arrow"), batch.schema))
                writers[part].write_batch(batch.take(pa.array(np.flatnonzero(part_of == part))))


def _read_part(path: Path) -> pa.Table:
    if not path.exists():
        return pa.table({})
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    path.unlink()
    return table


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
        self._square_sizes = 0

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
        self._square_sizes += int((sizes**2).sum())
        mine, theirs = training.take(pa.array(of_training)), served.take(pa.array(of_served))
        for name, differences in self._differences.items():
            _compare_values(name, mine, theirs, group=group, sizes=sizes, differences=differences)

    def interval(self, name: str) -> tuple[float, float]:
        """95 % interval of the share of rows in which the feature differs; rows must have joined.

        Wilson's, for as many independent rows as the joined ones are worth, whose requests may differ together (Korn
        and Graubard, Confidence intervals for proportions with small expected number of positive counts, 1998).
        """
        found = self._differences[name]
        sample = Clustered(
            counts=np.array([found.differing]),
            squares=np.array([found.squares]),
            products=np.array([found.products]),
            rows=self.joined,
            sizes=self._square_sizes,
            requests=self._requests,
        )
        correlation, _ = correlations((sample,))
        design, _ = own_designs(correlation, sample, sample)
        return wilson_interval(found.differing / self.joined, self.joined / float(design[0]))

    def entry(self, name: str, threshold: float) -> SkewEntry:
        """What was found of the feature; rows must have joined."""
        found, (low, high) = self._differences[name], self.interval(name)
        share = found.differing / self.joined
        return SkewEntry(
            feature=name,
            drifted=share > threshold,
            effect=share,
            effect_low=low,
            effect_high=high,
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
