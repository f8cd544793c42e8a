"""The steps' code also runs where our environments do not: on the Merlin image's Python 3.10 and on 3.12."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PYTHONS = ("3.10", "3.12")
CONTRACTS = sorted(p.stem for p in (REPOSITORY / "components" / "contracts").glob("*.py") if p.stem != "__init__")
PARSERS = sorted(p.parent.name for p in (REPOSITORY / "components").glob("*/__main__.py"))

COMPILE = """
import pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.py")):
    compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
"""
"""As `-m py_compile`, in one process and leaving no files."""

IMPORT = """
import importlib, json, sys
sys.dont_write_bytecode = True
for name in json.loads(sys.argv[1]):
    module = importlib.import_module(name)
    if name.endswith("__main__"):
        module.build_parser().format_help()
"""


def _works(python: Path, code: str) -> bool:
    return subprocess.run([python, "-c", code], capture_output=True, timeout=60).returncode == 0


def _find(version: str) -> Path | None:
    """An interpreter of this version: on PATH, or in a version manager's folder beside the shim that PATH names."""
    shim = shutil.which(f"python{version}")
    if shim is None:
        return None
    root = Path(os.environ.get("PYENV_ROOT", Path(shim).parent.parent))
    # A shim of a version that is not chosen only says so.
    candidates = [Path(shim), *sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)]
    check = f"import sys; sys.exit(sys.version_info[:2] != {tuple(int(part) for part in version.split('.'))})"
    return next((path for path in candidates if _works(path, check)), None)


@pytest.fixture(scope="module", params=PYTHONS)
def python(request) -> Path:
    found = _find(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} on this machine")
    return found


def _run(python: Path, code: str, argument: str) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [python, "-c", code, argument], capture_output=True, text=True, timeout=120, cwd="/", env=environment
    )
    assert done.returncode == 0, done.stderr


def test_every_file_of_the_steps_compiles(python):
    _run(python, COMPILE, str(REPOSITORY / "components"))


def test_contracts_that_need_no_numpy_import(python):
    light = [f"components.contracts.{name}" for name in CONTRACTS if not _needs_numpy(name)]
    assert {"components.contracts.manifests", "components.contracts.retrain_request"} <= set(light)
    _run(python, IMPORT, json.dumps(light))


def test_all_contracts_and_every_steps_flags_import(python):
    if not _works(python, "import numpy"):
        pytest.skip(f"{python} has no numpy")
    names = [f"components.contracts.{name}" for name in CONTRACTS] + [f"components.{step}.__main__" for step in PARSERS]
    _run(python, IMPORT, json.dumps(names))


def _needs_numpy(name: str) -> bool:
    """Whether the contract, or one that it imports, imports NumPy."""
    text = (REPOSITORY / "components" / "contracts" / f"{name}.py").read_text()
    others = [other for other in CONTRACTS if other != name and f"components.contracts.{other} import" in text]
    others += [other for other in CONTRACTS if f"components.contracts import {other}" in text]
    return "import numpy" in text or any(_needs_numpy(other) for other in others)
