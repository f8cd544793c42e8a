"""Test a recommender's file on some rows, before the rows are ingested.

The trial shows what `ingest` would do, and describes the rows. The trial reads the rows with the
reader and the rules of `ingest`. All rows are counted. Results that need values (categories,
repeated rows, leaks) are computed from the first `SAMPLE_ROWS` rows. The trial writes nothing.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from evergreen.config.data import OWN_COLUMNS
from evergreen.config.extraction import ExtractionSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.raw_rows import EVENT_TIME, LABEL, REQUEST_ID, ROW
from evergreen.recommender_file.columns import (
    DECIDING_AUC,
    MAX_BYTES,
    SAMPLE_ROWS,
    Coder,
    RepeatedKeys,
    SampledColumn,
    counted,
    deciding_auc,
    find_copies,
)
from evergreen.rows.forms import FileReader, click_log_files, find_reader, passed_over
from evergreen.rows.lines import LineCounts
from evergreen.rows.raw_schema import MalformedRows
from evergreen.rows.time_forms import USUAL, find_form
from evergreen.rows.times import DAY_MICROS, to_iso
from evergreen.runtime.errors import ContractError

_NUM_EXAMPLES = 3
"""Number of malformed rows that are shown."""
_NEWEST_SHARE = 0.1
"""Share of all rows that are treated as the newest. The categories of the newest rows are compared
with those of all other rows."""


@dataclass(frozen=True, kw_only=True)
class TriedFeature:
    """Result for one feature in the sampled rows."""

    name: str
    kind: str
    """`numeric`, `categorical` or `lists`."""
    distinct: int
    """Number of distinct values, or of distinct lists."""
    missing: float
    """Share of the rows without a value."""
    auc: float | None
    """AUC of the column alone (see `deciding_auc`). None if there are too few rows."""
    new_share: float | None
    """Share of rows with a new category, among the newest tenth of the rows. A category is new if
    it does not occur in earlier rows. None if the feature is not categorical."""

    @property
    def is_constant(self) -> bool:
        """Return whether the column has at most one distinct value."""
        return self.distinct <= 1

    @property
    def is_leak(self) -> bool:
        """Return whether the column alone predicts the label almost perfectly."""
        return self.auc is not None and self.auc > DECIDING_AUC


@dataclass(kw_only=True)
class TriedFile:
    """Result for one file."""

    path: Path
    counts: LineCounts
    """Counts of the file's lines by kind. In a Parquet file, only rows and rejected rows are
    counted."""
    time_form: str | None
    """Time format of the file. None if the file has no times."""
    is_text: bool
    refusal: str | None = None
    """Error with which `ingest` would stop at this file, or None."""


@dataclass(kw_only=True)
class Trial:
    """Result of a trial: what `ingest` would do with some files."""

    files: list[TriedFile]
    passed_over: list[str]
    """Names of the files in the folder that are not click logs."""
    rows: int = 0
    clicks: int = 0
    malformed: int = 0
    examples: list[str] = field(default_factory=list)
    """First malformed rows, with line and reason."""
    days: Counter[int] = field(default_factory=Counter)
    """Number of rows on each UTC day. Days are counted since 1970."""
    span: tuple[int, int] | None = None
    """Times of the oldest and the newest row, in microseconds since 1970. None if the rows have no
    times."""
    num_sampled: int = 0
    """Number of rows in the sample. The following fields are computed from the sample."""
    features: list[TriedFeature] = field(default_factory=list)
    users: int | None = None
    """Number of distinct users. None if the setting `data.user` is empty."""
    items: int | None = None
    equal_rows: int = 0
    """Rows that are equal to an earlier row in every column."""
    changed_labels: int = 0
    """Rows without a request id that are equal to an earlier row in every column except the
    label."""
    copies: RepeatedKeys | None = None
    """Counts of rows whose key occurs in another row. None if the files have no column with request
    ids, or no column with row numbers."""
    refusals: list[str] = field(default_factory=list)
    """Reasons why `ingest` would refuse the files."""

    @property
    def is_refused(self) -> bool:
        """Return whether `ingest` would refuse at least one of the files."""
        return bool(self.refusals)

    @property
    def has_times(self) -> bool:
        """Return whether every file has event times."""
        return all(
            file.time_form is not None
            for file in self.files
            if file.refusal is None and file.counts.rows
        )


def try_rows(
    data: Path,
    recommender: Recommender,
    *,
    now: float | None = None,
    sample_rows: int = SAMPLE_ROWS,
) -> Trial:
    """Read a file or a folder of rows in the same way as `ingest`, and return the findings.

    Args:
        data: The file or folder.
        recommender: Recommender of the rows.
        now: Current time in seconds since 1970, to find rows in the future. None = the machine's
            clock.
        sample_rows: Maximum number of rows in the sample from which some results are computed.

    Raises:
        ContractError: There is no file of rows.
    """
    trial = Trial(files=[], passed_over=passed_over(data))
    collector = _ValueCollector(recommender, trial, sample_rows)
    limit = recommender.section("extraction", ExtractionSettings).max_malformed_fraction
    with tempfile.TemporaryDirectory(prefix="trial.") as folder:
        kept = Path(folder) / "malformed_rows.jsonl"
        with MalformedRows(kept, max_fraction=limit) as malformed:
            for path in click_log_files(data):
                _try_file(path, collector, malformed, now=time.time() if now is None else now)
            try:
                malformed.check()
            except ContractError as error:
                if str(error) not in trial.refusals:
                    trial.refusals.append(str(error))
        trial.malformed = malformed.num_rows
        if trial.malformed:
            with open(kept, encoding="utf-8") as lines:
                rows = [json.loads(line) for line in islice(lines, _NUM_EXAMPLES)]
            trial.examples = [
                f"{Path(row['file']).name}, line {row['line']}: {row['reason']}" for row in rows
            ]
    if not trial.rows and not trial.refusals:
        trial.refusals.append(f"{data} holds no row, expected some")
    collector.finish(limit)
    return trial


def _try_file(
    path: Path, collector: "_ValueCollector", malformed: MalformedRows, *, now: float
) -> None:
    trial, recommender = collector.trial, collector.recommender
    file = TriedFile(
        path=path, counts=LineCounts(), time_form=None, is_text=path.suffix != ".parquet"
    )
    trial.files.append(file)
    try:
        reader = find_reader(path, recommender, now=now)
        file.counts = reader.counts
        file.time_form = _time_form(reader, recommender, now=now)
        for batch in reader.batches(malformed):
            collector.add(batch)
    except ContractError as error:
        file.refusal = str(error)
        trial.refusals.append(str(error))


def _time_form(reader: Any, recommender: Recommender, *, now: float) -> str | None:
    """Return the time format of a reader: the setting, or the format of its first rows."""
    if not reader.has_times:
        return None
    if not isinstance(reader, FileReader):
        return "iso"
    if recommender.data.time_format is not None:
        return recommender.data.time_format
    name = reader.columns[EVENT_TIME]
    for chunk in reader.rows.chunks([name]):
        if chunk.rows.num_rows:
            return find_form(chunk.rows.column(name), now=now, name=f"{reader.path}: {name}")
    return "iso"


class _ValueCollector:
    """Collector of the values in the rows, from which the results of the trial are computed."""

    def __init__(self, recommender: Recommender, trial: Trial, sample_rows: int) -> None:
        self.recommender, self.trial, self._left = recommender, trial, sample_rows
        self._coders: dict[str, Coder] = {}

    def add(self, batch: Any) -> None:
        """Add rows in the lake's schema."""
        trial = self.trial
        trial.rows += batch.num_rows
        trial.clicks += pc.sum(batch.column(LABEL)).as_py() or 0
        times = batch.column(EVENT_TIME).cast(pa.int64()).drop_null()
        if len(times):
            micros = times.to_numpy()
            days, numbers = np.unique(micros // DAY_MICROS, return_counts=True)
            trial.days.update(dict(zip(days.tolist(), numbers.tolist())))
            first, last = trial.span or (int(micros.min()), int(micros.max()))
            trial.span = min(first, int(micros.min())), max(last, int(micros.max()))
        taken = batch.slice(0, self._left)
        self._left -= taken.num_rows
        trial.num_sampled += taken.num_rows
        for name in taken.schema.names if taken.num_rows else ():
            self._coders.setdefault(name, Coder()).add(taken.column(name))
        if sum(coder.num_bytes for coder in self._coders.values()) > MAX_BYTES:
            self._left = 0

    def finish(self, limit: float) -> None:
        """Compute the results that depend on the values of the sampled rows.

        Args:
            limit: Maximum share of rows whose key may occur in another row.
        """
        trial, features = self.trial, self.recommender.features
        if not trial.num_sampled:
            return
        columns = {name: coder.column(name) for name, coder in self._coders.items()}
        labels = columns[LABEL].row_values(columns[LABEL].labels, np.int8(-1))
        is_new = self._newest(columns[EVENT_TIME])
        for kind in ("numeric", "categorical", "lists"):
            for name in getattr(features, kind):
                column = columns[name]
                trial.features.append(
                    TriedFeature(
                        name=name,
                        kind=kind,
                        distinct=column.distinct,
                        missing=column.missing,
                        auc=deciding_auc(column, labels),
                        new_share=_new_share(column, is_new) if kind == "categorical" else None,
                    )
                )
        data = self.recommender.data
        trial.users = None if data.user is None else columns[data.user].distinct
        trial.items = None if data.item is None else columns[data.item].distinct
        content = [columns[name] for name in features.names]
        given = [
            columns[name] for name in OWN_COLUMNS if name in columns and columns[name].num_present
        ]
        trial.equal_rows = find_copies([*given, *content], []).num_copies
        if not columns[REQUEST_ID].num_present:
            but_label = [column for column in given if column is not columns[LABEL]]
            trial.changed_labels = (
                find_copies([*but_label, *content], []).num_copies - trial.equal_rows
            )
        key = [columns[name] for name in (REQUEST_ID, ROW)]
        if all(column.num_present for column in key):
            trial.copies = find_copies(key, content)
            if trial.copies.num_conflicting > limit * trial.num_sampled:
                trial.refusals.append(
                    f"{counted(trial.copies.num_conflicting, 'row')} of {trial.num_sampled:,} have "
                    "the "
                    f"{data.request_id} and {data.row} of another row, with other features, "
                    "expected at most "
                    f"{limit:.2%}"
                )

    @staticmethod
    def _newest(times: SampledColumn) -> NDArray[np.bool_]:
        """Return which rows are the newest tenth by time, or by order if there are no times."""
        rank = np.arange(times.num_rows)
        if times.num_present:
            micros = times.values.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_numpy()
            rank = np.argsort(np.argsort(times.row_values(micros, 0), kind="stable"))
        found: NDArray[np.bool_] = rank >= (1 - _NEWEST_SHARE) * times.num_rows
        return found


def _new_share(column: SampledColumn, is_new: NDArray[np.bool_]) -> float:
    known = np.zeros(len(column.values) + 1, bool)
    known[column.groups[~is_new] + 1] = True
    known[0] = True  # a missing value is not a category
    return float((~known[column.groups[is_new] + 1]).mean()) if is_new.any() else 0.0


def sentences(trial: Trial) -> Iterator[str]:
    """Yield the results of a trial as lines of text for people."""
    for file in trial.files:
        yield from _of_file(file)
    if trial.passed_over:
        yield f"skipped files that are not click logs: {', '.join(trial.passed_over)}"
    yield (
        f"{counted(trial.rows, 'row')} kept, {trial.malformed:,} "
        f"malformed{':' if trial.examples else ''}"
    )
    yield from (f"  {example}" for example in trial.examples)
    if trial.rows:
        yield f"{trial.clicks / trial.rows:.2%} clicks ({trial.clicks:,})"
    yield from _of_times(trial)
    if trial.num_sampled < trial.rows:
        yield f"by the first {trial.num_sampled:,} rows:"
    for number, what in ((trial.users, "user"), (trial.items, "item")):
        if number is not None:
            yield counted(number, what)
    yield from _of_copies(trial)
    for feature in trial.features:
        yield _of_feature(feature)
    if leaks := [feature for feature in trial.features if feature.is_leak]:
        names = ", ".join(f"{feature.name} (AUC {feature.auc:.3f})" for feature in leaks)
        yield f"WARNING: alone determines the label, so was it known before the click? {names}"
    yield from (f"ingest would refuse: {refusal}" for refusal in trial.refusals)


def _of_file(file: TriedFile) -> Iterator[str]:
    counts = file.counts
    if file.is_text and not (file.refusal and not counts.lines):
        parts = [
            f"{counts.rows:,} rows",
            f"{counts.rejected:,} rejected",
            f"{counts.blank:,} blank",
        ]
        parts.append(f"{counts.header:,} header")
        parts += [f"{counts.comments:,} comments"] if counts.comments else []
        parts += [f"{counts.continued:,} continued"] if counts.continued else []
        yield f"{file.path}: {counted(counts.lines, 'line')} = {' + '.join(parts)}"
    else:
        yield f"{file.path}: {counted(counts.rows, 'row')}, {counts.rejected:,} rejected"
    if file.time_form is not None:
        yield f"  times are read as {file.time_form}"


def _of_times(trial: Trial) -> Iterator[str]:
    if trial.span is None:
        if trial.rows:
            yield (
                "no times: `evergreen data ingest` needs --last-day and --days, over which the "
                "rows are spread"
            )
        return
    first, last = (to_iso(micros)[:10] for micros in trial.span)
    num_rows = sum(trial.days.values())
    yield (
        f"{first} to {last}, {counted(len(trial.days), 'day')} with rows, "
        f"{round(num_rows / len(trial.days)):,} rows a day"
    )
    if trial.span[0] < USUAL:
        yield "WARNING: some times are before 2000: if they are wrong, set data.time_format"
    if not trial.has_times:
        yield "WARNING: some files have times and some have none"


def _of_copies(trial: Trial) -> Iterator[str]:
    if trial.equal_rows:
        yield f"{counted(trial.equal_rows, 'row')} equal to an earlier one in every column"
    if trial.changed_labels:
        yield (
            f"{counted(trial.changed_labels, 'row')} equal to an earlier one except for the label: "
            "if the later rows are copies of the earlier rows with the click added, name the "
            "columns that identify a row, data.request_id and data.row"
        )
    if trial.copies is not None and trial.copies.num_copies:
        yield (
            f"{counted(trial.copies.num_copies, 'row')} with the key of another one, "
            f"{trial.copies.num_conflicting:,} "
            "of them with other features: the last one is used"
        )


def _of_feature(feature: TriedFeature) -> str:
    what = {"numeric": "value", "categorical": "category", "lists": "list"}[feature.kind]
    plural = {"category": "categories"}.get(what, f"{what}s")
    parts = [f"{feature.distinct:,} {what if feature.distinct == 1 else plural}"]
    if feature.missing:
        parts.append(f"{feature.missing:.1%} missing")
    if feature.new_share:
        parts.append(f"{feature.new_share:.1%} of the newest tenth of rows have a new one")
    if feature.is_constant:
        parts.append("the same in all rows, so there is nothing to learn")
    return f"  {feature.name}: {', '.join(parts)}"
