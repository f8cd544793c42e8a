"""Tests of a full disk under a running monitor: the monitor continues and loses nothing."""

import errno
import resource
import time
from contextlib import suppress

import pytest

import monitoring.journal
from evergreen.runtime.durable import append_line
from evergreen.runtime.errors import TemporaryError
from monitoring.journal import DECISIONS_FILE, EVENTS_FILE, TIMELINE_FILE
from testing.processes import wait_for
from tests.support.monitors import DRIFT, Bench, prediction, publish

QUIET = {**DRIFT, "policies": "threshold", "cooldown_seconds": 1e9}


def go_through(b: Bench, *, is_full) -> None:
    """Run four rounds of good and bad traffic.

    The function `is_full` is called with the number of each turn.
    """
    for number in range(4):
        b.clock.advance(1.0)
        for part in range(3):
            is_full(3 * number + part)
            with suppress(TemporaryError):
                if part == 0:
                    b.evaluate(f"round {number}", auc="bad" if number % 2 else "good")
                else:
                    b.monitor.tick()
            b.clock.advance(1.0)


def lines_of(b: Bench, name: str) -> list[str]:
    return (b.settings.state / name).read_text().splitlines()


@pytest.mark.parametrize("file", [EVENTS_FILE, TIMELINE_FILE, DECISIONS_FILE])
def test_lines_that_full_disk_refuses_are_written_once_disk_has_space(tmp_path, monkeypatch, file):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    undisturbed, disturbed = (Bench(folder, **QUIET) for folder in folders)
    full, refused = [False], []

    def append(path, line: str) -> None:
        if full[0] and path.name == file:
            refused.append(line)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        append_line(path, line)

    try:
        undisturbed.start()
        go_through(undisturbed, is_full=lambda number: None)
        monkeypatch.setattr(monitoring.journal, "append_line", append)
        disturbed.start()
        go_through(disturbed, is_full=lambda number: full.__setitem__(0, number in (0, 1, 3, 4, 6)))
        assert refused
        assert lines_of(disturbed, DECISIONS_FILE) == lines_of(undisturbed, DECISIONS_FILE)
        assert sorted(disturbed.kinds()) == sorted(undisturbed.kinds())
        assert len(lines_of(disturbed, TIMELINE_FILE)) == len(lines_of(undisturbed, TIMELINE_FILE))
        assert [request.request_id for request in disturbed.trigger.requests] == [
            request.request_id for request in undisturbed.trigger.requests
        ]
        assert disturbed.store.counters["matured"] == undisturbed.store.counters["matured"]
    finally:
        undisturbed.close()
        disturbed.close()


def test_more_lines_than_wait_in_memory_are_counted(started, monkeypatch):
    b = started()
    monkeypatch.setattr(monitoring.journal, "_MAX_WAITING_LINES", 10)

    def refuse(path, line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(monitoring.journal, "append_line", refuse)
    for number in range(25):
        b.monitor.journal.emit("a kind", f"event {number}")
    assert "10 lines of events and numbers cannot be written" in b.monitor.journal.problem
    assert str(b.settings.state / EVENTS_FILE) in b.monitor.journal.problem
    monkeypatch.setattr(monitoring.journal, "append_line", append_line)
    b.tick()
    texts = [event["text"] for event in b.events][-11:]
    assert texts[:-1] == [f"event {number}" for number in range(15, 25)]
    assert texts[-1] == "15 lines were lost while they could not be written"
    assert b.monitor.journal.problem is None


def test_running_monitor_survives_full_disk_and_names_unwritable_files(processes):
    process = processes.monitor(policies="schedule", max_serving_seconds=1e9)
    wait_for(lambda: processes.get("/readyz").status == 200, "the monitor")
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    # With this limit, the kernel rejects any write that makes a file longer than 64 bytes. The
    # write fails as on a full disk.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (64, before[1]))
    now = time.time()
    publish(processes.log, *(prediction(f"r{number}", 4, time=now) for number in range(20)))
    refusal = wait_for(lambda: processes.refusal("/readyz"), "the refusal")
    assert str(processes.folder) in refusal
    assert processes.get("/healthz").status == 200
    assert process.poll() is None
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
    wait_for(lambda: processes.get("/readyz").status == 200, "the monitor's recovery")
    wait_for(lambda: processes.counter("predicted") == 80, "all rows")
    assert processes.end(process) == 0
    assert processes.log.backlog() == 0
