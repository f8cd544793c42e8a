"""Fixtures that run a monitor during a test."""

import json
import os
import signal

import pytest

from tests.support.monitor_processes import Processes
from tests.support.monitors import Bench


@pytest.fixture
def bench(tmp_path):
    made = []

    def make(**changes) -> Bench:
        made.append(Bench(tmp_path, **changes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def started(bench):
    """`started(**settings)` returns a bench with a running monitor."""

    def make(**changes) -> Bench:
        b = bench(**changes)
        b.start()
        return b

    return make


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
    for note in made.state.glob("runs/*.json"):
        with_group = json.loads(note.read_text())["process_group"]
        try:
            os.killpg(with_group, signal.SIGKILL)
        except ProcessLookupError:
            continue
    made.log.close()
