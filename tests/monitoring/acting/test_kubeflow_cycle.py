"""From drift to the end of the one run on Kubeflow: the real monitor and kfp client, crashes, two monitors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from components.store.runs import RunOutcome, write_outcome
from tests.support.kfp_server import KfpServer
from tests.support.killed_monitor import start_on_kubeflow
from tests.support.monitors import DRIFT, Bench, traffic
from tests.support.paths import REPOSITORY

CYCLE = {"PENDING": "RUNNING", "RUNNING": "SUCCEEDED"}


@pytest.fixture
def server():
    double = KfpServer()
    double.pipelines = [{"pipeline_id": "p", "display_name": "ours"}]
    double.versions = [{"pipeline_id": "p", "pipeline_version_id": "v1", "display_name": "1"}]
    yield double
    double.close()


@pytest.fixture
def changes(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    kubeflow = {"trigger": "kubeflow", "kubeflow_host": server.url, "pipeline_name": "ours"}
    return {**DRIFT, **kubeflow, "pipeline_arguments": '{"store": "/mnt/store"}'}


@pytest.fixture
def bench_of(tmp_path, changes):
    made = []

    def make(name=".") -> Bench:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(Bench(tmp_path / name, **changes))
        return made[-1]

    yield make
    for each in made:
        each.kill()
        each.log.close()


def turns(b, monitor, number=10):
    for _ in range(number):
        monitor.tick()
        b.clock.now += 16.0


def test_a_whole_cycle_ends_with_the_outcome_that_the_run_left(server, bench_of):
    b = bench_of()
    monitor = start_on_kubeflow(b)
    traffic(b, "bad", auc="bad")
    monitor.tick()
    (run,) = server.runs
    sent = run["body"]["runtime_config"]["parameters"]
    assert sent["trigger_id"] == run["display_name"] == "drift-20251113T021320Z-v1"
    assert sent["trigger_reason"].endswith("(incremental run)")
    for state in ("RUNNING", "PAUSED", "RUNNING"):
        run["state"] = state
        turns(b, monitor, 2)
        assert monitor.retraining.progress.phase == "running"
    run["state"] = "SUCCEEDED"
    outcome = {"run": "r", "trigger_id": run["display_name"], "step": "evaluation", "reason": "auc fell"}
    write_outcome(b.settings.store, RunOutcome(**outcome, state="refused", version=None, ended_at="2026-01-01"))
    turns(b, monitor, 2)
    (ended,) = [event for event in b.events if event["kind"] == "run_ended"]
    assert (ended["outcome"], ended["request_id"]) == ("refused", run["display_name"])
    assert monitor.retraining.memory.failures == 1


def test_a_server_in_trouble_for_half_an_hour_costs_no_run_and_no_second_one(server, bench_of):
    b = bench_of()
    monitor = start_on_kubeflow(b)
    traffic(b, "bad", auc="bad")
    server.failure = 503
    turns(b, monitor, 100)
    server.failure = None
    server.lost.append(("POST", "/runs"))
    turns(b, monitor, 3)
    server.advance = CYCLE
    turns(b, monitor, 10)
    assert [run["state"] for run in server.runs] == ["SUCCEEDED"]
    assert b.kinds().count("unreachable") == 1
    assert [event["outcome"] for event in b.events if event["kind"] == "run_ended"] == ["released"]


POINTS = ["retraining.decided", "archive.sealed", "retraining.submitted", "retraining.running", "retraining.ended"]


def expect_one_run(b, server):
    """A successor over the same state folder brings the cycle to its end: one run, one end, the pause kept."""
    b.checkpoint = lambda name: None
    monitor = start_on_kubeflow(b)
    turns(b, monitor)
    assert [run["state"] for run in server.runs] == ["SUCCEEDED"]
    assert monitor.retraining.progress.phase == "idle"
    assert len(monitor.retraining.memory.requested_at) == 1
    assert monitor.retraining.memory.blocked_until > b.clock.now
    assert b.store.counters["request_released"] == 1


@pytest.mark.parametrize(
    "point", [POINTS[2], *(pytest.param(point, marks=pytest.mark.slow) for point in POINTS if point != POINTS[2])]
)
def test_sigkill_at_any_step_leads_to_exactly_one_run(server, bench_of, changes, tmp_path, point):
    server.advance = CYCLE
    b = bench_of()
    traffic(b, "bad", auc="bad")
    given = {"folder": str(tmp_path), "changes": changes, "time": b.clock.now, "point": point}
    killed = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_monitor", json.dumps(given)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    b.clock.now += 100.0
    expect_one_run(b, server)


# -- two monitors, where one is shipped


def test_two_monitors_that_saw_the_same_rows_ask_for_one_run_and_both_follow_it_to_its_end(server, bench_of):
    first, second = bench_of("a"), bench_of("b")
    for b in (first, second):
        monitor = start_on_kubeflow(b)
        traffic(b, "bad", auc="bad")
        b.clock.now += {first: 0.25, second: 3.5}[b]  # their clocks differ
        monitor.tick()
    assert [run["display_name"] for run in server.runs] == ["drift-20251113T021320Z-v1"]
    server.runs[0]["state"] = "SUCCEEDED"
    for b in (first, second):
        turns(b, b.monitor, 2)
        assert b.store.counters["request_released"] == 1
    assert len(server.runs) == 1


def test_two_monitors_racing_leave_one_active_run(server, bench_of):
    """Both see the same drift at the same moment, both look before either creates its run."""
    server.advance = {"CANCELING": "CANCELED"}  # as the server does with a run that was terminated
    benches = [bench_of("a"), bench_of("b")]
    for b in benches:
        traffic(b, "bad", auc="bad")
    both = threading.Barrier(2, timeout=60)
    server.experiments.append({"experiment_id": "e1", "display_name": "evergreen-retraining"})
    server.before_create = lambda body: both.wait()

    def work(b):
        turns(b, start_on_kubeflow(b), 6)
        b.kill()  # SQLite: in the thread that opened it

    threads = [threading.Thread(target=work, args=(b,)) for b in benches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [run["state"] for run in server.runs] == ["PENDING", "CANCELED"]
    assert {run["display_name"] for run in server.runs} == {"drift-20251113T021320Z-v1"}
