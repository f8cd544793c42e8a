"""Tests of the demo's processes: all are ended, and failures are reported."""

import subprocess
import sys
from pathlib import Path

import pytest

from demo.demo import describe_step
from demo.stack import JsonLines, ProcessDied, Stack, tagged_processes
from evergreen.registry.runs import StepNote
from testing.processes import wait_for
from tests.support.errors import raises, raises_text

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    "start_new_session=True);"
    "print('up', flush=True); time.sleep(600)",
]


@pytest.fixture
def stack(tmp_path):
    with Stack(logs=tmp_path / "logs", variables={}) as stack:
        yield stack


def _is_up(tmp_path, name):
    return lambda: "up" in (tmp_path / "logs" / f"{name}.log").read_text()


def test_leaving_stack_ends_children_and_grandchildren(tmp_path):
    with Stack(logs=tmp_path / "logs", variables={}) as stack:
        child = stack.start("child", SLEEP)
        parent = stack.start(
            "parent", [*STUBBORN[:2], STUBBORN[2].replace("signal.SIG_IGN", "signal.SIG_DFL")]
        )
        stack.wait_until(_is_up(tmp_path, "parent"), what="start", seconds=120)
        tag = next(iter(stack.tag_variables.values()))
        assert len(tagged_processes(tag)) == 3
    assert child.poll() is not None
    assert parent.poll() is not None
    assert tagged_processes(tag) == []


def test_process_that_ignores_sigterm_is_killed(stack, tmp_path):
    child = stack.start("child", STUBBORN)
    stack.wait_until(_is_up(tmp_path, "child"), what="start", seconds=120)
    stack.stop("child", seconds=0.2)
    assert child.returncode == -9


def test_end_of_process_is_reported_with_last_line_of_log(stack, tmp_path):
    stack.start("server", [sys.executable, "-c", "raise SystemExit('port 80 is taken')"])
    with raises_text(
        ProcessDied,
        "process-ended",
        name="server",
        code=1,
        last="port 80 is taken",
        log=tmp_path / "logs" / "server.log",
    ):
        stack.wait_until(lambda: False, what="nothing", seconds=120)


def test_optional_process_is_reported_only_if_it_failed(stack):
    stack.start("rows", [sys.executable, "-c", ""], may_end=True)
    ended = stack.start("broken", [sys.executable, "-c", "raise SystemExit(2)"], may_end=True)
    with raises(ProcessDied, "broken", "code 2"):
        stack.wait_until(lambda: False, what="nothing", seconds=120)
    assert ended.returncode == 2


def test_killed_owner_ends_its_processes(tmp_path):
    owner = (
        "import sys, time; from pathlib import Path; from demo.stack import Stack\n"
        "stack = Stack(logs=Path(sys.argv[1]), variables={})\n"
        "print(stack.start('child', [sys.executable, '-c', 'import time; time.sleep(600)']).pid, "
        "flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", owner, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not Path(f"/proc/{child}").exists())


def test_line_being_written_is_read_when_it_is_complete(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    assert lines.update() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert lines.update() == [{"a": 1}]
    with open(path, "a") as file:
        file.write("2}\n")
    assert lines.update() == [{"a": 2}]
    assert lines.lines == [{"a": 1}, {"a": 2}]


RELEASED = {"version": 2, "parity_max_abs_diff": 3e-7, "parity_rows": 4096}


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (
            StepNote(
                step="deployment",
                state="done",
                reason="version 2 serves; pass",
                seconds=1.25,
                facts=RELEASED,
            ),
            "deployment done in 1.2 s: version 2 serves, parity 3.0e-07 over 4,096 rows",
        ),
        (
            StepNote(
                step="deployment",
                state="failed",
                reason="OSError: full",
                seconds=1.0,
                facts=RELEASED,
            ),
            "deployment failed in 1.0 s: OSError: full",
        ),
        (
            StepNote(
                step="training",
                state="done",
                seconds=2.0,
                facts={"progressive_auc": None, "rows_per_second": 1.0},
            ),
            "training done in 2.0 s",
        ),
    ],
    ids=["facts", "failure", "a fact that does not exist"],
)
def test_step_is_described_by_its_facts_or_its_reason(note, text):
    assert describe_step(note) == text
