"""Tests of monitor and uploader as processes: signals, local runs and bad settings."""

import contextlib
import os
import shlex
import socket
import sqlite3
import sys
import time

import pytest

from testing.processes import wait_for
from tests.support.monitors import clicks, prediction, publish, read_events

RUN = """
import json, os, sys, time
from pathlib import Path
request = json.loads(Path(sys.argv[-1]).read_text())
folder = Path({folder!r})
with open(folder / "runs.txt", "a") as file:
    file.write(request["request_id"] + "\\n")
while not (folder / "go").exists():
    time.sleep(0.02)
sys.exit({code})
"""


FAILED = pytest.param(7, "failed", marks=pytest.mark.slow)


@pytest.mark.parametrize(("code", "outcome"), [(0, "released"), FAILED])
def test_drift_starts_one_local_run_that_survives_death_of_monitor(processes, code, outcome):
    p = processes
    command = shlex.join([sys.executable, "-c", RUN.format(folder=str(p.folder), code=code)])
    flags = {
        "trigger": "local",
        "run_command": command,
        "min_clicks": 20,
        "consecutive_breaches": 1,
    }
    flags |= {"policies": "threshold", "auc_threshold": 0.74}
    flags |= {"decide_seconds": 0.1}
    flags |= {"upload_wait_seconds": 30.0, "attribution_window_seconds": 0.2}
    uploader = p.start(
        "monitoring.uploader", {"archive": p.archive, "lake": p.lake, "interval_seconds": 0.05}
    )
    monitor = p.monitor(**flags)

    def traffic(name: str) -> None:
        """Publish random clicks with an AUC of 0.5."""
        now, requests = time.time(), [f"{name}-{number}" for number in range(20)]
        clicked = [(request, row, now) for request in requests for row in range(0, 20, 4)]
        publish(
            p.log,
            *(prediction(request, 20, time=now) for request in requests),
            clicks(f"o-{name}", clicked),
        )

    traffic("first")
    wait_for((p.folder / "runs.txt").exists, "the run")
    monitor.kill()
    monitor.wait()
    traffic("while down")
    monitor = p.monitor(**flags)
    traffic("after")
    wait_for(lambda: p.counter("matured") == 1200, "labels after the restart")
    assert '"phase": "running"' in p.page("/status")
    (p.folder / "go").touch()

    def ended():
        return [event for event in read_events(p.state) if event["kind"] == "run_ended"]

    wait_for(ended, "the run's end")
    traffic("held")
    wait_for(lambda: "held" in [event["kind"] for event in read_events(p.state)], "the hold")
    assert p.end(monitor) == 0
    assert p.end(uploader) == 0
    (request_id,) = (p.folder / "runs.txt").read_text().split()
    assert [(event["request_id"], event["outcome"]) for event in ended()] == [(request_id, outcome)]
    # If the monitor is killed between an action and its record, it reports the action again.
    kinds = list(dict.fromkeys(event["kind"] for event in read_events(p.state)))
    order = ["decision", "archived", "uploaded", "requested", "run_started", "run_ended"]
    assert [kind for kind in kinds if kind in order and kind != "archived"] == [
        k for k in order if k != "archived"
    ]
    (decision,) = [event for event in read_events(p.state) if event["kind"] == "decision"]
    assert decision["auc"] == pytest.approx(0.5, abs=0.1)


def test_state_is_private_and_run_keeps_its_usual_permissions(processes):
    p = processes
    p.state.mkdir(mode=0o755)
    seen = p.folder / "umask"
    command = shlex.join(["sh", "-c", f'umask > "{seen}"', "run"])
    flags = {
        "trigger": "local",
        "run_command": command,
        "policies": "schedule",
        "max_serving_seconds": 0.1,
    }
    monitor = p.monitor(**flags, attribution_window_seconds=0.2, upload_wait_seconds=0.0)
    now = time.time()
    publish(p.log, *(prediction(f"r{number}", 20, time=now + number / 10) for number in range(20)))
    wait_for(seen.exists, "the run")
    assert int(seen.read_text(), 8) == current_umask()
    assert p.end(monitor) == 0
    paths = [p.state, *p.state.rglob("*"), *p.archive.rglob("*.parquet")]
    assert {"monitor.db", "events.jsonl", "decisions.jsonl", "http.json"} <= {
        path.name for path in paths
    }
    own = [path for path in paths if path.parent.name != "runs"]
    assert [(path, oct(path.stat().st_mode)) for path in own if path.stat().st_mode & 0o077] == []


def current_umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_two_monitors_cannot_share_state_folder(processes):
    first = processes.monitor()
    wait_for((processes.state / "events.jsonl").exists, "the first monitor")
    second = processes.monitor()
    assert second.wait(120) == 3
    assert "is open in another monitor" in (processes.folder / "monitoring.1.log").read_text()
    assert first.poll() is None


def test_log_absent_at_start_is_waited_for_and_process_stays_healthy(processes):
    p = processes
    with contextlib.closing(sqlite3.connect(p.folder / "log.db", isolation_level=None)) as somebody:
        somebody.execute("BEGIN EXCLUSIVE")
        monitor = p.monitor()
        reason = wait_for(lambda: p.refusal("/readyz"), "the reason")
        assert "the last iteration failed" in reason
        assert p.page("/healthz") == "ok\n"
        somebody.execute("ROLLBACK")
    wait_for(lambda: p.page("/readyz") == "ok\n", "readiness")
    assert p.end(monitor) == 0


def test_waiting_monitor_ends_at_once_on_request(processes):
    p = processes
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monitor = p.monitor(log=f"kafka://127.0.0.1:{port}/records?group=monitor")
    assert "the log cannot deliver" in wait_for(lambda: p.refusal("/readyz"), "the reason")
    assert p.end(monitor, seconds=20.0) == 0
