"""Work among forked processes: in order, with the caller's errors, and nothing left where somebody is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.contracts import forked
from components.contracts.errors import ContractError, TemporaryError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(processes):
    factor = 3  # of a closure: nothing of it is pickled
    assert forked.run_all(lambda item: item * factor, range(20), processes=processes) == [3 * i for i in range(20)]


def test_work_is_done_in_other_processes_and_few_items_in_this_one():
    assert forked.run_all(lambda _: os.getpid(), [1], processes=4) == [os.getpid()]
    assert os.getpid() not in forked.run_all(lambda _: os.getpid(), [1, 2], processes=2)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_of_the_work_is_the_callers(processes):
    def refuse(item):
        raise ContractError(f"item {item} is wrong")

    with pytest.raises(ContractError, match="item 0 is wrong"):
        forked.run_all(refuse, range(3), processes=processes)


def test_a_killed_process_is_a_temporary_error_and_leaves_no_child():
    def end(item):
        if item:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(TemporaryError, match="one of 2 processes was killed"):
        forked.run_all(end, [0, 1], processes=2)
    with pytest.raises(ChildProcessError):  # none that runs, and none that nobody waited for
        os.waitpid(-1, os.WNOHANG)


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    script = f"""
import os, sys, time
from pathlib import Path
from components.contracts.forked import run_all
def wait(item):
    Path({str(tmp_path)!r}, str(os.getpid())).touch()
    time.sleep(600)
run_all(wait, [1, 2], processes=2)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY)
    try:
        _until(lambda: len(list(tmp_path.iterdir())) == 2)
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not any(_runs(int(path.name)) for path in tmp_path.iterdir()))


def _until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("", 4)]
)
def test_a_containers_limit_bounds_the_cores(tmp_path, monkeypatch, content, cores):
    limit = tmp_path / "cpu.max"
    limit.write_text(content)
    monkeypatch.setattr(forked, "_CPU_MAX", limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert forked.available_cores() == cores
