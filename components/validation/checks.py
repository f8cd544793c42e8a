"""Measure a run's rows and check them by all rules.

The measurements are statistics, anomalies, drift, click rate and skew.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorflow_metadata.proto.v0 import anomalies_pb2

from components.validation.drift import LabelShift, measure_drift, measure_label_shift
from components.validation.findings import Finding, find
from components.validation.quarantine import ScreenedRows, screen_rows
from components.validation.round import Champion, Round
from components.validation.schema import (
    check_statistics,
    fitted_to,
    infer_schema,
    possible_shares,
    propose_schema,
)
from components.validation.schema_versions import read_schema
from components.validation.skew import Skew, SkewEntry, measure_skew
from components.validation.tfdv_statistics import by_feature, num_missing, num_rows, num_values
from evergreen.config.validation import BLOCK, DATASET, INFO, NOTIFY, WARN, ValidationSettings
from evergreen.contracts import raw_rows
from evergreen.contracts.checks import BELOW
from evergreen.contracts.words import ShownValues, read_words
from evergreen.statistics.column_profile import TableProfile
from evergreen.statistics.comparison import ColumnDrift
from evergreen.statistics.profile_counter import ProfileCounter
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

_CERTAIN_ROWS = 10
"""Expected number of rows at which their absence is no longer attributed to chance (probability
e^-10)."""

_COVERED_BY_RULES = ("FEATURE_TYPE_NOT_PRESENT", "SCHEMA_MISSING_COLUMN")
_RULE_OF_ANOMALY = {
    **dict.fromkeys(
        (
            "UNEXPECTED_DATA_TYPE",
            "FLOAT_TYPE_NOT_FLOAT",
            "FLOAT_TYPE_STRING_NOT_FLOAT",
            "INT_TYPE_INT_EXPECTED",
        ),
        "value_type",
    ),
    **dict.fromkeys(
        (
            *(
                "FLOAT_TYPE_BIG_FLOAT",
                "FLOAT_TYPE_SMALL_FLOAT",
                "FLOAT_TYPE_HAS_NAN",
                "FLOAT_TYPE_HAS_INF",
            ),
            *("INT_TYPE_BIG_INT", "INT_TYPE_SMALL_INT", "ENUM_TYPE_UNEXPECTED_STRING_VALUES"),
        ),
        "range",
    ),
    **dict.fromkeys(
        ("FEATURE_TYPE_LOW_FRACTION_PRESENT", "FEATURE_TYPE_LOW_NUMBER_PRESENT"), "presence"
    ),
    "SCHEMA_NEW_COLUMN": "column_new",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one run's rows."""

    rows: ScreenedRows
    champion: Champion | None
    statistics: Any
    """TFDV's statistics."""
    schema: Any
    """Schema in force with added rules for new features. Without a schema in force, the schema
    inferred from these rows."""
    proposal: Any | None
    """Schema that these rows would satisfy. None if they satisfy the schema in force, or if there
    is no schema in force."""
    anomalies: Any
    """TFDV's anomalies of the statistics against the schema."""
    counter: ProfileCounter
    """Counts for the monitor and for the next run."""
    window: TableProfile
    drift: list[ColumnDrift]
    """One entry per feature. Empty without a champion."""
    label: LabelShift | None
    """Change of the click rate. None without a champion."""
    skew: Skew | None
    """Differences from the served rows. None if no served rows were named."""
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
    schema, proposal = read_schema(round_.schema_path) if round_.schema_path else None, None
    rows = screen_rows(round_, schema, folder)
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


def check(measured: Measured, rules: ValidationSettings) -> list[Finding]:
    """Return the findings of all checks, ordered by severity, worst first."""
    findings = [finding for each in _CHECKS for finding in each(measured, rules)]
    return sorted(findings, key=lambda finding: (BLOCK, WARN, INFO).index(finding.severity))


def _check_rows(measured: Measured, rules: ValidationSettings) -> list[Finding]:
    if num_rows(measured.statistics):
        return []
    return find(rules, "no_rows", DATASET, text="there are no training rows, expected at least 1")


def _check_columns(measured: Measured, rules: ValidationSettings) -> list[Finding]:
    """Find columns of the lake's files that have another type or are not in the schema."""
    found: list[Finding] = []
    known = {feature.name for feature in measured.schema.feature}
    for each in measured.rows.dataset.schema_mismatches:
        column, found_type, file = each["column"], each["arrow_type"], each["file"]
        if each["expected"] is not None:
            text = f"column {column} is {found_type} in {file}, expected {each['expected']}"
            found += find(rules, "column_retyped", column, text=text)
        elif column not in known:
            text = (
                f"column {column} ({found_type}) of {file} is new: it is not in the schema and "
                "is not read"
            )
            found += find(rules, "column_new", column, text=text)
    return found


def _check_files(measured: Measured, rules: ValidationSettings) -> list[Finding]:
    """Find the files that extraction left out.

    Files that an earlier run named are only reported.
    """
    raw, found = measured.rows.dataset, list[Finding]()
    for known in (False, True):
        if files := [each for each in raw.quarantined_files if each["known"] is known]:
            rows = (
                f"{files[0]['num_rows']} rows"
                if files[0]["num_rows"] is not None
                else "rows not known"
            )
            again = " again" if known else ""
            text = (
                f"{len(files)} files of the lake were left out{again}, because their rows cannot "
                "be read; the first: "
                f"{files[0]['file']} ({rows}): {files[0]['reason']}"
            )
            found += find(
                rules, "files_quarantined", DATASET, text=text, at_most=INFO if known else None
            )
    return found


def _check_anomalies(measured: Measured, rules: ValidationSettings) -> list[Finding]:
    """Return TFDV's anomalies as findings, each with its rule.

    Anomalies that another rule explains better are left out. If too few rows have a value in a
    column, and the difference may be chance, the finding is only `info`.
    """
    found: list[Finding] = []
    features, wanted = (
        by_feature(measured.statistics),
        {feature.name: feature for feature in measured.schema.feature},
    )
    for name, anomaly in sorted(measured.anomalies.anomaly_info.items()):
        for reason in anomaly.reason:
            kind = anomalies_pb2.AnomalyInfo.Type.Name(reason.type)
            if kind in _COVERED_BY_RULES or name in measured.rows.dataset.excluded_columns:
                continue
            rule = (
                "label_invalid" if name == raw_rows.LABEL else _RULE_OF_ANOMALY.get(kind, "anomaly")
            )
            text = f"{name}: {reason.short_description}. {reason.description}".strip()
            is_share = kind == "FEATURE_TYPE_LOW_FRACTION_PRESENT" and name != raw_rows.LABEL
            is_chance = is_share and _may_be_chance(
                features.get(name), wanted[name].presence.min_fraction
            )
            text += " In so few rows that may be chance." if is_chance else ""
            found += find(
                rules, rule, name, text=text, kind="anomaly", at_most=INFO if is_chance else None
            )
    return found


def _may_be_chance(feature: Any, min_fraction: float) -> bool:
    present, rows = num_values(feature), num_values(feature) + num_missing(feature)
    return rows > 0 and possible_shares(present / rows, rows)[1] >= min_fraction


# -- values


def _check_label(measured: Measured, rules: ValidationSettings) -> list[Finding]:
    """Find labels that are missing in all rows, or of one class."""
    rows = num_rows(measured.statistics)
    if not rows:
        return []
    label = by_feature(measured.statistics)[raw_rows.LABEL]
    if not num_values(label):
        return find(
            rules, "label_invalid", raw_rows.LABEL, text=f"label is missing in all {rows} rows"
        )
    numbers = label.num_stats
    if numbers.min == numbers.max:
        text = (
            f"label is {numbers.min:g} in all {rows} rows, expected both classes: nothing can "
            "be learned from them"
        )
        return find(rules, "label_one_class", raw_rows.LABEL, text=text)
    return []


def _check_empty_columns(measured: Measured, rules: ValidationSettings) -> list[Finding]:
    """Find features without any value."""
    rows = num_rows(measured.statistics)
    if not rows:
        return []
    dataset, found = measured.rows.dataset, list[Finding]()
    now, before = by_feature(measured.statistics), {}
    if measured.champion is not None:
        before = by_feature(measured.champion.statistics)
    names = [
        name for name in dataset.recommender.features.names if name not in dataset.excluded_columns
    ]
    for name in names:
        if num_values(now[name]):
            continue
        if measured.champion is None:
            text = f"{name} has no value in any of {rows} rows"
            found += find(rules, "column_empty_by_chance", name, text=text)
        else:
            found += _check_empty_column(
                name, before.get(name), rules, rows=rows, schema=measured.schema
            )
    return found


def _check_empty_column(
    name: str, before: Any, rules: ValidationSettings, *, rows: int, schema: Any
) -> list[Finding]:
    known, rows_before = num_values(before), num_values(before) + num_missing(before)
    text = f"{name} has no value in any of {rows} rows"
    if not known:
        return find(rules, "column_empty", name, text=f"{text}, as before", at_most=INFO)
    expected = known * rows / rows_before
    text += f", had values in {known} of {rows_before} rows before: {expected:.0f} were expected"
    required = {f.name for f in schema.feature if f.presence.min_count or f.presence.min_fraction}
    if name not in required:
        return find(
            rules, "column_empty", name, text=f"{text}; the schema calls it optional", at_most=INFO
        )
    return find(
        rules,
        "column_empty" if expected >= _CERTAIN_ROWS else "column_empty_by_chance",
        name,
        text=text,
    )


def check_click_rate(label: LabelShift | None, rules: ValidationSettings) -> list[Finding]:
    """Find a click rate that differs from the earlier windows.

    The click rate must differ from the merged windows and from the newest window. Both differences
    must exceed the factor, and be larger than chance explains.
    """
    if label is None:
        return []
    factor, level = rules.click_rate_factor, rules.false_discovery_rate
    for side in (label, label.newest):
        if side is None:
            continue
        is_inside = side.rate_before / factor <= side.rate_now <= side.rate_before * factor
        if is_inside or side.p_value is None or side.p_value > level:
            return []
    text = (
        f"the share of clicks is {label.rate_now:.2%}, was {label.rate_before:.2%} (change "
        f"{label.low:+.2%} "
        f"to {label.high:+.2%}): look for labels that have not arrived"
    )
    numbers = {"value": label.difference, "low": label.low, "high": label.high}
    return find(rules, "click_rate", raw_rows.LABEL, text=text, numbers=numbers)


# -- drift and skew


def check_drift(drift: list[ColumnDrift], rules: ValidationSettings) -> list[Finding]:
    """Find drifted features and unusually many new categories, the smallest q-value first."""
    found: list[Finding] = []
    for entry in sorted(
        drift,
        key=lambda each: (1.0 if each.q_value is None else each.q_value, -(each.effect or 0.0)),
    ):
        name, new = entry.feature, entry.new_value_share
        numbers: dict[str, Any] = {
            "value": entry.effect,
            "low": entry.effect_low,
            "high": entry.effect_high,
        }
        numbers |= {"limit": entry.threshold, "bound": BELOW}
        if entry.drifted:
            found += find(
                rules,
                "drift",
                name,
                text=f"{name} drifted: {_describe_change(entry)}",
                kind="drift",
                numbers=numbers,
            )
        elif entry.learned:
            text = (
                f"{name} differs from earlier windows as the champion's newest one does: "
                f"{_describe_change(entry)}"
            )
            found += find(
                rules, "drift", name, text=text, kind="drift", at_most=INFO, numbers=numbers
            )
        if new is not None and new > rules.new_value_share:
            text = (
                f"{name} has categories that the champion never saw in at least {new:.1%} of "
                "the rows"
            )
            numbers = {"value": new, "limit": rules.new_value_share}
            found += find(rules, "new_categories", name, text=text, kind="drift", numbers=numbers)
    return found


def _describe_change(entry: ColumnDrift) -> str:
    parts = []
    if "values" in entry.changes:
        parts.append(_describe_values(entry))
    if "mean" in entry.changes:
        shift = entry.mean_shift
        parts.append(
            "its mean moved"
            if shift is None
            else f"its mean moved by {shift:+.2f} standard deviations"
        )
    if "missing" in entry.changes:
        parts.append(
            f"missing in {entry.missing_now:.1%} of the rows, was in {entry.missing_before:.1%}"
        )
    return f"{'; '.join(parts)} (q = {entry.q_value:.2g})"


def _describe_values(entry: ColumnDrift) -> str:
    effect, threshold = entry.effect, entry.threshold
    assert effect is not None
    assert threshold is not None
    interval, moved = f"{entry.effect_low:.4f} to {entry.effect_high:.4f}", entry.moved_value
    if moved and effect >= threshold:
        value = "a user" if moved.value is None else f"value {moved.value}"
        return (
            f"{value} went from {moved.share_before:.1%} to {moved.share_now:.1%} "
            f"(change {interval}, matters from {threshold:.4f})"
        )
    if moved or entry.new_value_share is not None:
        return f"many of its values changed their shares (divergence {entry.divergence:.4f} bits)"
    return f"divergence {effect:.4f} bits ({interval}, matters from {threshold:.4f})"


def check_skew(skew: Skew | None, rules: ValidationSettings) -> list[Finding]:
    """Find features that differ between training and served rows, the largest difference first."""
    if skew is None:
        return []
    found: list[Finding] = []
    if unread := skew.facts.unread:
        text = (
            f"{len(unread)} files of served rows cannot be read and were not compared; the "
            f"first: {unread[0]}"
        )
        # Every run of these days finds the same files, so every run would send a notification.
        at_most = WARN if rules.action_of("files_quarantined") == NOTIFY else None
        found += find(rules, "files_quarantined", DATASET, text=text, at_most=at_most)
    if not skew.entries:
        text = (
            f"only {skew.facts.num_joined} training rows were found in {skew.facts.served_uri}: "
            "nothing was compared"
        )
        return found + find(rules, "skew", DATASET, text=text, kind="skew", at_most=INFO)
    for entry in sorted(skew.entries, key=lambda entry: -entry.effect):
        if entry.drifted:
            text, numbers = _describe_skew(entry), {"value": entry.effect, "limit": entry.threshold}
            found += find(rules, "skew", entry.feature, text=text, kind="skew", numbers=numbers)
    return found


def _describe_skew(entry: SkewEntry) -> str:
    text = (
        f"{entry.feature} is not what was served in {entry.differing:,} of {entry.num_rows:,} "
        "joined rows, "
        f"{entry.effect:.2%}"
    )
    if entry.factor is not None:
        text += f"; training has {entry.factor:.4g} times the served value"
    elif entry.only_training == entry.differing:
        text += "; served rows lack the value"
    elif entry.only_served == entry.differing:
        text += "; training rows lack the value"
    if row := entry.example:
        text += (
            f"; in row {row['row']} of request {row['request_id']} training has "
            f"{_format_value(row['training'])}"
        )
        text += f", served was {_format_value(row['served'])}"
    return text


def _format_value(value: float | str | None) -> str:
    return (
        "no value" if value is None else f"{value:.7g}" if isinstance(value, float) else str(value)
    )


_CHECKS: tuple[Callable[[Measured, ValidationSettings], Sequence[Finding]], ...] = (
    _check_rows,
    _check_columns,
    _check_files,
    lambda measured, rules: measured.rows.findings,
    _check_anomalies,
    _check_label,
    _check_empty_columns,
    lambda measured, rules: check_click_rate(measured.label, rules),
    lambda measured, rules: check_drift(measured.drift, rules),
    lambda measured, rules: check_skew(measured.skew, rules),
)
"""The table of checks. `quarantine` checks single rows while it separates them."""
