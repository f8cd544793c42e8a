"""Environments are rebuilt when, and only when, a lock changed or a build did not end."""

import os
import shutil
import subprocess

import pytest

from pipelines.local import environments


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "requirements").mkdir()
    for lock in environments.locks_of("serving", tmp_path):
        lock.write_text("# nothing\n")
    return tmp_path


def test_built_environment_is_current_until_a_lock_changes(repository):
    assert not environments.is_current("serving", repository)
    environments.build("serving", repository)
    assert environments.is_current("serving", repository)
    assert environments.python_of("serving", repository).exists()
    environments.locks_of("serving", repository)[1].write_text("# something else\n")
    assert not environments.is_current("serving", repository)
    shutil.rmtree(repository / ".venvs")


def test_failed_build_names_its_log_and_stays_unfinished(repository):
    environments.locks_of("serving", repository)[0].write_text("./no-such-package\n")
    with pytest.raises(
        environments.BuildFailed, match="serving could not be built, see .*serving.log: .*no-such-package"
    ):
        environments.build("serving", repository)
    assert not environments.is_current("serving", repository)


def test_every_environment_has_its_locks_and_every_pin_is_exact():
    for name in (*environments.ENVIRONMENTS, *environments.ON_DEMAND):
        for lock in environments.locks_of(name):
            pins = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
            assert pins
            assert all(pin.count("==") == 1 and "+" not in pin for pin in pins), lock


def _pins(name):
    locks = environments.locks_of(name)
    return dict(line.split("==") for lock in locks for line in lock.read_text().splitlines() if "==" in line)


def test_benchmarks_measure_the_versions_that_training_is_locked_to():
    training, benchmarks = _pins("training"), _pins(environments.BENCHMARKS)
    assert {"torch", "numpy", "pyarrow", "scikit-learn"} <= training.keys() & benchmarks.keys()
    assert {name: training[name] for name in training.keys() & benchmarks.keys()}.items() <= benchmarks.items()


def test_serving_is_measured_against_the_versions_that_its_own_side_is_locked_to():
    peers, serving, preprocessing = _pins(environments.SERVING_PEERS), _pins("serving"), _pins("preprocessing")
    assert peers["onnxruntime"] == serving["onnxruntime"]
    assert peers["numpy"] == serving["numpy"]
    assert {
        name: peers[name] for name in ("nvtabular", "merlin-core", "pandas", "dask")
    }.items() <= preprocessing.items()


def test_monitor_is_measured_with_the_versions_that_it_is_locked_to():
    peers, driver = _pins(environments.MONITOR_PEERS), _pins("driver")
    shared = peers.keys() & driver.keys() - {"setuptools"}
    assert {"numpy", "pyarrow", "scikit-learn", "prometheus_client"} <= shared
    assert {name: driver[name] for name in shared} == {name: peers[name] for name in shared}


def test_environment_whose_interpreter_is_gone_is_built_anew(repository):
    stamp = repository / ".venvs" / "serving" / environments.STAMP
    stamp.parent.mkdir(parents=True)
    stamp.write_text(environments.lock_hash("serving", repository))
    python = environments.python_of("serving", repository)
    python.parent.mkdir()
    python.symlink_to(repository / "an interpreter that was upgraded away")
    assert not environments.is_current("serving", repository)


def test_disk_that_cannot_be_written_is_said_without_a_traceback(repository):
    (repository / ".venvs").write_text("a file in the folder's place")
    with pytest.raises(environments.BuildFailed, match="environment serving could not be built: .*File exists"):
        environments.build("serving", repository)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
@pytest.mark.parametrize("broken", [False, True], ids=["absent", "without venv"])
def test_make_without_a_working_python_3_11_says_what_to_do(tmp_path, broken):
    for name in ("bash", "sh", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    if broken:
        (tmp_path / "python3.11").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "python3.11").chmod(0o755)
    variables = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    made = subprocess.run(
        [shutil.which("make"), "demo"],
        cwd=environments.REPOSITORY,
        env={**variables, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 2
    first, *_ = made.stderr.splitlines()
    assert first.startswith(
        "error: 'python3.11' is not a working Python 3.11 with venv; install it or say 'make PYTHON="
    )
    assert made.stdout == ""
