"""Measures one run's rows: statistics, anomalies, drift, click rate, skew. Judging is `judge`'s."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contracts.words import ShownValues, read_words
from components.storage.uris import local_path
from components.validation.drift import DriftEntry, LabelShift, measure_drift, measure_label_shift
from components.validation.quarantine import ScreenedRows, screen_rows
from components.validation.reference import ReferenceCounter
from components.validation.round import Champion, Round
from components.validation.schema import check_statistics, fitted_to, infer_schema, propose_schema
from components.validation.schema_versions import read_schema
from components.validation.skew import Skew, measure_skew
from components.validation.windows import WindowSummary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run's rows in numbers."""

    rows: ScreenedRows
    champion: Champion | None
    statistics: Any
    """TFDV's."""
    schema: Any
    """In force, with rules for features that it lacks; or inferred from these rows if there is none."""
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
    """None without a champion."""
    skew: Skew | None
    """None if no served rows were named."""
    shown: ShownValues
    """How the values of columns are named in reports."""


def measure(round_: Round, folder: Path) -> Measured:
    """Measures the rows that pass the rules about rows.

    `folder` is the step's while it is made.

    Raises:
        ContractError: a file cannot be read, or a feature is of another kind than in the champion's rows.
    """
    schema, proposal = read_schema(round_.schema_path) if round_.schema_path else None, None
    rows = screen_rows(round_, schema, folder)
    raw, settings, champion = rows.dataset, round_.rules.settings, round_.champion
    features = raw.recommender.features
    counter = ReferenceCounter(features, raw.excluded_columns)
    statistics = round_.summarize(rows.files, counter)
    window = counter.window(
        digest=raw.digest, first_event_time=raw.first_event_time, last_event_time=raw.last_event_time
    )
    logger.info("statistics of %d rows in %d files", window.rows, len(rows.files))
    excluded, factor = raw.excluded_columns, settings.range_factor
    if schema is None:
        schema = infer_schema(statistics, features, range_factor=factor, excluded=excluded)
    else:
        schema = fitted_to(schema, statistics, features, range_factor=factor, excluded=excluded)
        proposal = propose_schema(schema, statistics, raw)
    words = read_words(local_path(raw.words_uri)) if raw.words_uri else {}
    shown = ShownValues(words=words, hidden=raw.recommender.columns_of_users)
    drift, label, skew = [], None, None
    if champion is not None and window.rows:
        champion.windows.expect_kinds(features)
        drift = measure_drift(window, champion.windows, settings, shown=shown)
        label = measure_label_shift(window, champion.windows)
    if round_.served is not None:
        skew = measure_skew(
            rows.files,
            round_.served,
            features=features,
            settings=settings,
            excluded=raw.excluded_columns,
            shown=shown,
        )
    return Measured(
        rows=rows,
        champion=champion,
        statistics=statistics,
        schema=schema,
        proposal=proposal,
        anomalies=check_statistics(statistics, schema),
        counter=counter,
        window=window,
        drift=drift,
        label=label,
        skew=skew,
        shown=shown,
    )
