"""Report a GPU whose memory is too small, with the sizes of the tables and of the batches."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from evergreen.config.features import FeaturePositions
from evergreen.config.model import NetworkConfig
from evergreen.networks.files import num_rows, tables_of
from evergreen.runtime.errors import PermanentError, first_line

_ROW_PARTS = 3
"""Number of vectors that are stored for a table row: its vector and Adam's two moments."""
_QUERY = ("--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 20.0


@contextmanager
def device_memory_reported(
    config: NetworkConfig,
    slot_sizes: Sequence[int],
    *,
    batch_size: int,
    positions: FeaturePositions,
) -> Iterator[None]:
    """Raise an error that names the sizes if the body needs more memory than a GPU has.

    Args:
        config: Configuration of the network.
        slot_sizes: Number of ids of each slot.
        batch_size: Rows of an optimizer step.
        positions: Slot of each categorical position, and the positions of each list.

    Raises:
        PermanentError: torch could not allocate memory on the GPU.
    """
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, total = (each / 2**30 for each in torch.cuda.mem_get_info())
        counts = num_rows(tables_of(positions, config.widths), slot_sizes)
        tables = list(zip(counts, config.table_widths))
        gib = sum(_ROW_PARTS * 4 * count * width for count, width in tables) / 2**30
        named = ", ".join(f"{count:,} x {width}" for count, width in tables)
        raise PermanentError(
            f"the GPU has too little memory: {free:.1f} of {total:.1f} GiB are free, and the "
            f"tables ({named}) with Adam's moments need {gib:.1f} GiB, without the memory for "
            f"batches of {batch_size} rows. Use a smaller batch_size, fewer ids "
            "(frequency_threshold), a larger GPU, or several GPUs with backend torchrec. "
            f"{first_line(error)}"
        ) from error


def free_memory() -> str:
    """Return the free and the total memory of each GPU, as nvidia-smi reports them.

    Returns "unknown" if there is no nvidia-smi, or if nvidia-smi does not report the memory. For a
    MIG slice, nvidia-smi does not report the memory.
    """
    if (program := shutil.which("nvidia-smi")) is None:
        return "unknown"
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
        )
        mib = [[float(each) for each in line.split(",")] for line in done.stdout.splitlines()]
        gpus = [f"{free / 1024:.1f} GiB of {total / 1024:.1f} GiB" for free, total in mib]
    except (OSError, subprocess.SubprocessError, ValueError):
        return "unknown"
    return ", ".join(f"GPU {number}: {said}" for number, said in enumerate(gpus)) or "unknown"
