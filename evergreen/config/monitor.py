"""The section `monitor`: the rows to compare, the meaning of drift, and when a run is requested.

The settings of each concern have a class. In a recommender's file they are one flat list.
"""

from dataclasses import dataclass
from typing import Any, get_type_hints

from evergreen.config.reader import flat_settings, nearest, read_mapping
from evergreen.config.release import BakingSettings
from evergreen.config.spec import Recommender
from evergreen.runtime.errors import ContractError, expect

_MAX_GRACE_BUCKETS = 8
"""Limit of the grace period. At this limit ten buckets of three versions are open at a time, which
is the most that the drift watch holds."""
_MIN_DECIDE_SECONDS = 0.001
POLICY_NAMES = ("threshold", "sequential", "data_drift", "schedule")
"""Names of the policies in `monitoring.policies.policies`, in the same order."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Which rows the policies evaluate, and how often."""

    window_rows: int = 20_000
    """Number of the newest matured rows of each model version from which the KPIs are computed."""
    attribution_window_seconds: float = 1800.0
    """Time after a prediction in which a click counts, in seconds. The label is final
    afterwards."""
    decide_seconds: float = 10.0
    """Event time between two decision points, in seconds. Decision points are its multiples."""
    drift_grace_seconds: float = 60.0
    """Grace period for late predictions, in seconds. A bucket of features, and the decision about
    which version serves, wait for it."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "window_rows")
        expect(self, "at most 10,000,000", lambda value: value <= 10**7, "window_rows")
        expect(
            self,
            "at least 0",
            lambda value: value >= 0,
            "attribution_window_seconds",
            "drift_grace_seconds",
        )
        rule = f"at least {_MIN_DECIDE_SECONDS}"
        expect(self, rule, lambda value: value >= _MIN_DECIDE_SECONDS, "decide_seconds")


def policy_names(text: str) -> list[str]:
    """Return the policies in a comma-separated list.

    Raises:
        ContractError: a name is unknown or given twice, or there is none.

    >>> policy_names("threshold, schedule")
    ['threshold', 'schedule']
    """
    names = split_names(text)
    if set(names) - set(POLICY_NAMES) or len(set(names)) < len(names):
        raise ContractError(
            f"policies is {text!r}, expected some of {', '.join(POLICY_NAMES)}, by commas, each "
            "once"
        )
    return names


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated list, unchecked."""
    return [name.strip() for name in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Which policies decide, and their thresholds.

    Settings of policies that are not named have no effect.
    """

    policies: str = "sequential"
    """Comma-separated names of threshold, sequential, data_drift, schedule. A run is requested if
    any policy decides to retrain, and the first such policy gives the reason."""
    notify_only: str = ""
    """Comma-separated policies whose confirmed drift only notifies people and starts no run, such
    as `data_drift`."""
    min_clicks: int = 200
    """Minimum clicks, and minimum rows without a click, of a window that is evaluated."""
    consecutive_breaches: int = 3
    """Consecutive breaches, at most one per decision point, that confirm a drift."""
    min_rows_since_breach: int = 0
    """Minimum rows that must mature after the first breach, so that the run can train on rows from
    after the change."""
    auc_threshold: float = 0.0
    """AUC threshold of the windows. A breach is a 95 % interval that is completely below it. 0 =
    not set. Policy threshold needs a value, because it depends on the task."""
    sequential_alpha: float = 0.01
    """Maximum probability of a false alarm between two changes, over all time and over all versions
    released meanwhile."""
    sequential_tolerance: float = 0.02
    """Maximum AUC below the gate's interval that is not drift. It allows for differences between
    the served rows and the gate's rows."""
    drift_buckets: int = 3
    """Consecutive drifted buckets that confirm a data drift."""
    drift_columns: int = 1
    """Minimum drifted columns of a drifted bucket."""
    max_serving_seconds: float = 7 * 86_400.0
    """Maximum serving time of a version in seconds. Policy schedule then requests a run."""

    def __post_init__(self) -> None:
        if self.notify_only and not set(split_names(self.notify_only)) <= set(POLICY_NAMES):
            raise ContractError(
                f"notify_only is {self.notify_only!r}, expected some of {', '.join(POLICY_NAMES)}, "
                "by commas"
            )
        if "threshold" in policy_names(self.policies) and not self.auc_threshold:
            raise ContractError(
                f"policies is {self.policies!r} without auc_threshold, expected an AUC for policy "
                "threshold, which depends on the task; policy sequential needs none"
            )
        counts = ("min_clicks", "consecutive_breaches", "drift_buckets", "drift_columns")
        expect(self, "at least 1", lambda value: value >= 1, *counts)
        expect(self, "at least 0", lambda value: value >= 0, "min_rows_since_breach")
        expect(
            self,
            "at most 1,000,000,000",
            lambda value: value <= 10**9,
            *counts,
            "min_rows_since_breach",
        )
        expect(self, "inside (0, 1)", lambda value: 0.0 < value < 1.0, "sequential_alpha")
        expect(self, "in [0, 1)", lambda value: 0.0 <= value < 1.0, "auc_threshold")
        expect(self, "in [0, 0.5)", lambda value: 0.0 <= value < 0.5, "sequential_tolerance")
        expect(self, "above 0", lambda value: value > 0, "max_serving_seconds")


@dataclass(frozen=True, kw_only=True)
class RateLimitSettings:
    """How often a run may be requested."""

    cooldown_seconds: float = 3600.0
    """Pause after a released run, in seconds."""
    failure_backoff_seconds: float = 900.0
    """Pause after a run that failed or was refused, in seconds. It doubles with each consecutive
    one, up to a day."""
    daily_budget: int = 4
    """Maximum requests in any 24 hours."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "daily_budget")
        expect(self, "at most 10,000", lambda value: value <= 10_000, "daily_budget")
        expect(self, "at least 0", lambda value: value >= 0, "cooldown_seconds")
        expect(self, "above 0", lambda value: value > 0, "failure_backoff_seconds")


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """When a run starts from scratch."""

    full_every_releases: int = 0
    """Number of releases after which the next run is a full one. 0 = this rule is off."""
    full_after_refusals: int = 0
    """Consecutive refused incremental runs after which the next run is full. 0 = this rule is
    off."""

    def __post_init__(self) -> None:
        expect(
            self,
            "at least 0",
            lambda value: value >= 0,
            "full_every_releases",
            "full_after_refusals",
        )
        expect(
            self,
            "at most 1,000,000",
            lambda value: value <= 10**6,
            "full_every_releases",
            "full_after_refusals",
        )


@dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """Buckets and thresholds of drift detection."""

    drift_bucket_seconds: float = 3600.0
    """Length of a bucket in seconds of event time. Its predictions are compared with the training
    rows. 0 = no drift detection."""
    drift_min_rows: int = 2000
    """Minimum rows of a comparison. A smaller bucket is merged into the next one of its version."""
    false_discovery_rate: float = 0.01
    """False discovery rate: maximum expected share of false alarms among the columns reported as
    drifted or outlying. If nothing has changed, it is the probability of any alarm in a bucket."""
    categorical_drift: float = 0.02
    """Minimum change of one category's share that counts as drift, unless chance explains it."""
    categorical_drift_relative: float = 0.5
    """Minimum change relative to the category's previous share. The smaller of this and
    `categorical_drift` applies, but at least 0.002."""
    numeric_drift: float = 0.003
    """Minimum Jensen-Shannon divergence, in bits beyond what chance adds, that counts as drift."""
    missing_drift: float = 0.02
    """Minimum change of a column's share of missing values that counts as drift."""
    outlier_drift: float = 0.005
    """Minimum increase of a numeric column's share of outliers that raises an alarm."""

    def __post_init__(self) -> None:
        expect(self, "at least 0", lambda value: value >= 0, "drift_bucket_seconds")
        expect(self, "at least 1", lambda value: value >= 1, "drift_min_rows")
        expect(self, "at most 1,000,000,000", lambda value: value <= 10**9, "drift_min_rows")
        expect(self, "inside (0, 1)", lambda value: 0 < value < 1, "false_discovery_rate")
        least = (
            "categorical_drift",
            "categorical_drift_relative",
            "numeric_drift",
            "missing_drift",
            "outlier_drift",
        )
        expect(self, "a number in [0, 1]", lambda value: 0 <= value <= 1, *least)


@dataclass(frozen=True, kw_only=True)
class DecisionSettings:
    """All settings that decide when a run is requested."""

    evaluation: EvaluationSettings = EvaluationSettings()
    policies: PolicySettings = PolicySettings()
    rate_limit: RateLimitSettings = RateLimitSettings()
    drift: DriftSettings = DriftSettings()
    recipe: RecipeSettings = RecipeSettings()
    baking: BakingSettings = BakingSettings()
    """Limits of the section `release` that roll back a new version."""

    def __post_init__(self) -> None:
        """Refuse a window too small to evaluate, and a grace period with too many buckets."""
        window_rows, fewest = self.evaluation.window_rows, 2 * self.policies.min_clicks
        if window_rows < fewest:
            needed = f"{fewest}: min_clicks clicks and as many rows without one"
            raise ContractError(f"window_rows is {window_rows}, expected at least {needed}")
        grace, bucket = self.evaluation.drift_grace_seconds, self.drift.drift_bucket_seconds
        if bucket and grace > _MAX_GRACE_BUCKETS * bucket:
            raise ContractError(
                f"drift_grace_seconds is {grace}, expected at most {_MAX_GRACE_BUCKETS} times "
                "drift_bucket_seconds, "
                f"which is {bucket}"
            )


def own_parts() -> dict[str, type[Any]]:
    """Return the classes of the section `monitor`, keyed by their field in `DecisionSettings`."""
    return {
        part: kind
        for part, kind in get_type_hints(DecisionSettings).items()
        if kind is not BakingSettings
    }


def decision_settings(recommender: Recommender) -> DecisionSettings:
    """Return a recommender's settings of the section `monitor` and its baking limits.

    The baking limits are settings of the section `release`.

    Raises:
        ContractError: a setting is unknown, of another type, or out of range. The message names the
            setting by its path.
    """
    values, kinds = recommender.settings.get("monitor", {}), own_parts()
    known = [name for kind in kinds.values() for name in flat_settings(kind)]
    if unknown := [name for name in values if name not in known]:
        raise ContractError(f"monitor.{unknown[0]} is no setting{nearest(unknown[0], known)}")
    parts: dict[str, Any] = {
        part: read_mapping(
            kind,
            {name: values[name] for name in flat_settings(kind) if name in values},
            path="monitor",
        )
        for part, kind in kinds.items()
    }
    release = recommender.settings.get("release", {})
    limits = {name: release[name] for name in flat_settings(BakingSettings) if name in release}
    parts["baking"] = read_mapping(BakingSettings, limits, path="release")
    try:
        return DecisionSettings(**parts)
    except ContractError as error:
        raise ContractError(f"monitor.{error}") from error
