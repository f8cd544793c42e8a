"""Leaves out, while NVTabular is imported, what it imports and this step never uses: a third of its start-up time.

Measured on two cores, processor time of `import nvtabular`: 1.4 to 1.8 s, without Numba (its just-in-time compiler for
GPUs, 0.35 s) and SciPy's Fourier transforms (which Dask offers to arrays, 0.15 s) 1.0 s. Nothing is left out where a
GPU's driver is there. Afterwards both can be imported as ever; of NVTabular only `ListSlice` and `JaccardSimilarity`,
whose kernels Numba compiles, refuse to work in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_GPU_DRIVER = Path("/dev/nvidiactl")
_OPTIONAL = ("scipy.fftpack", "scipy.fft")
"""Dask takes an ImportError of these for an answer."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Imports in the block find stand-ins; what is imported already stays, and so does all where there is a GPU."""
    stand_ins: dict[str, ModuleType | None] = {} if _GPU_DRIVER.exists() else _stand_ins()
    absent = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(absent)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def _stand_ins() -> dict[str, ModuleType | None]:
    if "numba" in sys.modules:
        return dict.fromkeys(_OPTIONAL)
    numba, cuda = ModuleType("numba"), ModuleType("numba.cuda")
    cuda.is_available = lambda: False  # type: ignore[attr-defined]
    numba.cuda = cuda  # type: ignore[attr-defined]
    for module in (numba, cuda):
        module.jit = module.njit = _compiler  # type: ignore[attr-defined]
    return {"numba": numba, "numba.cuda": cuda, **dict.fromkeys(_OPTIONAL)}


def _compiler(*arguments: Any, **options: Any) -> Any:
    """Stands for Numba's decorators, with and without arguments."""
    return _refusing(arguments[0]) if arguments and callable(arguments[0]) else _refusing


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{function.__qualname__} needs Numba, which components.preprocessing does not load")

    return refuse
