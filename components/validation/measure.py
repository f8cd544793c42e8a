"""Measure a run's rows: statistics, anomalies, drift, click rate and skew.

The rows are compared with all windows of the champion's lineage, merged into one
(`evergreen.statistics.comparison`). A change is not reported if the champion was already trained on
it. A champion counts as trained on a change if its newest window is large enough to show the change
but does not differ from these rows.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.validation.quarantine import ScreenedRows, screen_rows
from components.validation.round import Champion, Round
from components.validation.schema import check_statistics, fitted_to, infer_schema, propose_schema
from components.validation.skew import Skew, measure_skew
from components.validation.windows import KeptWindows
from evergreen.config.validation import ValidationSettings
from evergreen.contracts.words import ShownValues
from evergreen.statistics.column_profile import TableProfile
from evergreen.statistics.comparison import ColumnDrift, compare_tables, design_of_totals
from evergreen.statistics.profile_counter import ProfileCounter
from evergreen.statistics.two_sample import proportion, share_change

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LabelShift:
    """Change of the click rate.

    Rows of the same request are correlated. The interval and the p-value therefore use a smaller
    effective number of rows.
    """

    rate_now: float
    rate_before: float
    difference: float
    low: float
    high: float
    """Upper end of the difference's 95 % interval."""
    p_value: float | None
    design_effect: float
    num_rows_now: int
    num_rows_before: int
    newest: "LabelShift | None" = None
    """Change of the click rate against the champion's newest window. None if the champion was
    trained on a single window."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one run's rows."""

    rows: ScreenedRows
    champion: Champion | None
    statistics: Any
    """TFDV's statistics."""
    schema: Any
    """Schema in force, with additional rules for new features. If no schema is in force, this is
    the schema inferred from the rows."""
    proposal: Any | None
    """Proposed schema that these rows would satisfy. None if the rows satisfy the schema in force,
    or if no schema is in force."""
    anomalies: Any
    """Anomalies that TFDV found when it checked the statistics against the schema."""
    counter: ProfileCounter
    """Counts for the monitor and for the next run."""
    window: TableProfile
    drift: list[ColumnDrift]
    """One drift entry for each feature. The list is empty if there is no champion."""
    label: LabelShift | None
    """Change of the click rate against the champion. None if there is no champion."""
    skew: Skew | None
    """Differences between training rows and served rows. None if the run has no served rows."""
    shown: ShownValues
    """Names of the categories in reports."""


def measure(round_: Round, folder: Path) -> Measured:
    """Measure the rows that pass the rule about single rows.

    Args:
        round_: The run's inputs.
        folder: The step's folder, which is not complete yet.

    Raises:
        ContractError: A file cannot be read, or a feature is of another kind than in the champion's
            rows.
    """
    schema, proposal, shown = round_.schema, None, round_.shown
    rows = screen_rows(round_, folder)
    raw, settings, champion = rows.dataset, round_.rules, round_.champion
    features = raw.recommender.features
    counter = ProfileCounter(features, raw.excluded_columns)
    statistics = round_.summarize(rows.files, counter)
    window = counter.profile(
        digest=raw.digest,
        first_event_time=raw.first_event_time,
        last_event_time=raw.last_event_time,
    )
    logger.info("statistics of %d rows in %d files", window.rows, len(rows.files))
    excluded, factor = raw.excluded_columns, settings.range_factor
    if schema is None:
        schema = infer_schema(statistics, features, range_factor=factor, excluded=excluded)
    else:
        schema = fitted_to(schema, statistics, features, range_factor=factor, excluded=excluded)
        proposal = propose_schema(schema, statistics, raw)
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


# -- drift


def measure_drift(
    now: TableProfile, kept: KeptWindows, settings: ValidationSettings, *, shown: ShownValues
) -> list[ColumnDrift]:
    """Return one drift entry for each feature that both sides have, in column order.

    `kept` must contain at least one window.
    """
    mean, newest = settings.mean_drift, {}
    compared = compare_tables(now, kept.merged, settings, mean_drift=mean, shown=shown)
    if len(kept.windows) > 1:
        newest = compare_tables(now, kept.newest, settings, mean_drift=mean, shown=shown)
    return [
        column.entry(name, learned=name in newest and column.learned_by(newest[name]))
        for name, column in compared.items()
    ]


def measure_label_shift(now: TableProfile, kept: KeptWindows) -> LabelShift | None:
    """Return the change of the click rate, or None if a side has no rows.

    A lower click rate often means that not all labels have arrived. `checks` decides whether the
    change is reported.
    """
    newest = _compare_click_rates(now, kept.newest) if len(kept.windows) > 1 else None
    return _compare_click_rates(now, kept.merged, newest)


def _compare_click_rates(
    now: TableProfile, before: TableProfile, newest: LabelShift | None = None
) -> LabelShift | None:
    n, m = now.rows, before.rows
    if not n or not m:
        return None
    design = design_of_totals(now.clicks, before.clicks, (now, before))
    effect = share_change(now.clicks.rows, n, b=before.clicks.rows, m=m, design=design)
    assert effect is not None
    return LabelShift(
        rate_now=now.clicks.rows / n,
        rate_before=before.clicks.rows / m,
        difference=effect.value,
        low=effect.low,
        high=effect.high,
        p_value=proportion(now.clicks.rows, n, b=before.clicks.rows, m=m, design=design),
        design_effect=design,
        num_rows_now=n,
        num_rows_before=m,
        newest=newest,
    )
