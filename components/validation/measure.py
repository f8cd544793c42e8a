"""Measure a run's rows: statistics, anomalies, drift, click rate and skew.

The rows are compared with all windows of the champion's lineage, merged into one
(`evergreen.statistics.comparison`). If the champion was already trained on a change, the change is
not reported. A change counts as trained under two conditions. The champion's newest window is large
enough to show the change, and the run's rows do not differ from that window.

A model's folder contains the profiles of two windows (`manifests.Model.WINDOWS`): the newest
window, and all older windows merged into one. Each profile has at most 2 MB.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from components.validation.quarantine import ScreenedRows
from components.validation.schema import check_schema
from components.validation.skew import Skew, measure_skew
from components.validation.tfdv_statistics import TableStatistics, read_statistics
from evergreen.config.features import Features
from evergreen.config.validation import ValidationSettings
from evergreen.contracts.category_texts import ShownValues
from evergreen.contracts.manifests import Model
from evergreen.runtime.errors import ContractError
from evergreen.statistics.column_profile import TableProfile
from evergreen.statistics.comparison import ColumnDrift, compare_tables, compare_totals
from evergreen.statistics.profile_counter import ProfileCounter
from evergreen.statistics.profile_files import read_profiles, write_profiles
from evergreen.storage.objects import Objects

logger = logging.getLogger(__name__)

_KIND, _FORMAT_VERSION = "TrainingWindows", 1


# -- earlier windows


@dataclass(frozen=True)
class LineageWindows:
    """Windows of the rows on which a lineage was trained, oldest first.

    Older windows may be merged into one.
    """

    windows: tuple[TableProfile, ...]

    @cached_property
    def merged(self) -> TableProfile:
        """All windows of the lineage, merged into one."""
        return reduce(TableProfile.__add__, self.windows)

    @property
    def newest(self) -> TableProfile:
        """Window on which the model itself was trained."""
        return self.windows[-1]

    def followed_by(self, window: TableProfile) -> "LineageWindows":
        """Return these windows followed by `window`. Earlier windows are merged into one.

        The new window replaces the newest one if both have the same rows.
        """
        before = self.windows
        if before and window.digest and before[-1].digest == window.digest:
            before = before[:-1]
        return LineageWindows((LineageWindows(before).merged, window) if before else (window,))

    def expect_kinds(self, features: Features) -> None:
        """Refuse features that cannot be compared.

        Raises:
            ContractError: A feature is numeric now and was categorical in these windows, or the
                other way round.
        """
        for name, column in self.merged.columns.items():
            if name in (
                features.numeric
                if column.values is not None
                else features.categorical + features.lists
            ):
                now, before = (
                    ("numeric", "categorical")
                    if column.values is not None
                    else ("categorical", "numeric")
                )
                raise ContractError(
                    f"feature {name} is {now}, and was {before} in the champion's rows: give "
                    "it a new name"
                )

    def write(self, path: Path) -> None:
        """Write the windows to a file, completely or not at all."""
        write_profiles(path, self.windows, kind=_KIND, version=_FORMAT_VERSION)


def read_windows(path: Path) -> LineageWindows:
    """Return the windows in a file.

    Raises:
        ContractError: The file is absent or corrupt, or has another kind, format version or bucket
            edges.
    """
    return LineageWindows(read_profiles(path, kind=_KIND, version=_FORMAT_VERSION)[0])


@dataclass(frozen=True, kw_only=True)
class Champion:
    """Champion with the statistics of its training rows, from its folder in the model registry."""

    folder: Path
    statistics: TableStatistics
    """TFDV's statistics of the window on which the champion itself was trained."""
    windows: LineageWindows
    """Profiles of all windows in the champion's lineage."""


def read_champion(folder: Path) -> Champion:
    """Read the champion whose model is in `folder`.

    Raises:
        ContractError: The champion's statistics or windows are absent or corrupt.
    """
    return Champion(
        folder=folder,
        statistics=read_statistics(folder / Model.STATISTICS),
        windows=read_windows(folder / Model.WINDOWS),
    )


# -- measurements


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
    statistics: TableStatistics
    schema: Any
    """Schema in force, with additional rules for new features. If no schema is in force, this is
    the schema inferred from the rows."""
    proposal: Any | None
    """Proposed schema that these rows would satisfy. None if the rows satisfy the schema in force,
    or if no schema is in force."""
    anomalies: Any
    """Anomalies that TFDV found when it checked the statistics against the schema."""
    counter: ProfileCounter
    """Counter of the training rows. The monitor and the next run use its counts."""
    window: TableProfile
    drift: list[ColumnDrift]
    """One drift entry for each feature. The list is empty if there is no champion."""
    label: LabelShift | None
    """Change of the click rate against the champion. None if there is no champion."""
    skew: Skew | None
    """Differences between training rows and served rows. None if the run has no served rows."""
    shown: ShownValues
    """Names of the categories in reports."""


def measure(
    rows: ScreenedRows,
    *,
    schema: Any | None,
    champion: Champion | None,
    settings: ValidationSettings,
    served: Objects | None,
    summarize: Callable[..., TableStatistics],
    shown: ShownValues,
) -> Measured:
    """Measure the rows that passed the screening.

    Args:
        rows: The rows.
        schema: The schema in force. None means that the schema is inferred from the rows.
        champion: The model to compare with, or None.
        settings: Thresholds of the measurements.
        served: Archive of served rows, for the comparison. None means no comparison.
        summarize: Function that computes TFDV's statistics of files (`summarize_files`).
        shown: Names of the categories in reports.

    Raises:
        ContractError: A file cannot be read, or a feature is of another kind than in the champion's
            rows.
    """
    raw = rows.dataset
    features = raw.recommender.features
    counter = ProfileCounter(features, raw.excluded_columns)
    statistics = summarize(rows.files, counter)
    window = counter.profile(
        digest=raw.digest,
        first_event_time=raw.first_event_time,
        last_event_time=raw.last_event_time,
    )
    logger.info("statistics of %d rows in %d files", window.rows, len(rows.files))
    checked = check_schema(schema, statistics, raw, range_factor=settings.range_factor)
    drift, label, skew = [], None, None
    if champion is not None and window.rows:
        champion.windows.expect_kinds(features)
        drift = measure_drift(window, champion.windows, settings, shown=shown)
        label = measure_label_shift(window, champion.windows)
    if served is not None:
        skew = measure_skew(
            rows.files,
            served,
            features=features,
            settings=settings,
            excluded=raw.excluded_columns,
            shown=shown,
        )
    return Measured(
        rows=rows,
        champion=champion,
        statistics=statistics,
        schema=checked.schema,
        proposal=checked.proposal,
        anomalies=checked.anomalies,
        counter=counter,
        window=window,
        drift=drift,
        label=label,
        skew=skew,
        shown=shown,
    )


# -- drift


def measure_drift(
    now: TableProfile, windows: LineageWindows, settings: ValidationSettings, *, shown: ShownValues
) -> list[ColumnDrift]:
    """Return one drift entry for each feature that both sides have, in column order.

    `windows` must contain at least one window.
    """
    mean, newest = settings.mean_drift, {}
    compared = compare_tables(now, windows.merged, settings, mean_drift=mean, shown=shown)
    if len(windows.windows) > 1:
        newest = compare_tables(now, windows.newest, settings, mean_drift=mean, shown=shown)
    return [
        column.entry(name, is_trained_on=name in newest and column.is_trained_on(newest[name]))
        for name, column in compared.items()
    ]


def measure_label_shift(now: TableProfile, windows: LineageWindows) -> LabelShift | None:
    """Return the change of the click rate, or None if a side has no rows.

    A lower click rate often means that not all labels have arrived. `checks` decides whether the
    change is reported.
    """
    newest = _compare_click_rates(now, windows.newest) if len(windows.windows) > 1 else None
    return _compare_click_rates(now, windows.merged, newest)


def _compare_click_rates(
    now: TableProfile, before: TableProfile, newest: LabelShift | None = None
) -> LabelShift | None:
    change = compare_totals(now.clicks, before.clicks, (now, before))
    if change.effect is None:
        return None
    return LabelShift(
        rate_now=now.clicks.rows / now.rows,
        rate_before=before.clicks.rows / before.rows,
        difference=change.effect.value,
        low=change.effect.low,
        high=change.effect.high,
        p_value=change.p_value,
        design_effect=change.design,
        num_rows_now=now.rows,
        num_rows_before=before.rows,
        newest=newest,
    )
