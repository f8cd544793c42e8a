"""Tests of settings: documented defaults, flags, environment variables and refusals."""

import pytest

from evergreen.config.reader import build_parser, read_settings
from evergreen.runtime.errors import ContractError, TemporaryError
from monitoring.settings import ENVIRONMENT_PREFIX, InstallationSettings, with_rules
from testing.recommenders import accept_into, shop_with
from tests.support.errors import raises

REQUIRED = ["--log", "sqlite:///x.db", "--state", "s", "--archive", "a", "--store", "m"]


def read(argv, environment=None, settings=InstallationSettings):
    parser = build_parser(settings, prog="monitoring", description="")
    return read_settings(
        settings, parser.parse_args(argv), environment=environment or {}, prefix=ENVIRONMENT_PREFIX
    )


def test_monitor_decides_by_newest_accepted_recommender_of_its_store(tmp_path):
    installation = read([*REQUIRED[:-1], str(tmp_path)])
    with raises(TemporaryError, "no accepted recommender"):
        with_rules(installation)
    accept_into(
        tmp_path, shop_with(monitor={"window_rows": 700, "drift_columns": 3, "daily_budget": 7})
    )
    settings = with_rules(installation)
    evaluation, policies = settings.decisions.evaluation, settings.decisions.policies
    assert (
        evaluation.window_rows,
        policies.drift_columns,
        settings.decisions.rate_limit.daily_budget,
    ) == (
        700,
        3,
        7,
    )
    assert (policies.min_clicks, policies.policies) == (200, "sequential")
    assert settings.state == installation.state


def test_required_settings_may_come_from_variables_alone():
    pairs = zip(REQUIRED[::2], REQUIRED[1::2])
    settings = read([], {f"EVERGREEN_MONITOR_{flag[2:].upper()}": value for flag, value in pairs})
    assert settings.log == "sqlite:///x.db"


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        ([], {}, "settings are missing: expected --log, --state, --archive, --store"),
        (
            REQUIRED,
            {"EVERGREEN_MONITOR_WINDOW_ROWS": "5"},
            "EVERGREEN_MONITOR_WINDOW_ROWS names no setting",
        ),
        (
            REQUIRED,
            {"EVERGREEN_MONITOR_HTTP_PORT": "many"},
            "EVERGREEN_MONITOR_HTTP_PORT is 'many', expected int",
        ),
        (
            [*REQUIRED, "--trigger", "cron"],
            {},
            "trigger is 'cron', expected one of none, local, kubeflow",
        ),
        ([*REQUIRED, "--trigger", "kubeflow"], {}, "kubeflow_host is empty"),
        (
            [*REQUIRED, "--trigger", "kubeflow", "--kubeflow-host", "http://x"],
            {},
            "pipeline_name is empty",
        ),
        ([*REQUIRED, "--tick-seconds", "0"], {}, "tick_seconds is 0.0, expected above 0"),
        (
            [*REQUIRED, "--upload-wait-seconds", "nan"],
            {},
            "upload_wait_seconds is nan, expected at least 0",
        ),
        ([*REQUIRED, "--http-port", "70000"], {}, "http_port is 70000"),
        ([*REQUIRED, "--conversion-window-seconds", "nan"], {}, "conversion_window_seconds is nan"),
        (
            ["--log", "sqlite:///x-{0-3}.db", *REQUIRED[2:], "--partition", "4"],
            {},
            "partition is 4, expected 0 to 3",
        ),
    ],
)
def test_bad_settings_are_refused_with_their_name(argv, environment, message):
    with pytest.raises(ContractError, match=message):
        read(argv, environment)
