"""Tests of a backtest's summary, for given decisions and for a real archive."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.config.monitor import DecisionSettings
from evergreen.config.reader import make_settings
from evergreen.storage.uris import open_objects
from monitoring.backtest.__main__ import main
from monitoring.backtest.backtest import backtest, evaluate_requests, read_requests
from monitoring.metrics.window import Kpis
from monitoring.policies.policy import Action, Decision, DecisionPoint
from monitoring.state.rules_file import write_rules
from tests.monitoring.backtest.conftest import CHANGED_AT, SETTINGS
from tests.support.monitors import WINDOW

SETTINGS_10 = make_settings(
    DecisionSettings, attribution_window_seconds=10.0, cooldown_seconds=100.0, daily_budget=2
)


def evaluated(actions: str) -> list[DecisionPoint]:
    """Return decisions every 50 s: `.` for no action, `!` for retrain."""
    made = []
    for number, sign in enumerate(actions):
        decision = Decision(
            policy="threshold",
            action=Action.RETRAIN if sign == "!" else Action.OK,
            reason="r",
            numbers={"version": 1.0},
        )
        kpis = Kpis(
            version=1,
            rows=10,
            clicks=5,
            auc=0.7,
            auc_low=None,
            auc_high=None,
            log_loss=None,
            calibration=None,
            ctr=0.5,
        )
        state = {"matured_total": 100 * (number + 1)}
        made.append(
            DecisionPoint(
                time=50.0 * number,
                version=1,
                decision=decision,
                decisions=(decision,),
                kpis=kpis,
                state=state,
            )
        )
    return made


def test_requested_runs_respect_live_cooldown_and_budget():
    """The policy requests a run at 60 s, and the run ends at 90 s.

    The cooldown lasts until 190 s, and the second run starts at 210 s. Two runs exhaust the daily
    budget.
    """
    found = backtest(evaluated(".!!!!!!!!!"), SETTINGS_10, run_seconds=30.0)
    assert [fire.time for fire in found.fires] == [60.0, 210.0]
    assert found.held == 7


def test_delay_and_false_alarms_need_time_of_change():
    unknown = backtest(evaluated("!...!"), SETTINGS_10, run_seconds=0.0)
    assert (unknown.false_alarms, unknown.delay_seconds) == (None, None)
    known = backtest(evaluated("!...!"), SETTINGS_10, run_seconds=0.0, drift_at=100.0)
    assert (known.false_alarms, known.delay_seconds) == (1, 110.0)


FLAGS = [
    f"--{name.replace('_', '-')}={value}"
    for name, value in {**SETTINGS, "attribution_window_seconds": WINDOW, "run_seconds": 10}.items()
]


def test_command_compares_policies_on_one_archive(ran, capsys):
    command = [str(ran.archive), *FLAGS, "--policy", "threshold", f"--drift-at={CHANGED_AT}"]
    assert main([*command, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["policies"] == "threshold"
    assert report["false_alarms"] == 0
    lines = [json.loads(line) for line in ran.lines]
    first = next(line["time"] for line in lines if line["action"] == "retrain")
    assert report["delay_seconds"] == pytest.approx(first + WINDOW - CHANGED_AT)
    assert report["decision_points"] == len(lines)
    assert main(command) == 0
    assert "threshold" in capsys.readouterr().out


def test_backtest_uses_settings_of_monitor_and_warns_of_few_decision_points(ran, tmp_path, capsys):
    write_rules(tmp_path, ran.settings)
    outputs = []
    defaults = ["--policies=threshold", "--auc-threshold=0.7", "--decide-seconds=30"]
    for flags in (FLAGS, [f"--state={tmp_path}"], defaults):
        assert main([str(ran.archive), "--json", *flags]) == 0
        outputs.append(capsys.readouterr())
    assert json.loads(outputs[0].out)[0]["decision_points"] >= 20
    assert (outputs[1].out, outputs[1].err) == (outputs[0].out, "")
    assert (
        "decision points, expected 20 or more to compare policies: labels wait 1800 s"
        in outputs[2].err
    )
    assert "--state uses the settings" in outputs[2].err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policy", "guess"], "policies is 'guess', expected one or several of"),
        (["--start", "3026-01-01"], "0 matured rows"),
        (["--run-seconds=-1"], "run_seconds is -1.0, expected at least 0"),
    ],
)
def test_invalid_input_is_reported_by_name(ran, capsys, arguments, expected):
    main([str(ran.archive), *arguments])
    output = capsys.readouterr()
    assert expected in output.err + output.out


def test_archive_in_bucket_is_read_like_folder(ran, cloud_storage):
    bucket = open_objects("gs://models/archive")
    for path in ran.archive.glob("day=*/*.parquet"):
        bucket.write(path.relative_to(ran.archive).as_posix(), path)
    assert [
        point.line() for point in evaluate_requests(read_requests(bucket), ran.settings)
    ] == ran.lines


def test_folder_without_records_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "expected a monitor's archive or a lake" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"no rows", pa.table({"event_time": ["noon"]}), "text for times"], ids=str
)
def test_file_that_is_no_archive_is_named_and_no_stack_is_shown(ran, tmp_path, capsys, content):
    path = tmp_path / "day=2025-11-13" / "part-1.parquet"
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, pa.Table):
        pq.write_table(content, path)
    else:
        (file,) = list(ran.archive.glob("day=*/*.parquet"))[:1]
        table = pq.ParquetFile(file).read()
        at = table.schema.get_field_index("event_time")
        pq.write_table(table.set_column(at, "event_time", pa.array(["noon"] * len(table))), path)
    assert main([str(tmp_path)]) == 2
    assert "day=2025-11-13/part-1.parquet" in capsys.readouterr().err
