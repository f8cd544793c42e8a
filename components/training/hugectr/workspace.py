"""The GPU memory of the embedding table: how much HugeCTR must be told to take, and whether the GPUs have it.

HugeCTR turns megabytes into rows, `(mb * 2^20) // ((1 + k) * 4 * dim)` per GPU, k = 2 for Adam, and stops in the middle
of training when a key has no room. All keys are known before, so the size is exact; key k lies on GPU k modulo their
number.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from components.contracts.sparse_files import workspace_mb
from components.runtime.errors import PermanentError, first_line
from components.training.hugectr.settings import SolverSettings

_USABLE = 0.9
"""Share of a GPU's memory for the workspace; the rest is for its hash table (about 22 bytes a row), activations,
gradients and CUDA itself."""
_MARGIN_ROWS = 1024
"""Room beyond the keys, since HugeCTR's hash table rounds its own counts."""

GpuMemory = Callable[[Sequence[int]], list[int]]
"""Gives the memory of each of some devices, MiB."""


def plan_workspace(num_rows: int, dim: int, solver: SolverSettings, gpu_memory: GpuMemory) -> int:
    """`workspace_size_per_gpu_in_mb` for a table of `num_rows` vectors of width `dim` with Adam's state.

    Raises:
        PermanentError: it is more than `max_workspace_mb`, or than the smallest GPU can give.
    """
    rows_per_gpu = -(-num_rows // solver.num_gpus)
    needed = workspace_mb(rows_per_gpu + _MARGIN_ROWS, dim)
    said = f"{num_rows} rows of width {dim} with Adam's state on {solver.num_gpus} GPUs need {needed} MiB per GPU"
    if solver.max_workspace_mb:
        if needed > solver.max_workspace_mb:
            raise PermanentError(f"{said}, expected at most max_workspace_mb {solver.max_workspace_mb}")
        return needed
    memory = gpu_memory(solver.vvgpu[0])
    if needed > (usable := int(_USABLE * min(memory))):
        raise PermanentError(f"{said}, expected at most {usable}, 90 % of the smallest of GPUs with {memory} MiB")
    return needed


def nvidia_smi_memory(devices: Sequence[int]) -> list[int]:
    """Total memory of the devices, MiB, as nvidia-smi tells it.

    Raises:
        PermanentError: nvidia-smi cannot be run or knows none of the devices.
    """
    command = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        table = {int(index): int(mib) for index, mib in (line.split(",") for line in done.stdout.splitlines())}
        return [table[device] for device in devices]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise PermanentError(
            f"memory of GPUs {list(devices)} cannot be asked of nvidia-smi ({first_line(error)}); "
            "solver setting max_workspace_mb says it instead"
        ) from error
