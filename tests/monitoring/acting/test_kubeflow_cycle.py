"""From drift to the end of the run on Kubeflow: the real monitor, the real kfp client, HTTP, crashes and races."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from components.storage.folder import FolderObjects
from components.store.run_notes import RunOutcome, write_outcome
from monitoring.acting.kubeflow_trigger import KubeflowTrigger
from monitoring.acting.leadership import Leadership, NotLeading
from tests.components.storage.test_lease import Clocks
from tests.monitoring.acting.killed_monitor import start_leading
from tests.monitoring.acting.test_kubeflow_trigger import PIPELINE
from tests.monitoring.acting.test_leadership import Replica
from tests.monitoring.acting.test_retraining import DRIFT, traffic
from tests.monitoring.conftest import Bench
from tests.support.crashes import Killed, crash_at
from tests.support.kfp_server import KfpServer
from tests.support.paths import REPOSITORY

CYCLE = {"PENDING": "RUNNING", "RUNNING": "SUCCEEDED"}


@pytest.fixture
def server():
    double = KfpServer()
    yield double
    double.close()


@pytest.fixture
def changes(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    package = tmp_path / "pipeline.yaml"
    package.write_text(PIPELINE)
    kubeflow = {"trigger": "kubeflow", "kubeflow_host": server.url, "pipeline_package": str(package)}
    return {**DRIFT, **kubeflow, "pipeline_arguments": '{"store": "/mnt/store"}'}


@pytest.fixture
def bench_of(tmp_path, changes):
    made = []

    def make(**more) -> Bench:
        made.append(Bench(tmp_path, **{**changes, **more}))
        return made[-1]

    yield make
    for each in made:
        each.kill()
        each.log.close()


def turns(b, monitor, number=10):
    for _ in range(number):
        monitor.tick()
        b.clock.time += 16.0


def test_a_whole_cycle_ends_with_the_outcome_that_the_run_left(server, bench_of):
    b = bench_of()
    monitor = start_leading(b)
    traffic(b, "bad", auc="bad")
    monitor.tick()
    (run,) = server.runs
    sent = run["body"]["runtime_config"]["parameters"]
    assert sent["trigger_id"] == run["display_name"] == "drift-20251113T021320Z-v1"
    assert sent["trigger_reason"].endswith("(incremental run, term 1)")
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


@pytest.mark.parametrize("state", ["CANCELED", "SKIPPED", "FAILED"])
def test_a_run_that_others_ended_backs_off_and_frees_the_monitor(server, bench_of, state):
    b = bench_of()
    monitor = start_leading(b)
    traffic(b, "bad", auc="bad")
    monitor.tick()
    server.runs[0]["state"] = state
    turns(b, monitor, 2)
    (ended,) = [event for event in b.events if event["kind"] == "run_ended"]
    assert ended["outcome"] == "failed"
    assert f"run-0 is {state}" in ended["text"]


def test_an_experiment_that_vanished_ends_the_request_after_a_minute(server, bench_of):
    b = bench_of()
    monitor = start_leading(b)
    traffic(b, "bad", auc="bad")
    monitor.tick()
    server.experiments.clear()
    server.runs.clear()
    turns(b, monitor, 3)
    assert monitor.retraining.progress.phase == "running"
    turns(b, monitor, 3)
    assert monitor.retraining.progress.phase == "idle"
    assert "no experiment evergreen-retraining any more" in b.events[-1]["text"]


def test_a_server_in_trouble_for_an_hour_costs_no_run_and_no_second_one(server, bench_of):
    b = bench_of()
    monitor = start_leading(b)
    traffic(b, "bad", auc="bad")
    server.failure = 503
    turns(b, monitor, 100)
    server.failure = None
    server.lost.append(("POST", "/runs"))
    turns(b, monitor, 3)
    server.silence.clear()
    server.advance = CYCLE
    turns(b, monitor, 10)
    assert [run["state"] for run in server.runs] == ["SUCCEEDED"]
    assert b.kinds().count("unreachable") == 1
    assert [event["outcome"] for event in b.events if event["kind"] == "run_ended"] == ["released"]


POINTS = ["retraining.decided", "archive.sealed", "retraining.submitted", "retraining.running", "retraining.ended"]


def check_after(b, server):
    """A successor over the same state folder brings the cycle to its end: one run, one end, the rest kept."""
    b.checkpoint = lambda name: None
    monitor = start_leading(b)
    turns(b, monitor)
    assert [run["state"] for run in server.runs] == ["SUCCEEDED"]
    assert monitor.retraining.progress.phase == "idle"
    assert len(monitor.retraining.memory.requested_at) == 1
    assert monitor.retraining.memory.blocked_until > b.clock.time
    assert b.store.counters["request_released"] == 1


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_step_leads_to_exactly_one_run(server, bench_of, point):
    server.advance = CYCLE
    b = bench_of()
    b.checkpoint = crash_at(point)
    traffic(b, "bad", auc="bad")
    with pytest.raises(Killed):
        turns(b, start_leading(b))
    check_after(b, server)


@pytest.mark.parametrize(
    "point", [POINTS[2], *(pytest.param(point, marks=pytest.mark.slow) for point in POINTS if point != POINTS[2])]
)
def test_sigkill_at_any_step_leads_to_exactly_one_run(server, bench_of, changes, tmp_path, point):
    server.advance = CYCLE
    b = bench_of()
    traffic(b, "bad", auc="bad")
    given = {"folder": str(tmp_path), "changes": changes, "time": b.clock.time, "point": point}
    killed = subprocess.run(
        [sys.executable, "-m", "tests.monitoring.acting.killed_monitor", json.dumps(given)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    b.clock.time += 100.0
    check_after(b, server)


def test_two_replicas_racing_with_leases_of_their_own_leave_one_active_run(server, tmp_path, changes):
    """Each believes that it is alone (two leases by mistake), both see the same drift at the same moment."""
    server.advance = {"CANCELING": "CANCELED"}  # as the server does with a run that was terminated
    replicas = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        leadership = Leadership(FolderObjects(tmp_path / name / "leases"), replica=name, seconds=600.0)
        replicas.append(Replica(tmp_path / name, "of its own", leadership, None, **changes))
        replicas[-1].bench.trigger = KubeflowTrigger.connect(replicas[-1].bench.settings)
        traffic(replicas[-1].bench, "bad", auc="bad")

    both = threading.Barrier(2, timeout=60)
    server.experiments.append({"experiment_id": "e1", "display_name": "evergreen-retraining"})
    server.before_create = lambda body: both.wait()  # both have looked, neither has created

    def work(replica):
        monitor = replica.start()
        for _ in range(6):
            monitor.tick()
            replica.bench.clock.time += 16.0
        replica.bench.kill()

    threads = [threading.Thread(target=work, args=(replica,)) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [run["state"] for run in server.runs] == ["PENDING", "CANCELED"]
    assert {run["display_name"] for run in server.runs} == {"drift-20251113T021320Z-v1"}
    for replica in replicas:
        replica.bench.log.close()


def test_a_leader_whose_lease_is_taken_while_it_submits_leaves_its_run_to_the_successor(server, tmp_path, changes):
    """The worst moment: the guard has passed, the run is created, and then the ledger refuses the stale leader."""
    leases, clocks, made = FolderObjects(tmp_path / "leases"), Clocks(), []
    clock = {"clock": lambda: clocks.wall, "monotonic": lambda: clocks.steady}
    for name in ("a", "b"):
        leadership = Leadership(leases, replica=name, seconds=600.0, **clock)
        made.append(Replica(tmp_path, name, leadership, None, **changes))
        made[-1].bench.trigger = KubeflowTrigger.connect(made[-1].bench.settings)
    stale, leader = made
    monitor = stale.start()
    traffic(stale.bench, "bad", auc="bad")
    leader.bench.clock.time = stale.bench.clock.time

    def taken_over(body):
        clocks.pass_(600.0)
        leader.start()

    server.before_create = taken_over
    with pytest.raises(NotLeading):
        monitor.tick()
    server.before_create = lambda body: None
    assert len(server.runs) == 1
    server.advance = CYCLE
    turns(leader.bench, leader.bench.monitor, 8)
    assert [run["state"] for run in server.runs] == ["SUCCEEDED"]
    assert len(leader.bench.monitor.retraining.memory.requested_at) == 1
    for replica in made:
        replica.bench.kill()
        replica.bench.log.close()
