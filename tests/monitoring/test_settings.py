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


def read(argv, environment=None, settings=MonitorSettings):
    parser = build_parser(settings, prog="monitoring", description="")
    return read_settings(settings, parser, argv, environment=environment or {}, prefix=ENVIRONMENT_PREFIX)


def test_flags_come_before_variables_and_variables_before_defaults():
    variables = {"EVERGREEN_MONITOR_WINDOW_ROWS": "500", "EVERGREEN_MONITOR_REQUIRE_CONFIDENCE": "false"}
    settings = read([*REQUIRED, "--window-rows", "700"], {**variables, "EVERGREEN_MONITOR_AUC_THRESHOLD": "0.6"})
    judge, policies = settings.judging.judge, settings.judging.policies
    assert (judge.window_rows, policies.require_confidence, policies.auc_threshold) == (700, False, 0.6)
    assert settings.state == Path("s")
    assert (policies.min_clicks, policies.policies) == (200, "sequential")
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
        ([*REQUIRED, "--trigger", "kubeflow", "--kubeflow-host", "http://x"], {}, "pipeline_name is empty"),
        (
            [*REQUIRED, "--policies", "sequential,threshold"],
            {},
            "policies is 'sequential,threshold' without auc_threshold, expected the AUC below which",
        ),
        (
            [*REQUIRED, "--drift-bucket-seconds", "5"],
            {},
            "drift_grace_seconds is 60.0, expected at most 8 times drift_bucket_seconds, which is 5.0",
        ),
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
    settings = read([*REQUIRED, "--daily-budget", "7", "--notify-only", "data_drift"])
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
