"""Tests of work in forked processes: order, the caller's errors, and cleanup after a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from evergreen.runtime import forked
from evergreen.runtime.errors import ContractError, TemporaryError
from testing.processes import runs, wait_for
from tests.support.errors import raises, says

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_results_come_in_order_of_items(processes):
    factor = 3  # The function may be a closure, because nothing is pickled.
    assert forked.run_all(lambda item: item * factor, range(20), processes=processes) == [
        3 * i for i in range(20)
    ]


def test_work_is_done_in_other_processes_and_few_items_in_this_one():
    assert forked.run_all(lambda _: os.getpid(), [1], processes=4) == [os.getpid()]
    assert os.getpid() not in forked.run_all(lambda _: os.getpid(), [1, 2], processes=2)


@pytest.mark.parametrize("processes", [1, 2])
def test_error_of_work_reaches_caller(processes):
    def refuse(item):
        raise ContractError(f"item {item} is wrong")

    with raises(ContractError, "item 0"):
        forked.run_all(refuse, range(3), processes=processes)


def test_killed_process_is_temporary_error_and_leaves_no_child():
    def end(item):
        if item:
            os.kill(os.getpid(), signal.SIGKILL)

    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with says(TemporaryError, "process-killed", processes=2):
        forked.run_all(end, [0, 1], processes=2)
    assert children.read_text() == before  # No process is left without a parent that waits for it.


def test_of_several_errors_that_of_first_item_is_reported_however_slow(tmp_path):
    def refuse(item):
        if item:
            (tmp_path / "done").touch()
        else:
            wait_for((tmp_path / "done").exists)
        raise ContractError(f"item {item} is wrong")

    with raises(ContractError, "item 0") as refused:
        forked.run_all(refuse, range(3), processes=2)
    # The traceback contains the failing line of the other process.
    assert "in refuse" in str(refused.value.__cause__)


class Unlike:
    """An exception that cannot be unpickled."""

    def __reduce__(self):
        return int, ("none",)

    def __repr__(self):
        return "item 5"


def test_error_that_cannot_be_pickled_is_reported_by_its_text():
    def refuse(_):
        raise ContractError(Unlike())

    with raises(RuntimeError, "ContractError", "item 5"):
        forked.run_all(refuse, range(2), processes=2)


@pytest.fixture
def at_work(tmp_path):
    """A parent of two waiting processes, and their ids."""
    script = f"""
import os, signal, sys, time
from pathlib import Path
from evergreen.runtime.forked import run_all
def stop(signum, frame):  # as `runs.step_note` does
    raise SystemExit(128 + signum)
signal.signal(signal.SIGTERM, stop)
def wait(item):
    Path({str(tmp_path)!r}, str(os.getpid())).touch()
    time.sleep(600)
run_all(wait, [1, 2, 3, 4], processes=2)
"""
    command = [sys.executable, "-c", script]
    parent = subprocess.Popen(
        command, cwd=REPOSITORY, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        yield parent, [int(path.name) for path in tmp_path.iterdir()]
    finally:
        parent.kill()
        parent.wait()
        parent.stderr.close()


def test_processes_end_with_parent_that_is_killed(at_work):
    parent, processes = at_work
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(map(runs, processes)))


def test_ending_parent_does_not_wait_for_its_processes(at_work):
    parent, processes = at_work
    parent.terminate()
    wait_for(lambda: parent.poll() is not None)
    assert parent.returncode == 128 + signal.SIGTERM
    assert not any(map(runs, processes))


def test_interrupt_from_terminal_ends_all_and_is_reported_once(at_work):
    parent, processes = at_work
    os.killpg(parent.pid, signal.SIGINT)
    wait_for(lambda: parent.poll() is not None)
    assert not any(map(runs, processes))
    assert parent.stderr.read().count("KeyboardInterrupt") == 1


@pytest.mark.parametrize(
    ("content", "cores"),
    [("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("", 4)],
)
def test_cpu_limit_of_container_bounds_cores(tmp_path, monkeypatch, content, cores):
    limit = tmp_path / "cpu.max"
    limit.write_text(content)
    monkeypatch.setattr(forked, "_CPU_MAX", limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert forked.available_cores() == cores


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_shares_are_all_items_in_order_and_sizes_differ_by_at_most_one(number):
    random = Random(number)
    for _ in range(200):
        weights = [random.choice([1, 2, 50, 131_072]) for _ in range(random.randint(1, 12))]
        shares = forked.shares(list(enumerate(weights)), number, weight=lambda item: item[1])
        assert [item for share in shares for item in share] == list(enumerate(weights))
        assert all(shares)
        assert len(shares) <= number
        for share in shares:
            assert sum(weight for _, weight in share) <= sum(weights) / number + max(weights)
