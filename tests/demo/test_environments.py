"""Tests that `make environments` builds only environments that changed or were not finished."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from demo import environments

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
MAKEFILE = environments.REPOSITORY / "Makefile"
LOCKS = environments.REPOSITORY / "requirements"


@pytest.fixture(scope="module")
def quick_python(tmp_path_factory):
    """A fake Python.

    The command `-m venv` copies a prepared environment, because pip would take seconds.
    """
    root = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", root / "made"], check=True, timeout=240)
    (root / "python").write_text(
        f'#!/bin/sh\nif [ "$1 $2" = "-m venv" ]; then cp -r "{root}/made" "$3"; else exec '
        f'"{sys.executable}" "$@"; fi\n'
    )
    (root / "python").chmod(0o755)
    return root / "python"


@pytest.fixture
def folder(tmp_path, quick_python):
    """A repository that contains only the Makefile, and the locks of one empty environment."""
    shutil.copy(MAKEFILE, tmp_path)
    (tmp_path / "python").symlink_to(quick_python)
    (tmp_path / "requirements").mkdir()
    for name in ("torch.txt", "serving.lock", "serving.test.lock"):
        (tmp_path / "requirements" / name).write_text("# nothing\n")
    return tmp_path


def make_serving(folder):
    variables = {
        name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", "environments", "ENVIRONMENTS=serving", "PYTHON=./python"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
    )


@needs_make
@pytest.mark.slow
def test_environment_is_rebuilt_if_lock_changed_or_interpreter_is_absent(folder):
    building = "building environment serving (log: .venvs/serving.log)\n"
    assert make_serving(folder).stdout == building
    assert environments.python_of("serving", folder).exists()
    assert make_serving(folder).stdout == ""
    lock = folder / "requirements" / "serving.test.lock"
    os.utime(lock, (lock.stat().st_mtime + 60,) * 2)
    assert make_serving(folder).stdout == ""  # only the time of the lock file differs
    lock.write_text("# nothing else\n")
    os.utime(lock, (1, 1))
    assert make_serving(folder).stdout == building
    assert make_serving(folder).stdout == ""
    python = environments.python_of("serving", folder)
    python.unlink()
    python.symlink_to(folder / "an interpreter that was upgraded away")
    assert make_serving(folder).stdout == building


@needs_make
def test_failed_build_shows_reason_names_its_log_and_stays_unfinished(folder):
    (folder / "requirements" / "serving.lock").write_text("./no-such-package\n")
    for _ in range(2):
        made = make_serving(folder)
        assert made.returncode != 0
        assert "no-such-package" in made.stderr
        assert (
            "error: environment serving could not be built, see .venvs/serving.log" in made.stderr
        )


def test_every_environment_has_locks_and_every_pin_is_exact_with_hash():
    listed = re.search(r"^ENVIRONMENTS \?= (.*)$", MAKEFILE.read_text(), re.M)[1].split()
    locks = {lock.name: lock for lock in LOCKS.glob("*.lock")}
    assert locks.keys() >= {f"{name}{kind}.lock" for name in listed for kind in ("", ".test")}
    for name, lock in locks.items():
        text = lock.read_text().replace("\\\n", " ")
        pins = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert pins
        for pin in pins:
            assert re.fullmatch(r"[\w.-]+==[\w.!]+(?:\s+--hash=sha256:[0-9a-f]{64})+", pin), (
                name,
                pin[:80],
            )


def _pins(name):
    texts = [
        lock.read_text() for kind in ("", ".test") for lock in LOCKS.glob(f"{name}{kind}.lock")
    ]
    return dict(pin for text in texts for pin in re.findall(r"^([\w.-]+)==(\S+)", text, re.M))


def test_benchmarks_measure_versions_that_images_are_locked_to():
    for peers, name, packages in (
        ("benchmarks", "training", ("numpy", "pyarrow", "scikit-learn", "msgspec")),
        ("serving-peers", "serving", ("onnxruntime", "numpy")),
        ("serving-peers", "preprocessing", ("nvtabular", "merlin-core", "pandas", "dask")),
    ):
        theirs, ours = _pins(peers), _pins(name)
        assert {package: theirs[package] for package in packages}.items() <= ours.items()


@needs_make
@pytest.mark.parametrize("broken", [False, True], ids=["absent", "without venv"])
def test_make_without_working_python_3_11_reports_remedy(tmp_path, broken):
    for name in ("bash", "sh", "sed"):
        (tmp_path / name).symlink_to(shutil.which(name))
    if broken:
        (tmp_path / "python3.11").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "python3.11").chmod(0o755)
    variables = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "PYTHON"))
    }
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
        "error: 'python3.11' is not a working Python 3.11 with venv; install it or say 'make "
        "PYTHON="
    )
    assert made.stdout == ""
