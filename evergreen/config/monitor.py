"""The section `monitor`: compared rows, drift thresholds, and conditions for a run.

The settings are divided into classes by concern. In a recommender's file, the settings of all
concerns form one flat list.
"""

from dataclasses import dataclass
from typing import Any, get_type_hints

from evergreen.config.drift import DriftThresholds
from evergreen.config.reader import flat_settings, nearest, read_mapping
from evergreen.config.release import BakingSettings
from evergreen.config.spec import Recommender
from evergreen.runtime.errors import ContractError, expect

_MAX_GRACE_BUCKETS = 8
"""Maximum grace period, as a number of drift buckets. With this maximum, ten buckets of three
versions are open at a time, and the drift watch has no room for more."""
_MIN_DECIDE_SECONDS = 0.001
POLICY_NAMES = ("threshold", "sequential", "data_drift", "schedule")
"""Names of the policies in `monitoring.policies.policies`, in the same order."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings for the rows that the policies evaluate, and for the time between evaluations."""

    window_rows: int = 20_000
    """Number of rows from which the KPIs of a model version are computed: its newest matured
    rows."""
    attribution_window_seconds: float = 1800.0
    """Attribution window, in seconds: maximum delay of a click after its prediction. The label of a
    prediction becomes final when this time has passed."""
    decide_seconds: float = 10.0
    """Event time between two decision points, in seconds. Decision points are the multiples of this
    interval."""
    drift_grace_seconds: float = 60.0
    """Grace period for late predictions, in seconds. After this period, drift buckets are evaluated
    and the version that served them is determined."""

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
    """Return the names of policies in a comma-separated list.

    Raises:
        ContractError: a name is unknown or given twice, or no name is given.

    >>> policy_names("threshold, schedule")
    ['threshold', 'schedule']
    """
    names = split_names(text)
    if set(names) - set(POLICY_NAMES) or len(set(names)) < len(names):
        raise ContractError(
            f"policies is {text!r}, expected one or several of {', '.join(POLICY_NAMES)}, "
            "separated by commas and without repetition"
        )
    return names


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated list without checking them."""
    return [name.strip() for name in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Policies that decide about retraining, and their thresholds.

    A setting of a policy has no effect if the policy is not named in `policies`.
    """

    policies: str = "sequential"
    """Comma-separated names of policies: threshold, sequential, data_drift, schedule. A run is
    requested if any of these policies decides to retrain, and the first of them gives the reason.
    """
    notify_only: str = ""
    """Comma-separated names of policies that start no run, such as `data_drift`. If such a policy
    confirms a drift, people are notified."""
    min_clicks: int = 200
    """Minimum number of clicks, and of rows without a click, in an evaluated window."""
    consecutive_breaches: int = 3
    """Number of consecutive breaches that confirm a drift. Each decision point adds at most one
    breach."""
    min_rows_since_breach: int = 0
    """Minimum number of rows that must mature after the first breach. If there are enough rows, the
    run can train on rows that are newer than the change."""
    auc_threshold: float = 0.0
    """Minimum AUC of the evaluated windows. A window is a breach if the 95 % interval of its AUC is
    completely below this value. 0 = not set. The policy `threshold` needs a value, because a
    suitable AUC depends on the task."""
    sequential_alpha: float = 0.01
    """Maximum probability of any false alarm between two changes. The limit applies to the whole
    time between two changes, however many versions are released."""
    sequential_tolerance: float = 0.02
    """The live AUC counts as drift if it is more than this tolerance below the lower end of the
    gate's interval. The tolerance allows for differences between served rows and the gate's rows.
    """
    drift_buckets: int = 3
    """Consecutive drifted buckets that confirm a data drift."""
    drift_columns: int = 1
    """Minimum number of drifted columns in a drifted bucket."""
    max_serving_seconds: float = 7 * 86_400.0
    """Maximum serving time of a version in seconds. After this time, the policy `schedule` requests
    a run."""

    def __post_init__(self) -> None:
        if self.notify_only and not set(split_names(self.notify_only)) <= set(POLICY_NAMES):
            raise ContractError(
                f"notify_only is {self.notify_only!r}, expected one or several of "
                f"{', '.join(POLICY_NAMES)}, separated by commas"
            )
        if "threshold" in policy_names(self.policies) and not self.auc_threshold:
            raise ContractError(
                f"policies is {self.policies!r} but auc_threshold is not set, expected the minimum "
                "AUC for policy threshold; policy sequential needs no auc_threshold"
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
    """Limits on how often a run may be requested."""

    cooldown_seconds: float = 3600.0
    """Pause after a released run, in seconds."""
    failure_backoff_seconds: float = 900.0
    """Pause after a run that failed or was refused, in seconds. The pause doubles with each
    consecutive failure, up to a day."""
    daily_budget: int = 4
    """Maximum number of requests in any 24 hours."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "daily_budget")
        expect(self, "at most 10,000", lambda value: value <= 10_000, "daily_budget")
        expect(self, "at least 0", lambda value: value >= 0, "cooldown_seconds")
        expect(self, "above 0", lambda value: value > 0, "failure_backoff_seconds")


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """Conditions under which a run starts from scratch."""

    full_every_releases: int = 0
    """Number of releases after which the next run starts from scratch. 0 = this rule is off."""
    full_after_refusals: int = 0
    """Number of consecutive refused incremental runs after which the next run starts from scratch.
    0 = this rule is off."""

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
class DriftSettings(DriftThresholds):
    """Settings of drift detection: buckets and thresholds."""

    drift_bucket_seconds: float = 3600.0
    """Length of a bucket in seconds of event time. The predictions of each bucket are compared with
    the training rows. 0 = no drift detection."""
    drift_min_rows: int = 2000
    """Minimum number of rows for a comparison. A bucket with fewer rows is merged into the next
    bucket of the same version."""
    false_discovery_rate: float = 0.01
    """False discovery rate: maximum expected share of false alarms among the columns reported as
    drifted or outlying. If nothing has changed, the false discovery rate is the probability of any
    alarm in a bucket. The default is lower than in validation, because many buckets are tested
    between two runs."""
    outlier_drift: float = 0.005
    """Minimum increase of a numeric column's share of outliers that raises an alarm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, "at least 0", lambda value: value >= 0, "drift_bucket_seconds")
        expect(self, "at least 1", lambda value: value >= 1, "drift_min_rows")
        expect(self, "at most 1,000,000,000", lambda value: value <= 10**9, "drift_min_rows")
        expect(self, "a number in [0, 1]", lambda value: 0 <= value <= 1, "outlier_drift")


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
        """Refuse a window that is too small to evaluate, and a grace period of too many buckets."""
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
    """Return the settings classes of the section `monitor`.

    The keys are fields of `DecisionSettings`.
    """
    return {
        part: kind
        for part, kind in get_type_hints(DecisionSettings).items()
        if kind is not BakingSettings
    }


def decision_settings(recommender: Recommender) -> DecisionSettings:
    """Return a recommender's baking limits and its settings in the section `monitor`.

    The baking limits are settings of the section `release`.

    Raises:
        ContractError: a setting is unknown, of another type, or out of range. The message names the
            setting by its path.
    """
    values, kinds = recommender.settings.get("monitor", {}), own_parts()
    known = [name for kind in kinds.values() for name in flat_settings(kind)]
    if unknown := [name for name in values if name not in known]:
        raise ContractError(f"monitor.{unknown[0]} is not a setting{nearest(unknown[0], known)}")
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
