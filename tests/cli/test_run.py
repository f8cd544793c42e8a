"""Tests that `evergreen run` leaves no child process after an interruption or wrong arguments."""

import json
import os
import signal
import subprocess
import sys

import pytest
from kfp import compiler, dsl

from cli.__main__ import main
from cli.runs import read_runs
from demo import environments
from pipelines.locations import LOCATIONS
from testing.paths import REPOSITORY
from testing.processes import wait_for
from testing.recommenders import accept_into


@dsl.component(base_image="evergreen-extraction", install_kfp_package=False)
def endless(
    lake: str,
    store: str,
    work: str,
    server: str,
    device: str,
    served: str,
):
    import os
    import pathlib
    import time

    from evergreen.registry.runs import step_note
    from evergreen.storage.uris import local_path

    with step_note(local_path(store), "run", "extraction"):
        pathlib.Path(local_path(store), "pid").write_text(str(os.getpid()))
        time.sleep(600)


@dsl.pipeline(name="tiny-endless")
def endless_pipeline(settings: str = "", trigger_id: str = ""):
    endless(**dict.fromkeys(LOCATIONS, "/of a cluster"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_stopped_run_ends_its_step_and_note_records_it(tmp_path, number, code):
    store = tmp_path / "a b" / "store"
    accept_into(store)
    package = tmp_path / "endless.yaml"
    compiler.Compiler().compile(endless_pipeline, str(package))
    command = [
        sys.executable,
        "-m",
        "cli",
        "run",
        "--package",
        str(package),
        "--folder",
        str(tmp_path / "a b"),
        "-ptrigger_id=run",
    ]
    run = subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(
        lambda: run.poll() is not None or ((store / "pid").exists() and (store / "pid").read_text())
    )
    assert run.poll() is None, run.communicate()[1]
    step = int((store / "pid").read_text())
    run.send_signal(number)
    try:
        _, errors = run.communicate(timeout=60)
        with pytest.raises(ProcessLookupError):
            os.kill(step, 0)
    finally:
        run.kill()
        subprocess.run(["kill", "-9", str(step)], stderr=subprocess.DEVNULL)
    assert run.returncode == code
    assert "Traceback" not in errors
    note = json.loads((store / "runs" / "run" / "extraction.json").read_text())
    assert (note["state"], note["reason"]) == ("failed", "stopped from outside while it worked")
    (line,) = read_runs(store)
    assert (line.state, line.step, line.reason) == ("failed", "extraction", note["reason"])


@pytest.fixture
def run_line(tmp_path):
    """Runs `evergreen run` with a package and further arguments, and returns its exit code."""

    def run(package, *words):
        return main(
            ["run", "--package", str(package), "--folder", str(tmp_path / "folder"), *words]
        )

    return run


@pytest.mark.parametrize("text", ["[1, 2", "just: words"], ids=["torn", "another"])
def test_file_that_is_no_pipeline_is_invalid_input(run_line, tmp_path, capsys, text):
    (tmp_path / "package.yaml").write_text(text)
    assert run_line(tmp_path / "package.yaml") == 2
    assert "package.yaml is not a compiled pipeline" in capsys.readouterr().err


def test_file_of_older_revision_runs_without_folders_in_its_defaults(run_line, tmp_path, capsys):
    """Packages compiled by an older revision take the run's folders as parameters."""
    accept_into(tmp_path / "folder" / "store")
    (package := tmp_path / "old.yaml").write_text(
        "root: {inputDefinitions: {parameters: {}}}\ncomponents: {}\n"
    )
    assert run_line(package) == 2
    assert (
        "old.yaml names no model registry or lake, expected a file from this revision's"
        in capsys.readouterr().err
    )
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["store"]


def test_folder_that_cannot_be_made_is_named(run_line, tmp_path, capsys):
    accept_into(tmp_path / "folder" / "store")
    (tmp_path / "folder" / "lake").write_text("a file")
    assert run_line(REPOSITORY / "tests" / "pipelines" / "golden" / "retraining.yaml") == 2
    error = capsys.readouterr().err
    assert f"error: folder {tmp_path / 'folder' / 'lake'} cannot be created: File exists" in error
    assert "Traceback" not in error


def test_absent_environment_is_named_before_anything_runs(run_line, tmp_path, monkeypatch, capsys):
    accept_into(tmp_path / "folder" / "store")
    monkeypatch.setattr(
        environments, "python_of", lambda name: tmp_path / ".venvs" / name / "bin" / "python"
    )
    assert run_line(REPOSITORY / "tests" / "pipelines" / "golden" / "retraining.yaml") == 2
    assert "environment driver is absent, expected " in capsys.readouterr().err
