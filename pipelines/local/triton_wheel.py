"""The tritonserver inside the nvidia-pytriton wheel, made runnable without pytriton.

The wheel ships one stub of the python backend per Python version and none beside the backend, where the server looks:
both are copied into a runtime folder. Starting and watching the server is `triton`'s.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from components.runtime.errors import ContractError

_ASK_PYTHON = (
    "import json, sys, sysconfig; print(json.dumps([sysconfig.get_path('purelib'), sysconfig.get_config_var('LIBDIR'),"
    " '%d.%d' % sys.version_info[:2]]))"
)


@dataclass(frozen=True, kw_only=True)
class PreparedWheel:
    """What is needed to start the server."""

    binary: Path
    """tritonserver itself, in its place in the environment."""
    backends: Path
    """Folder for `--backend-directory`."""
    caches: Path
    """Folder for `--cache-directory`."""
    variables: dict[str, str]
    """Environment variables that the server and its stubs need."""


def prepare(venv: Path, runtime: Path) -> PreparedWheel:
    """The server of the environment `venv`, with its backend copied below `runtime` where it is not yet.

    Raises:
        ContractError: the environment or something in its wheel is absent; names it.
    """
    python = (venv / "bin" / "python").absolute()
    if not python.exists():
        raise ContractError(f"serving environment {venv} is absent, expected it to be built")
    packages, libraries, version = json.loads(subprocess.check_output([python, "-I", "-c", _ASK_PYTHON], text=True))
    wheel = Path(packages) / "pytriton" / "tritonserver"
    binary = wheel / "bin" / "tritonserver"
    stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    for needed in (binary, stub):
        if not needed.exists():
            raise ContractError(f"{needed} is absent, expected it from the nvidia-pytriton wheel")
    backend = runtime / "backends" / "python"
    backend.mkdir(parents=True, exist_ok=True)
    for source in (*(wheel / "backends" / "python").glob("*.*"), stub):
        _copy_if_other(source, backend / source.name)
    variables = {
        # The first python3 on PATH is the interpreter of model.py; PYTHONPATH would not reach it.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # Without these the stub takes another libpython, or lacks libcudart and hangs the server.
        "LD_LIBRARY_PATH": f"{libraries}:{Path(packages) / 'nvidia_pytriton.libs'}",
        "OMP_NUM_THREADS": "1",
    }
    return PreparedWheel(binary=binary, backends=runtime / "backends", caches=wheel / "caches", variables=variables)


def _copy_if_other(source: Path, target: Path) -> None:
    """Copies unless a copy of the same size and time is there, which a running server may be using."""
    if target.exists():
        old, new = target.stat(), source.stat()
        if (old.st_size, int(old.st_mtime)) == (new.st_size, int(new.st_mtime)):
            return
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy2(source, aside)
    os.replace(aside, target)
