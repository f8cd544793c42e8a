"""Tests of the commands as processes, with a real gRPC server and a real log."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from demo.simulation.simulator import Drift, Simulator
from evergreen.contracts.criteo import CATEGORICAL, CRITEO_RECOMMENDER
from evergreen.contracts.records import PredictionBatch
from evergreen.runtime.errors import PermanentError
from evergreen.storage.folder import FolderObjects
from testing.processes import wait_for
from testing.served_names import TRAFFIC_FILE
from tests.support.errors import raises
from tests.support.traffic_plans import CANARY, STABLE, make_plan


def run(*arguments, module="demo.simulation", **options):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def simulators():
    """A simulator and a drifted one."""
    simulator = Simulator.create(7)
    return {"simulator.json": simulator, "drifted.json": simulator.drifted(Drift(seed=8))}


@pytest.fixture
def folder(tmp_path, simulators):
    """A folder with a space in its name, and with the files of both simulators."""
    folder = tmp_path / "some place"
    folder.mkdir()
    for name, simulator in simulators.items():
        simulator.save(folder / name)
    return folder


@pytest.fixture
def replay(server, folder):
    """Starts a replay process. A test can write commands to the process's standard input."""
    started = []

    def start(
        *extra, source=("--simulator", "simulator.json", "--drifted-simulator", "drifted.json")
    ):
        arguments = [
            "--server",
            server.url,
            "--log",
            f"sqlite:///{folder}/log.db",
            "--rate",
            "3000",
            "--seed",
            "3",
        ]
        arguments += [
            "--stats",
            "out/stats.jsonl",
            "--summary",
            "out/summary.json",
            "--label-delay-seconds",
            "0.2",
        ]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-m", "demo.simulation", "traffic", *arguments, *source, *extra]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for_rows(server, rows):
    wait_for(lambda: sum(server.scoring.requests) >= rows, "the replay's rows")


def summary_of(folder):
    return json.loads((folder / "out" / "summary.json").read_text())


def read_lines(folder):
    return [json.loads(line) for line in (folder / "out" / "stats.jsonl").read_text().splitlines()]


def test_replay_drifts_on_command_and_stops_at_end_of_input(
    server, replay, folder, read_log, score_rows
):
    process = replay()
    wait_for_rows(server, 2000)
    process.stdin.write("drift\n")
    process.stdin.flush()
    wait_for_rows(server, sum(server.scoring.requests) + 2000)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    summary = summary_of(folder)
    assert summary["requests"]["failed"] == 0
    assert summary["rows"] == sum(server.scoring.requests) == summary["published_rows"]
    assert summary["outcomes"] == summary["clicks"] > 0
    assert summary["drift"]["columns"] == ["C2", "C14", "C17", "C23"]
    assert 0.7 < summary["bayes_auc"]["before"] < 0.9
    assert 0.7 < summary["bayes_auc"]["after"] < 0.9
    assert summary["versions_seen"] == {"1": summary["rows"]}
    lines = read_lines(folder)
    assert sum(line["rows"] for line in lines) == summary["rows"]
    assert sum(line["requests_sent"] for line in lines) == summary["requests"]["sent"]
    records = read_log(folder / "log.db")
    predictions = [r for r in records if isinstance(r, PredictionBatch)]
    assert sum(map(len, predictions)) == summary["rows"]
    for prediction in predictions[:: len(predictions) // 5]:
        np.testing.assert_array_equal(
            prediction.scores, score_rows(prediction.dense, prediction.categorical)
        )
    assert sum(len(r) for r in records if not isinstance(r, PredictionBatch)) == summary["clicks"]
    assert json.loads(output)["rows"] == summary["rows"]


def test_replay_follows_traffic_plan_and_logs_both_arms(
    server, replay, folder, read_log, score_rows
):
    plan = make_plan(shadow=1.0)
    FolderObjects(folder / "models").write(TRAFFIC_FILE, plan.dumps())
    server.scoring.version, server.scoring.canary_version = STABLE.version, CANARY.version
    process = replay("--plan", str(folder / "models"), "--max-rows", "3000")
    assert process.wait(timeout=120) == 0, process.stderr.read()
    summary = summary_of(folder)
    assert summary["requests"]["failed"] == 0
    predictions = [r for r in read_log(folder / "log.db") if isinstance(r, PredictionBatch)]
    assert sum(map(len, predictions)) == 3000
    for record in predictions:
        arm = plan.arm_for(record.request_id)
        assert (record.canary, record.model_version) == (arm == CANARY, arm.version)
        stable = score_rows(record.dense, record.categorical)
        np.testing.assert_array_equal(record.scores, 1 - stable if record.canary else stable)
        if record.shadow_version is not None:
            np.testing.assert_array_equal(
                record.shadow_scores, stable if record.canary else 1 - stable
            )
    assert len({record.canary for record in predictions}) == 2
    assert sum(record.shadow_version is not None for record in predictions) > 0


def test_killed_server_ends_replay_with_one_clear_line(server, replay, folder):
    process = replay("--max-consecutive-failures", "5")
    wait_for_rows(server, 500)
    server.kill()
    # Standard input stays open, so the replay must give up by itself.
    assert process.wait(timeout=120) == 3
    errors = [line for line in process.stderr.read().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert server.url in errors[0]
    assert "5 requests failed in a row" in errors[0]
    summary = summary_of(folder)
    assert summary["requests"]["failed"] >= 5
    assert summary["published_rows"] == summary["rows"] > 0
    assert summary["outcomes"] == summary["clicks"]
    assert summary["error"] in errors[0]


def test_log_that_is_lost_for_good_ends_replay_with_its_summary_written(
    server, folder, monkeypatch
):
    from demo.simulation.replay import ReplayProcess, ReplaySettings, run_replay
    from demo.simulation.traffic import SimulatedTraffic
    from inference_client import recommender
    from inference_client.scoring import ClientSettings

    class LostLog:
        def publish(self, messages):
            raise PermanentError("log.db: database disk image is malformed")

        def close(self):
            pass

    monkeypatch.setattr(recommender, "open_publisher", lambda url: LostLog())
    stdin, held_open = os.pipe()
    settings = ReplayProcess(
        server=server.url,
        recommender=CRITEO_RECOMMENDER,
        log_url="sqlite:///log.db",
        seed=1,
        stats_path=folder / "out" / "stats.jsonl",
        summary_path=folder / "out" / "summary.json",
        run="lost",
        stdin=stdin,
    )
    traffic = SimulatedTraffic(
        Simulator.load(folder / "simulator.json"), None, np.random.default_rng(1)
    )
    with raises(PermanentError, "lost", "log.db"):
        asyncio.run(
            run_replay(
                settings, traffic, ReplaySettings(rate=3000), client_settings=ClientSettings()
            )
        )
    os.close(held_open)
    assert "malformed" in summary_of(folder)["error"]
    assert summary_of(folder)["published_rows"] == 0


def test_sigterm_stops_like_stop(server, replay, folder):
    process = replay()
    wait_for_rows(server, 200)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0
    assert summary_of(folder)["published_rows"] == summary_of(folder)["rows"] > 0


def test_file_is_replayed_to_its_end(server, replay, folder, criteo_table, store):
    pq.write_table(criteo_table(500), folder / "data.parquet")
    process = replay(
        source=("--data", "data.parquet", "--drift-columns", "C2,I3", "--recommender", str(store))
    )
    assert process.wait(timeout=120) == 0
    summary = summary_of(folder)
    assert (summary["exhausted"], summary["rows"]) == (True, 500)
    assert read_lines(folder)[-1]["exhausted"]
    assert summary["bayes_auc"] == {"before": None, "after": None}
    assert summary["drift"]["columns"] == ["C2", "I3"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (("--simulator", "absent.json"), "simulator absent.json cannot be read"),
        (
            ("--simulator", "simulator.json", "--drift-columns", "C1"),
            "--drift-columns is given with --simulator",
        ),
        (
            ("--data", "data.parquet"),
            "--recommender is absent, expected the recommender of the rows in --data",
        ),
        (
            ("--simulator", "simulator.json", "--rows-per-request", "4096"),
            "rows_per_request is 4096",
        ),
    ],
    ids=["simulator", "mixed", "whose", "range"],
)
def test_invalid_replay_arguments_give_one_line_and_exit_2(replay, source, text):
    process = replay(source=source)
    assert process.wait(timeout=120) == 2
    errors = process.stderr.read()
    assert errors.startswith("error: ")
    assert text in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_score_prints_line_per_row_of_every_form_and_names_malformed_rows(
    server, folder, store, criteo_table, form
):
    table = criteo_table(20).drop_columns(["label", "event_time"])
    path = folder / f"rows.{form}"
    if form == "csv":  # Criteo's text form has categories as hex digits
        for name in CATEGORICAL:
            texts = [None if value is None else f"{value:x}" for value in table[name].to_pylist()]
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(texts))
    (pq.write_table if form == "parquet" else write_csv)(table, path)
    flags = ["models", "score", "--server", server.url, "--recommender", store, "--data", path]
    done = run(*flags, "--limit", 7, module="cli")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert [line["line"] for line in lines] == [number + (form == "csv") for number in range(1, 8)]
    assert all(line["model_version"] == 1 and 0 <= line["score"] <= 1 for line in lines)
    if form == "csv":
        text = path.read_text().splitlines()
        text[3] = "many" + text[3][text[3].index(",") :]
        path.write_text("\n".join(text) + "\n")
        broken = run(*flags, module="cli")
        printed = [json.loads(line) for line in broken.stdout.splitlines()]
        assert (broken.returncode, len(printed)) == (2, 20)
        assert [line["line"] for line in printed if "error" in line] == [4]
        assert [line for line in printed[:7] if "score" in line] == [
            line for line in lines if line["line"] != 4
        ]
        assert broken.stderr == "1 rows are malformed and have no score\n"


def test_reader_of_first_line_only_sees_no_traceback(server, folder, store, criteo_table):
    pq.write_table(criteo_table(20_000), folder / "rows.parquet")
    flags = [
        "--server",
        server.url,
        "--recommender",
        str(store),
        "--data",
        str(folder / "rows.parquet"),
    ]
    line = [sys.executable, "-m", "cli.score", *flags]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == -signal.SIGPIPE
        assert process.stderr.read() == ""


def test_simulate_and_drift_write_what_they_report(folder):
    arguments = ["--rows", 2000, "--days", 2, "--last-day", "2026-03-02", "--seed", 7]
    done = run("lake", "--lake", folder / "lake", "--simulator", folder / "w.json", *arguments)
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert (report["rows"], report["days"]) == (2000, ["2026-03-01", "2026-03-02"])
    assert sorted(p.name for p in (folder / "lake").glob("[!.]*")) == [
        "day=2026-03-01",
        "day=2026-03-02",
    ]
    drifted = run(
        "drift", "--simulator", folder / "w.json", "--output", folder / "d.json", "--seed", 8
    )
    assert json.loads(drifted.stdout)["columns"] == ["C2", "C14", "C17", "C23"]
    assert Simulator.load(folder / "d.json") == Simulator.create(7).drifted(Drift(seed=8))
    again = run("lake", "--lake", folder / "lake", "--simulator", folder / "w.json", *arguments)
    assert again.returncode == 2
    assert "already" in again.stderr


def test_parser_needs_no_library():
    code = (
        "import sys, demo.simulation.__main__ as m; m.build_parser(); "
        "print(sorted({'numpy', 'pyarrow', 'grpc', 'tritonclient'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
