"""Tests of the local runner: the handler that KFP calls, and the errors of failed runs."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.runner import STEP_NICENESS, PipelineFailed, at_low_priority
from evergreen.runtime.exit_codes import ExitCode
from tests.support.errors import raises


def test_tasks_run_in_environment_of_their_image_and_clean_up_files(run_tiny, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = run_tiny(passes=True)
    assert "word from first, threads None" in (folder / "logs" / "extraction.log").read_text()
    assert "threads 1" in (folder / "logs" / "training.log").read_text()
    assert capfd.readouterr().out == ""
    prefix, temporary, virtual_env = (folder / "first").read_text().splitlines()
    assert prefix == virtual_env == sys.prefix
    assert not Path(temporary).exists()


def test_log_of_run_has_one_line_per_step(run_tiny, caplog):
    caplog.set_level(logging.INFO)
    handlers = logging.getLogger("demo.runner").handlers[:]
    run_tiny(passes=True)
    steps = [record.args[0] for record in caplog.records if "exited with" in record.msg]
    assert len(steps) == len(set(steps))
    assert {"extraction", "training"} <= set(steps)
    assert logging.getLogger("demo.runner").handlers == handlers


def test_steps_yield_cpu_to_server_and_get_their_arguments_unchanged():
    look = (
        "import os, sys, pathlib; print(os.nice(0), sys.argv[1:]); p = "
        "pathlib.Path('/proc/self/autogroup')\n"
    )
    look += "print(p.read_text().split()[-1] if p.exists() and p.read_text() else 'none')"
    done = subprocess.run(
        at_low_priority([sys.executable, "-c", look, "two words", "$HOME"]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        start_new_session=True,
    )
    niceness, group = done.stdout.splitlines()
    assert niceness == f"{min(os.nice(0) + STEP_NICENESS, 19)} ['two words', '$HOME']"
    assert group in (str(STEP_NICENESS), "none")


def test_gate_that_refuses_skips_next_step_and_still_succeeds(run_tiny):
    folder = run_tiny(passes=False)
    assert not (folder / "second").exists()
    assert (folder / "last").read_text() == "SUCCEEDED"


def test_failing_step_raises_after_exit_handler_ran(run_tiny):
    with raises(PipelineFailed, "tiny"):
        run_tiny(passes=True, fails=True)
    assert (run_tiny.folder / "last").read_text() == "FAILED"
    assert "planted failure" in (run_tiny.folder / "logs" / "training.log").read_text()


def test_preempted_task_is_retried_as_often_as_pipeline_says(run_tiny):
    assert ExitCode.PREEMPTED == 75, "the planted step exits with 75"
    folder = run_tiny(passes=True, preemptions=2)
    assert (folder / "second").read_text() == "ran\n" * 3
    assert (folder / "last").read_text() == "SUCCEEDED"


def test_step_that_refuses_its_input_ends_run_without_retry(run_tiny):
    with pytest.raises(PipelineFailed):
        run_tiny(passes=True, refuses=True)  # The pipeline waits an hour between retries.
    assert (run_tiny.folder / "second").read_text() == "ran\n"
    assert (run_tiny.folder / "last").read_text() == "FAILED"
