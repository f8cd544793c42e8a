"""Settings: promised defaults, flags, environment variables, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from components.runtime.errors import ContractError
from monitoring.flags import build_parser, flat_values, make_settings, read_settings, settings_of
from monitoring.settings import ENVIRONMENT_PREFIX, MonitorSettings
from monitoring.uploader import UploaderSettings

REQUIRED = ["--log", "sqlite:///x.db", "--state", "s", "--archive", "a", "--store", "m"]
KUBEFLOW = [*REQUIRED, "--trigger", "kubeflow", "--kubeflow-host", "http://x"]


def read(argv, environment=None, settings=MonitorSettings):
    parser = build_parser(settings, prog="monitoring", description="")
    return read_settings(settings, parser, argv, environment or {}, prefix=ENVIRONMENT_PREFIX)


def test_defaults_are_frozen():
    settings = settings_of(MonitorSettings)
    defaults = {name: each.default for name, each in settings.items() if each.default is not dataclasses.MISSING}
    assert defaults == {
        "policies": "threshold",
        "decide_seconds": 10.0,
        "drift_grace_seconds": 60.0,
        "auc_threshold": 0.74,
        "min_clicks": 200,
        "require_confidence": True,
        "consecutive_breaches": 3,
        "min_rows_since_breach": 0,
        "max_relative_drop": 0.05,
        "sequential_alpha": 0.01,
        "sequential_tolerance": 0.02,
        "drift_buckets": 3,
        "drift_columns": 1,
        "drift_bucket_seconds": 3600.0,
        "drift_min_rows": 2000,
        "drift_false_discovery_rate": 0.01,
        "drift_min_divergence": 0.003,
        "drift_min_share_change": 0.02,
        "drift_min_outlier_rise": 0.005,
        "volume_factor": 5.0,
        "volume_spans": 360,
        "max_serving_seconds": 604_800.0,
        "cooldown_seconds": 3600.0,
        "failure_backoff_seconds": 900.0,
        "daily_budget": 4,
        "full_every_releases": 0,
        "full_every_seconds": 0.0,
        "full_after_refusals": 0,
        "full_drift_share": 0.0,
        "actions": "",
        "webhook_file": "",
        "remind_seconds": 21_600.0,
        "status_url": "",
        "http_host": "127.0.0.1",
        "http_port": 9464,
        "log_format": "text",
        "window_rows": 20_000,
        "attribution_window_seconds": 1800.0,
        "conversion_window_seconds": 0.0,
        "archive_roll_rows": 50_000,
        "archive_roll_seconds": 300.0,
        "tick_seconds": 1.0,
        "pull_messages": 500,
        "keep_ids_seconds": 604_800.0,
        "trigger": "none",
        "run_command": "",
        "upload_wait_seconds": 600.0,
        "kubeflow_host": "",
        "kubeflow_namespace": "",
        "kubeflow_experiment": "evergreen-retraining",
        "kubeflow_service_account": "",
        "pipeline_package": "",
        "pipeline_name": "",
        "pipeline_version_id": "",
        "pipeline_arguments": "{}",
    }
    assert list(settings_of(UploaderSettings)) == ["archive", "lake", "interval_seconds", "once", "log_format"]


def test_flags_come_before_variables_and_variables_before_defaults():
    variables = {"EVERGREEN_MONITOR_WINDOW_ROWS": "500", "EVERGREEN_MONITOR_REQUIRE_CONFIDENCE": "false"}
    settings = read([*REQUIRED, "--window-rows", "700"], {**variables, "EVERGREEN_MONITOR_AUC_THRESHOLD": "0.6"})
    judge, policies = settings.judging.judge, settings.judging.policies
    assert (judge.window_rows, policies.require_confidence, policies.auc_threshold) == (700, False, 0.6)
    assert settings.state == Path("s")
    assert policies.min_clicks == 200
    assert read([*REQUIRED, "--no-require-confidence"]).judging.policies.require_confidence is False


def test_required_settings_may_come_from_variables_alone():
    pairs = zip(REQUIRED[::2], REQUIRED[1::2])
    settings = read([], {f"EVERGREEN_MONITOR_{flag[2:].upper()}": value for flag, value in pairs})
    assert settings.log == "sqlite:///x.db"


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        ([], {}, "settings are missing: expected --log, --state, --archive, --store"),
        (REQUIRED, {"EVERGREEN_MONITOR_WINDOWS_ROWS": "5"}, "EVERGREEN_MONITOR_WINDOWS_ROWS names no setting"),
        (REQUIRED, {"EVERGREEN_MONITOR_WINDOW_ROWS": "many"}, "EVERGREEN_MONITOR_WINDOW_ROWS is 'many', expected int"),
        (REQUIRED, {"EVERGREEN_MONITOR_REQUIRE_CONFIDENCE": "1"}, "expected true or false"),
        ([*REQUIRED, "--trigger", "cron"], {}, "trigger is 'cron', expected one of none, local, kubeflow"),
        ([*REQUIRED, "--trigger", "kubeflow"], {}, "kubeflow_host is empty"),
        ([*REQUIRED, "--trigger", "kubeflow", "--kubeflow-host", "http://x"], {}, "exactly one"),
        ([*KUBEFLOW, "--pipeline-name", "a", "--pipeline-package", "b"], {}, "exactly one"),
        ([*KUBEFLOW, "--pipeline-package", "a", "--pipeline-version-id", "b"], {}, "pipeline_version_id is given with"),
        ([*REQUIRED, "--tick-seconds", "0"], {}, "tick_seconds is 0.0, expected above 0"),
        ([*REQUIRED, "--http-port", "70000"], {}, "http_port is 70000"),
        ([*REQUIRED, "--attribution-window-seconds", "nan"], {}, "attribution_window_seconds is nan"),
    ],
)
def test_bad_settings_are_refused_with_their_name(argv, environment, message):
    with pytest.raises(ContractError, match=message):
        read(argv, environment)


@dataclasses.dataclass(frozen=True)
class Doubled:
    """Two parts with settings of the same names."""

    one: UploaderSettings
    other: UploaderSettings


def test_flat_values_make_equal_settings_and_unknown_or_doubled_names_are_refused():
    settings = read([*REQUIRED, "--daily-budget", "7", "--actions", "data_drift=notify"])
    assert make_settings(MonitorSettings, **flat_values(settings)) == settings
    with pytest.raises(ContractError, match="window_row is no setting"):
        make_settings(MonitorSettings, window_row=5)

    with pytest.raises(TypeError, match="two settings named archive"):
        settings_of(Doubled)


def test_every_flag_is_described(capsys):
    with pytest.raises(SystemExit):
        read(["--help"])
    text = capsys.readouterr().out
    assert "Newest matured rows of each model version" in text
    assert "--no-require-confidence" in text
    assert "95 % interval" in text
