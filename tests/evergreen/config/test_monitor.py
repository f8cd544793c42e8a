"""Tests of the errors for invalid or conflicting values in the section `monitor`."""

import pytest

from evergreen.config.monitor import (
    DriftSettings,
    EvaluationSettings,
    PolicySettings,
    RateLimitSettings,
    RecipeSettings,
    decision_settings,
)
from evergreen.config.release import BakingSettings
from evergreen.runtime.errors import ContractError
from testing.recommenders import criteo_with
from tests.support.errors import raises

POLICIES_OUT_OF_RANGE = {
    "auc_threshold": 1.0,
    "min_clicks": 0,
    "consecutive_breaches": 0,
    "min_rows_since_breach": -1,
}
POLICIES_OUT_OF_RANGE |= {"sequential_alpha": float("nan"), "sequential_tolerance": 0.5}
OUT_OF_RANGE = {
    PolicySettings: {
        **POLICIES_OUT_OF_RANGE,
        "drift_buckets": 0,
        "drift_columns": 0,
        "max_serving_seconds": 0.0,
    },
    EvaluationSettings: {
        "window_rows": 0,
        "attribution_window_seconds": -1.0,
        "decide_seconds": float("nan"),
    },
    RateLimitSettings: {
        "daily_budget": 0,
        "cooldown_seconds": float("nan"),
        "failure_backoff_seconds": 0.0,
    },
    DriftSettings: {"drift_bucket_seconds": -1.0, "drift_min_rows": 0, "numeric_drift": 1.5},
    BakingSettings: {"bake_alpha": 1000.0, "max_calibration_ratio": 1000.0},
    RecipeSettings: {"full_every_releases": -1, "full_after_refusals": -1},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, values in OUT_OF_RANGE.items()
        for name, value in values.items()
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(kind, name, value):
    with raises(ContractError, name, value):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"windows_rows": 5}, "monitor.windows_rows is not a setting, expected window_rows"),
        ({"window_rows": "many"}, "monitor.window_rows is 'many', expected int"),
        (
            {"policies": "sequential,threshold"},
            "policies is 'sequential,threshold' but auc_threshold is not set, expected the minimum "
            "AUC for policy threshold",
        ),
        (
            {"drift_bucket_seconds": 5},
            "monitor.drift_grace_seconds is 60.0, expected at most 8 times drift_bucket_seconds, "
            "which is 5.0",
        ),
        (
            {"notify_only": "threshold, thresold"},
            "notify_only is 'threshold, thresold', expected one or several of threshold, ",
        ),
        (
            {"window_rows": 399},
            "monitor.window_rows is 399, expected at least 400: min_clicks clicks and as many",
        ),
    ],
)
def test_bad_rules_are_refused_with_their_name(wrong, message):
    with pytest.raises(ContractError, match=message):
        decision_settings(criteo_with(monitor=wrong))
