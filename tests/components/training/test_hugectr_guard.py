"""Tests of aborts and hangs of HugeCTR, as the double simulates them: the step fails cleanly."""

import signal

import pytest

from components.training.hugectr.guard import bounded
from evergreen.registry.runs import read_notes
from evergreen.runtime.exit_codes import ExitCode
from tests.support.hugectr_processes import LONG, ended, environment, start, wait_for_save


@pytest.fixture
def training_set(planted, make_training_set):
    return make_training_set(*planted.rows(600)[:3])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("double_fate.abort('row count')", ["row count", "was killed by SIGABRT"]),
        (
            "double_fate.hang('the thread ended')",
            ["the thread ended", "in train", "took longer than solver.call_minutes"],
        ),
    ],
    ids=["abort", "hang"],
)
def test_death_of_hugectr_is_failure_with_reason(step_flags, training_set, tmp_path, fault, words):
    flags = step_flags(training_set, training={"solver": {"call_minutes": 0.1}})
    code, text = ended(start(flags, environment(tmp_path / "faulty", fault)))
    assert code == ExitCode.FAILED, text
    assert all(each in text for each in words), text
    (note,) = read_notes(tmp_path / "a store", "r1")
    assert note.state == "failed"
    assert words[-1] in note.reason
    assert not (tmp_path / "out" / "model.json").exists()
    assert not list((tmp_path / "faulty" / "tmp").iterdir()), "temporary files remain"
    assert not (tmp_path / "a work" / "r1" / "training" / "engine").exists()


@pytest.mark.slow
def test_sigterm_saves_and_same_command_continues(step_flags, training_set, tmp_path):
    flags = step_flags(training_set, training=LONG)
    process = start(flags, environment(tmp_path / "first"))
    wait_for_save(process, tmp_path / "a work")
    process.send_signal(signal.SIGTERM)
    code, text = ended(process)
    assert code == ExitCode.PREEMPTED, text
    assert "preempted: stopped on request: saved in pass" in text
    code, text = ended(start(flags, environment(tmp_path / "second")))
    assert code == ExitCode.DONE, text


def test_error_of_child_keeps_its_code_and_message(step_flags, training_set, tmp_path):
    flags = step_flags(training_set, model={"kind": "dlrm"})
    code, text = ended(start(flags, environment(tmp_path / "first")))
    assert code == ExitCode.BAD_INPUT, text
    assert "error: network is 'dlrm', expected dcn" in text


def test_watchdog_is_armed_only_within_its_body(monkeypatch):
    calls = []
    name = "components.training.hugectr.guard.faulthandler"
    monkeypatch.setattr(f"{name}.dump_traceback_later", lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr(f"{name}.cancel_dump_traceback_later", lambda: calls.append("cancel"))
    with bounded(2.0) as restart:
        assert len(calls) == 1
        restart()
    armed = ((120.0,), {"exit": True, "file": 2})
    assert calls == [armed, armed, "cancel"]
