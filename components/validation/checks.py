"""Check a run's measurements by the rules of `evergreen.config.validation`, in one loop.

Each function in `_OBSERVERS` yields observations for one or more rules, each with its value and its
limit. `apply_rules` gives every observation the action of its rule.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tensorflow_metadata.proto.v0 import anomalies_pb2

from components.validation.measure import LabelShift, Measured
from components.validation.schema import possible_shares
from components.validation.skew import Skew, SkewEntry
from components.validation.tfdv_statistics import ColumnStatistics
from evergreen.config.validation import (
    BLOCK,
    DATASET,
    DOMAIN,
    INFO,
    NOTIFY,
    OFF,
    QUARANTINE,
    RULES,
    ValidationSettings,
)
from evergreen.contracts import raw_rows
from evergreen.contracts.checks import AT_MOST, BELOW, FAIL, PASS, WARN, RuleCheck, worst_first
from evergreen.statistics.comparison import ColumnDrift

_CERTAIN_ROWS = 10
"""A column without values counts as changed if at least this number of values was expected. The
probability of no value by chance is then at most e^-10."""

_RESULT_OF_ACTION = {BLOCK: FAIL, QUARANTINE: WARN, WARN: WARN, NOTIFY: WARN, INFO: PASS}
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
class Observation:
    """Value that a rule measured in a column, before the rule's action is applied."""

    rule: str
    column: str
    """Name of the column, or `DATASET` if the value describes the table."""
    detail: str
    """One sentence without a final full stop."""
    value: float | None = None
    """Measured value that is compared with the limit. None if the value is undefined."""
    low: float | None = None
    """Lower end of the value's 95 % interval."""
    high: float | None = None
    limit: float | None = None
    bound: str = AT_MOST
    """How the value is compared with the limit, such as `at most`."""
    action: str | None = None
    """Action to use instead of the rule's own action. `info` means that nobody has to act."""
    num_quarantined: int = 0


Observations = Iterator[Observation]


def check(measured: Measured, rules: ValidationSettings) -> list[RuleCheck]:
    """Return the checks of all rules, the worst first.

    A rule has no check if the rule is off or had no data for a comparison.
    """
    observed = (each for observe in _OBSERVERS for each in observe(measured, rules))
    checks = apply_rules(observed, rules)
    seen = {check.rule for check in checks}
    passed = [
        RuleCheck(name=rule.replace("_", " "), rule=rule, result=PASS)
        for rule in RULES
        if rule not in seen and rules.action_of(rule) != OFF and _is_compared(rule, measured)
    ]
    return worst_first([*checks, *passed])


def apply_rules(observed: Iterable[Observation], rules: ValidationSettings) -> list[RuleCheck]:
    """Return one check per observation. If a rule is off, its observations give no check."""
    return [
        RuleCheck(
            name=f"{each.column}: {each.rule}",
            rule=each.rule,
            column=each.column,
            value=each.value,
            low=each.low,
            high=each.high,
            limit=each.limit,
            bound=each.bound,
            action=action,
            result=_RESULT_OF_ACTION[action],
            detail=each.detail,
            num_quarantined=each.num_quarantined,
        )
        for each in observed
        if rules.action_of(each.rule) != OFF
        for action in [each.action or rules.action_of(each.rule)]
    ]


def _is_compared(rule: str, measured: Measured) -> bool:
    """Return whether the rule had data for a comparison."""
    is_drift = rule in ("drift", "new_categories")
    return not (
        is_drift
        and not measured.drift
        or rule == "click_rate"
        and measured.label is None
        or rule == "skew"
        and measured.skew is None
        or rule in (DOMAIN, "quarantined_share")
        and measured.rows.num_outside is None
    )


# -- rows, columns and files


def _observe_rows(measured: Measured, rules: ValidationSettings) -> Observations:
    if not measured.statistics.num_rows:
        detail = "there are no training rows, expected at least 1"
        yield Observation(rule="no_rows", column=DATASET, detail=detail)


def _observe_columns(measured: Measured, rules: ValidationSettings) -> Observations:
    """Yield the lake's columns that are not in the schema or have another type."""
    known = {feature.name for feature in measured.schema.feature}
    for each in measured.rows.dataset.schema_mismatches:
        column, found_type, file = each["column"], each["arrow_type"], each["file"]
        if each["expected"] is not None:
            detail = f"column {column} is {found_type} in {file}, expected {each['expected']}"
            yield Observation(rule="column_retyped", column=column, detail=detail)
        elif column not in known:
            detail = (
                f"column {column} ({found_type}) of {file} is new: it is not in the schema and "
                "is not read"
            )
            yield Observation(rule="column_new", column=column, detail=detail)


def _observe_files(measured: Measured, rules: ValidationSettings) -> Observations:
    """Yield the files that extraction left out.

    For files that an earlier run already reported, the action is at most `info`.
    """
    raw = measured.rows.dataset
    for known in (False, True):
        if files := [each for each in raw.quarantined_files if each["known"] is known]:
            first, again = files[0], " again" if known else ""
            rows = "rows not known" if first["num_rows"] is None else f"{first['num_rows']} rows"
            detail = (
                f"{len(files)} files of the lake were left out{again}, because their rows cannot "
                f"be read; the first: {first['file']} ({rows}): {first['reason']}"
            )
            action = INFO if known else None
            yield Observation(
                rule="files_quarantined", column=DATASET, detail=detail, action=action
            )


def _observe_domain(measured: Measured, rules: ValidationSettings) -> Observations:
    """Yield the number of rows outside the schema's domain, and the share of quarantined rows."""
    rows, num_gone = measured.rows, measured.rows.dataset.num_quarantined
    if rows.num_outside is None:
        detail = f"rule {DOMAIN} found nothing to compare with: there is no schema yet"
        yield Observation(rule=DOMAIN, column=DATASET, detail=detail, action=INFO)
        return
    if not rows.num_outside:
        return
    num_gone = rows.num_outside if rows.quarantined else 0
    total = rows.dataset.num_train_rows + num_gone
    gone = (f", and {num_gone} of these rows are quarantined") if num_gone else ""
    detail = (
        f"{rows.num_outside} of {total} rows break rule {DOMAIN}{gone}; first: "
        f"{'; '.join(rows.examples)}"
    )
    yield Observation(rule=DOMAIN, column=DATASET, detail=detail, num_quarantined=num_gone)
    limit = rules.max_quarantined_fraction
    if num_gone > limit * total:
        detail = f"{num_gone} of {total} rows are quarantined, expected at most {limit:.2%}"
        yield Observation(
            rule="quarantined_share",
            column=DATASET,
            detail=detail,
            value=num_gone / total,
            limit=limit,
        )


def _observe_anomalies(measured: Measured, rules: ValidationSettings) -> Observations:
    """Yield TFDV's anomalies, each with its rule.

    Anomalies are left out if another rule reports the same problem in more detail. If the low share
    of rows with a value may be due to chance, the action is at most `info`.
    """
    columns = measured.statistics.columns
    wanted = {feature.name: feature for feature in measured.schema.feature}
    for name, anomaly in sorted(measured.anomalies.anomaly_info.items()):
        for reason in anomaly.reason:
            kind = anomalies_pb2.AnomalyInfo.Type.Name(reason.type)
            if kind in _COVERED_BY_RULES or name in measured.rows.dataset.excluded_columns:
                continue
            rule = (
                "label_invalid" if name == raw_rows.LABEL else _RULE_OF_ANOMALY.get(kind, "anomaly")
            )
            detail = f"{name}: {reason.short_description}. {reason.description}".strip()
            is_share = kind == "FEATURE_TYPE_LOW_FRACTION_PRESENT" and name != raw_rows.LABEL
            is_chance = is_share and _may_be_chance(
                columns.get(name), wanted[name].presence.min_fraction
            )
            detail += (" With so few rows, the cause may be chance.") if is_chance else ""
            action = INFO if is_chance else None
            yield Observation(rule=rule, column=name, detail=detail.rstrip("."), action=action)


def _may_be_chance(column: ColumnStatistics | None, min_fraction: float) -> bool:
    if column is None or not column.num_rows:
        return False
    _, highest = possible_shares(column.num_values / column.num_rows, column.num_rows)
    return highest >= min_fraction


# -- values


def _observe_label(measured: Measured, rules: ValidationSettings) -> Observations:
    """Yield an observation if the label is missing in all rows, or equal in all rows."""
    rows = measured.statistics.num_rows
    if not rows:
        return
    label = measured.statistics.columns[raw_rows.LABEL]
    if not label.num_values:
        detail = f"label is missing in all {rows} rows"
        yield Observation(rule="label_invalid", column=raw_rows.LABEL, detail=detail)
    elif label.least == label.most:
        detail = (
            f"label is {label.least:g} in all {rows} rows, expected both classes, because a "
            "model cannot be trained on one class"
        )
        yield Observation(rule="label_one_class", column=raw_rows.LABEL, detail=detail)


def _observe_empty_columns(measured: Measured, rules: ValidationSettings) -> Observations:
    """Yield features without any value."""
    rows, champion = measured.statistics.num_rows, measured.champion
    dataset, now = measured.rows.dataset, measured.statistics.columns
    before = champion.statistics.columns if champion is not None else {}
    names = dataset.recommender.features.names if rows else ()
    for name in names:
        if name in dataset.excluded_columns or now[name].num_values:
            continue
        if champion is None:
            detail = f"{name} has no value in any of {rows} rows"
            yield Observation(rule="column_empty_by_chance", column=name, detail=detail)
        else:
            yield _empty_column(name, before.get(name), rows=rows, schema=measured.schema)


def _empty_column(
    name: str, before: ColumnStatistics | None, *, rows: int, schema: Any
) -> Observation:
    """Return the observation of a column without a value.

    The observation's detail compares the column with the champion's rows.
    """
    rule, detail = "column_empty", f"{name} has no value in any of {rows} rows"
    if before is None or not before.num_values:
        return Observation(rule=rule, column=name, detail=f"{detail}, as before", action=INFO)
    expected = before.num_values * rows / before.num_rows
    detail += (
        f"; earlier, {before.num_values} of {before.num_rows} rows had values, so "
        f"{expected:.0f} values were expected"
    )
    required = {f.name for f in schema.feature if f.presence.min_count or f.presence.min_fraction}
    if name not in required:
        detail += "; the column is optional in the schema"
        return Observation(rule=rule, column=name, detail=detail, action=INFO)
    rule = rule if expected >= _CERTAIN_ROWS else "column_empty_by_chance"
    return Observation(rule=rule, column=name, detail=detail)


def observe_click_rate(label: LabelShift | None, rules: ValidationSettings) -> Observations:
    """Yield an observation if the click rate differs from the click rate of the earlier windows.

    The click rate must differ from the click rate of the merged windows and from the click rate of
    the newest window. Each of the two changes must be larger than the factor `click_rate_factor`
    and statistically significant.
    """
    if label is None:
        return
    factor, level = rules.click_rate_factor, rules.false_discovery_rate
    for side in (label, label.newest):
        if side is None:
            continue
        is_inside = side.rate_before / factor <= side.rate_now <= side.rate_before * factor
        if is_inside or side.p_value is None or side.p_value > level:
            return
    detail = (
        f"the share of clicks is {label.rate_now:.2%}, was {label.rate_before:.2%} (change "
        f"{label.low:+.2%} to {label.high:+.2%}): look for labels that have not arrived"
    )
    yield Observation(
        rule="click_rate",
        column=raw_rows.LABEL,
        detail=detail,
        value=label.difference,
        low=label.low,
        high=label.high,
    )


# -- drift and skew


def observe_drift(drift: list[ColumnDrift], rules: ValidationSettings) -> Observations:
    """Yield the features that drifted or have unusually many new categories.

    The feature with the smallest q-value comes first.
    """
    for entry in sorted(
        drift,
        key=lambda each: (1.0 if each.q_value is None else each.q_value, -(each.effect or 0.0)),
    ):
        name, new = entry.feature, entry.new_value_share
        if entry.drifted or entry.is_trained_on:
            detail = (
                f"{name} drifted: {_describe_change(entry)}"
                if entry.drifted
                else (
                    f"{name} differs from the earlier windows, and so does the champion's "
                    f"newest window: {_describe_change(entry)}"
                )
            )
            yield Observation(
                rule="drift",
                column=name,
                detail=detail,
                value=entry.effect,
                low=entry.effect_low,
                high=entry.effect_high,
                limit=entry.threshold,
                bound=BELOW,
                action=None if entry.drifted else INFO,
            )
        if new is not None and new > rules.new_value_share:
            detail = (
                f"at least {new:.1%} of the rows have a category of {name} that the champion "
                "was not trained on"
            )
            limit = rules.new_value_share
            yield Observation(
                rule="new_categories", column=name, detail=detail, value=new, limit=limit
            )


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
            f"{value} went from {moved.share_before:.1%} to {moved.share_now:.1%} (change "
            f"{interval}, threshold {threshold:.4f})"
        )
    if moved or entry.new_value_share is not None:
        return f"the shares of many values changed (divergence {entry.divergence:.4f} bits)"
    return f"divergence {effect:.4f} bits ({interval}, threshold {threshold:.4f})"


def observe_skew(skew: Skew | None, rules: ValidationSettings) -> Observations:
    """Yield features that differ between training and served rows, the largest difference first."""
    if skew is None:
        return
    if unread := skew.facts.unread:
        detail = (
            f"{len(unread)} files of served rows cannot be read and were not compared; the "
            f"first: {unread[0]}"
        )
        # Every run of these days finds the same files, so every run would send a notification.
        action = WARN if rules.action_of("files_quarantined") == NOTIFY else None
        yield Observation(rule="files_quarantined", column=DATASET, detail=detail, action=action)
    if not skew.entries:
        detail = (
            f"only {skew.facts.num_joined} training rows were found in {skew.facts.served_uri}: "
            "nothing was compared"
        )
        yield Observation(rule="skew", column=DATASET, detail=detail, action=INFO)
    for entry in sorted(skew.entries, key=lambda entry: -entry.effect):
        if entry.drifted:
            yield Observation(
                rule="skew",
                column=entry.feature,
                detail=_describe_skew(entry),
                value=entry.effect,
                limit=entry.threshold,
            )


def _describe_skew(entry: SkewEntry) -> str:
    text = (
        f"{entry.feature} differs from the served value in {entry.differing:,} of "
        f"{entry.num_rows:,} joined rows, {entry.effect:.2%}"
    )
    if entry.factor is not None:
        text += f"; the training value is {entry.factor:.4g} times the served value"
    elif entry.only_training == entry.differing:
        text += "; served rows lack the value"
    elif entry.only_served == entry.differing:
        text += "; training rows lack the value"
    if row := entry.example:
        text += (
            f"; in row {row['row']} of request {row['request_id']}, the training value is "
            f"{_format_value(row['training'])}"
        )
        text += f" and the served value is {_format_value(row['served'])}"
    return text


def _format_value(value: float | str | None) -> str:
    return (
        "no value" if value is None else f"{value:.7g}" if isinstance(value, float) else str(value)
    )


_OBSERVERS: tuple[Callable[[Measured, ValidationSettings], Observations], ...] = (
    _observe_rows,
    _observe_columns,
    _observe_files,
    _observe_domain,
    _observe_anomalies,
    _observe_label,
    _observe_empty_columns,
    lambda measured, rules: observe_click_rate(measured.label, rules),
    lambda measured, rules: observe_drift(measured.drift, rules),
    lambda measured, rules: observe_skew(measured.skew, rules),
)
"""Functions that yield observations. Checks with the same result are reported in the order of these
functions."""
