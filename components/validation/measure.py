"""Measures one run's rows: columns, statistics, anomalies, drift, click rate, skew. Judging is `judge`'s."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.storage.uris import local_path
from components.validation.drift import DriftEntry, LabelShift, measure_drift, measure_label_shift
from components.validation.inputs import ValidationRound
from components.validation.quarantine import ScreenedRows, screen_rows
from components.validation.reference import ReferenceCounter
from components.validation.rows import COLUMNS, ColumnCheck, check_columns, parquet_files, request_columns
from components.validation.schema import check_statistics, infer_schema, propose_schema
from components.validation.skew import Skew, measure_skew
from components.validation.tfdv_statistics import num_rows
from components.validation.windows import WindowSummary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run's rows in numbers."""

    rows: ScreenedRows
    columns: ColumnCheck
    excluded: frozenset[str]
    """Features that the run left out."""
    statistics: Any
    """TFDV's."""
    statistics_before: Any | None
    """TFDV's of the champion's rows; None without a champion."""
    schema: Any
    """In force, or inferred from these rows if there is none."""
    proposal: Any | None
    """What the schema in force would have to become for these rows; None if they fit, or none is in force."""
    anomalies: Any
    """TFDV's, of the statistics against the schema."""
    counter: ReferenceCounter
    """What the monitor and the next round need."""
    window: WindowSummary
    drift: list[DriftEntry]
    """Per feature; empty without a champion."""
    label: LabelShift | None
    """None without a champion, or if a column is faulty."""
    skew: Skew | None
    """None if no served rows were named, or a column is faulty."""


def measure(round_: ValidationRound, folder: Path) -> Measured:
    """Measures the rows that pass the rules about rows; faulty columns are passed over.

    Args:
        round_: The run's inputs.
        folder: The step's folder while it is made.
    """
    files = parquet_files(local_path(round_.raw.train_uri))
    columns = check_columns(round_.raw, files, round_.schema)
    rows = ScreenedRows(dataset=round_.raw, files=files)
    if not columns.faulty:
        rows = screen_rows(round_, files, folder)
    statistics, counter = _summarize_rows(round_, rows.files, columns)
    raw = rows.dataset
    window = counter.window(
        digest=raw.digest, first_event_time=raw.first_event_time, last_event_time=raw.last_event_time
    )
    factor, excluded, champion = round_.rules.settings.range_factor, round_.excluded, round_.champion
    schema, proposal = round_.schema, None
    if schema is None:
        schema = infer_schema(statistics, range_factor=factor, excluded=excluded)
    else:
        proposal = propose_schema(schema, statistics, columns.new, excluded=excluded)
    drift, label, skew = [], None, None
    if champion is not None and window.rows:
        drift = measure_drift(window, champion.windows, round_.rules.settings)
        label = None if columns.faulty else measure_label_shift(window, champion.windows)
    if round_.served is not None and not columns.faulty:
        skew = measure_skew(rows.files, round_.served, settings=round_.rules.settings, excluded=sorted(excluded))
    return Measured(
        rows=rows,
        columns=columns,
        excluded=excluded,
        statistics=statistics,
        statistics_before=round_.statistics_before,
        schema=schema,
        proposal=proposal,
        anomalies=check_statistics(statistics, schema),
        counter=counter,
        window=window,
        drift=drift,
        label=label,
        skew=skew,
    )


def _summarize_rows(
    round_: ValidationRound, files: Sequence[Path], columns: ColumnCheck
) -> tuple[Any, ReferenceCounter]:
    """TFDV's statistics of the rows, and what the monitor and the next round need; both without faulty columns."""
    faulty = {fault.column for fault in columns.faulty}
    names = [column for column in COLUMNS if column not in faulty]
    counter = ReferenceCounter(excluded=sorted(round_.excluded | faulty))
    statistics = round_.summarize(files, [*names, *request_columns(files)], [counter])
    logger.info("statistics of %d rows in %d files", num_rows(statistics), len(files))
    return statistics, counter
