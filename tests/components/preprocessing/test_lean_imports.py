"""What is left out of NVTabular's imports is out, can be had afterwards, and is not left out where it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

LEAN = """
import json, sys
from pathlib import Path
from components.preprocessing import lean_imports
lean_imports._GPU_DRIVER = Path(sys.argv[1])
with lean_imports.lean_imports():
    import nvtabular
loaded = ["llvmlite" in sys.modules, "scipy.fftpack" in sys.modules]
import numba, scipy.fftpack
square = numba.njit(lambda x: x * x)
print(json.dumps({"loaded": loaded, "square": square(7), "transformed": len(scipy.fftpack.fft([1, 2]))}))
"""


def run(driver):
    command = [sys.executable, "-W", "ignore", "-c", LEAN, str(driver)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_numba_and_fourier_transforms_are_not_loaded_and_work_when_somebody_imports_them(tmp_path):
    code, said, error = run(tmp_path / "no driver")
    assert code == 0, error
    found = json.loads(said.splitlines()[-1])
    assert found["loaded"] == [False, False]
    assert (found["square"], found["transformed"]) == (49, 2)


def test_where_a_gpu_is_nothing_is_left_out(tmp_path):
    (tmp_path / "nvidiactl").touch()
    _, said, error = run(tmp_path / "nvidiactl")
    assert said, error
    assert json.loads(said.splitlines()[-1])["loaded"] == [True, True]


def test_a_stand_in_does_not_pretend_to_compute():
    from components.preprocessing.lean_imports import _compiler

    for decorated in (_compiler(lambda: 1), _compiler(parallel=True)(lambda: 1)):
        with pytest.raises(RuntimeError, match="needs Numba"):
            decorated()
