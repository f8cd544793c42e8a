"""Tests of local runs: a lock prevents parallel runs, and exit code or note give the result."""

import json
import os
import shlex
import signal
import sys

import pytest

from evergreen.contracts.manifests import RetrainRequest
from evergreen.registry.runs import RunOutcome, write_outcome
from evergreen.runtime.errors import PermanentError
from monitoring.retraining.triggers import LocalTrigger
from testing.processes import wait_for
from tests.support.errors import raises
from tests.support.monitors import retrain_request as request

WAIT_FOR = (
    "import sys, time, pathlib\nwhile not pathlib.Path({go!r}).exists(): "
    "time.sleep(0.01)\nsys.exit({code})"
)


@pytest.fixture
def make(tmp_path):
    folder = tmp_path / "with a space"
    folder.mkdir()

    def trigger(code: int = 0) -> LocalTrigger:
        script = WAIT_FOR.format(go=str(folder / "go"), code=code)
        return LocalTrigger(
            folder / "state", folder / "store", shlex.join([sys.executable, "-c", script])
        )

    trigger.go, trigger.folder = folder / "go", folder
    yield trigger
    trigger.go.touch()


def ended(trigger, name):
    return wait_for(lambda: (s := trigger.state(name)).state not in ("running",) and s, "the end")


def test_second_request_is_busy_and_same_request_already_exists(make):
    first = make()
    assert first.submit(request("a")) == "started"
    for trigger in (first, make()):  # the second trigger belongs to a restarted monitor
        assert trigger.submit(request("a")) == "already"
        assert trigger.submit(request("b")) == "busy"
        assert trigger.state("a").state == "running"
        assert trigger.state("b").state == "unknown"
    make.go.touch()
    assert ended(make(), "a").state == "released"
    assert first.submit(request("a")) == "already"
    assert first.submit(request("b")) == "started"
    assert ended(first, "b").state == "released"


@pytest.mark.parametrize(
    ("code", "state"), [(0, "released"), (1, "refused"), (2, "failed"), (9, "failed")]
)
def test_exit_code_determines_outcome_of_run(make, code, state):
    trigger = make(code)
    trigger.submit(request("a"))
    make.go.touch()
    found = ended(trigger, "a")
    assert found.state == state
    assert f"exit code {code}" in found.reason


def test_runs_own_outcome_comes_before_its_exit_code(make):
    trigger = make(0)
    trigger.submit(request("a"))
    ended_so = {"state": "refused", "step": "evaluation", "reason": "auc fell", "version": None}
    outcome = RunOutcome(run="a", trigger_id="a", ended_at="2026-01-01", **ended_so)
    write_outcome(make.folder / "store", outcome)
    assert trigger.state("a").state == "running"  # the process still runs
    make.go.touch()
    assert ended(trigger, "a") == ("refused", "evaluation: auc fell", None)


def test_run_gets_request_file_and_its_output_is_stored(make):
    echo = shlex.join(
        [sys.executable, "-c", "import sys; print(sys.argv[1:]); print('loud', file=sys.stderr)"]
    )
    trigger = LocalTrigger(make.folder / "state", make.folder / "store", echo)
    trigger.submit(request("a"))
    ended(trigger, "a")
    path = make.folder / "state" / "requests" / "a.json"
    assert RetrainRequest.read(path) == request("a")
    output = (make.folder / "state" / "runs" / "a.log").read_text()
    assert f"['--request', {str(path)!r}]" in output
    assert "loud" in output


def test_killed_run_is_unknown(make):
    trigger = make()
    trigger.submit(request("a"))
    os.killpg(
        json.loads((make.folder / "state" / "runs" / "a.json").read_text())["process_group"],
        signal.SIGKILL,
    )
    assert ended(trigger, "a").state == "unknown"


def test_command_that_does_not_exist_fails(make):
    trigger = LocalTrigger(make.folder / "state", make.folder / "store", "no-such-program --at all")
    trigger.submit(request("a"))
    assert ended(trigger, "a").state == "failed"


def test_unfinished_quote_is_refused(make):
    with raises(PermanentError, "No closing quotation"):
        LocalTrigger(make.folder / "state", make.folder / "store", "run 'it")
