"""Tests that a publisher's hostile records neither stop a monitor nor fill its memory."""

import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from evergreen.config.features import Features
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import MAX_ROWS_PER_RECORD
from monitoring.state.admission import MAX_OTHERS
from testing.processes import wait_for
from tests.support.monitors import prediction
from tests.support.record_messages import encode

NARROW = RecordFormat(Features(numeric=("price",), categorical=()))
"""Writes rows that have only one of the recommender's columns. The monitor fills in the missing
columns."""
SLOWER = 10.0
"""Factor by which answers may be slower on a machine that runs other tests. On an idle machine,
/healthz takes at most 0.05 s."""
MAX_MEGABYTES = 500
"""Half of the memory of the monitor's pod."""


def narrow(name: str, rows: int, **changes) -> bytes:
    whole = prediction(name, rows, **changes)
    return NARROW.encode(
        replace(whole, dense=whole.dense[:, :1], categorical=whole.categorical[:, :0])
    )


def with_id(name: str, rows: int) -> bytes:
    record = prediction("short", rows, time=time.time())
    object.__setattr__(record, "request_id", name)
    return encode(record)


def wide_rows() -> list[bytes]:
    """Return messages of 15 kB each, whose decoded rows take 0.6 MB each."""
    return [narrow(f"r{number}", MAX_ROWS_PER_RECORD, time=time.time()) for number in range(400)]


def long_ids() -> list[bytes]:
    return [with_id("r" * 850_000, 400), with_id("r" * 900_000, 250)] * 20


def versions() -> list[bytes]:
    return [
        narrow(f"r{number}", 1, time=time.time(), version=number, seed=0)
        for number in range(100_000)
    ]


def days() -> list[bytes]:
    times = time.time() - 86_400.0 * np.arange(15_000)
    return [
        narrow(f"r{number}", 1, time=max(at, 0.0), seed=0)
        for number, at in enumerate(times.tolist())
    ]


def minutes() -> list[bytes]:
    times = time.time() - 120.0 * np.arange(15_000)
    return [narrow(f"r{number}", 1, time=at, seed=0) for number, at in enumerate(times.tolist())]


@contextmanager
def probed(processes):
    """Yield the response time of each call of /healthz in seconds.

    A call with another status than 200 has an infinite response time.
    """
    seconds: list[float] = []
    over = Event()

    def probe() -> None:
        while not over.is_set():
            began = time.monotonic()
            answer = processes.get("/healthz")
            seconds.append(time.monotonic() - began if answer.status == 200 else float("inf"))
            over.wait(0.05)

    thread = Thread(target=probe)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def peak_megabytes(pid: int) -> float:
    (line,) = [
        each
        for each in Path(f"/proc/{pid}/status").read_text().splitlines()
        if each.startswith("VmHWM")
    ]
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize(
    ("flood", "num_taken"),
    [(wide_rows, 400), (long_ids, 0), (versions, MAX_OTHERS), (days, 40), (minutes, 15_000)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_flood_leaves_monitor_small_responsive_and_stoppable(processes, flood, num_taken):
    process = processes.monitor(policies="schedule", max_serving_seconds=1e9)
    wait_for(lambda: processes.get("/readyz").status == 200, "the monitor")
    messages = flood()
    with probed(processes) as seconds:
        processes.log.publish([(f"m{number}", message) for number, message in enumerate(messages)])
        wait_for(lambda: processes.log.backlog() == 0, "all messages", seconds=300.0)
        began = time.monotonic()
        peak = peak_megabytes(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SLOWER * 20.0) == 0
    print(
        f"{flood.__name__}: {peak:.0f} MB, healthz {max(seconds):.3f} s, stop "
        f"{time.monotonic() - began:.1f} s"
    )
    assert peak < MAX_MEGABYTES
    assert max(seconds) < SLOWER * 1.0
    dead = processes.log.list_dead_letters()
    assert abs(len(messages) - len(dead) - num_taken) <= 1  # midnight may pass during the test
