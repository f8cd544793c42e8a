"""The PyTorch engine: what `engine` promises, on the device that is there.

Runs on a GPU where there is one, else on the CPU, where equal input gives equal bits. Steps are `cpu_steps`' and
`cuda_steps`', weights and moments `model_state`'s; which rows are learnt, in which order and how often is `fit`'s.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig
from components.dcn.network import predict
from components.training.config import TrainingSettings
from components.training.engine import Learnt
from components.training.pytorch.cpu_steps import CpuSteps
from components.training.pytorch.cuda_steps import CudaSteps
from components.training.pytorch.model_state import ModelState
from components.training.rows import Rows

_CPU_SEGMENT_ROWS = 32_768
"""Rows between two looks from outside: on two cores 0.1 s with the default network, 1 s with NVIDIA's sample. Nothing
overlaps the assembly of the first batch; that is a hundredth of it."""
_GPU_SEGMENT_ROWS = 4_194_304


class PytorchEngine:
    """Engine of `components.training.engine`, in PyTorch."""

    backend = "pytorch"
    scores_cheaply = True

    def __init__(
        self, config: DcnConfig, slot_sizes: list[int], settings: TrainingSettings, *, device: str | None = None
    ) -> None:
        """Makes an engine whose network is zero everywhere; `restore` gives it weights.

        Args:
            config: Shape of the network.
            slot_sizes: Number of ids per categorical column, 26 of them.
            settings: Optimizer and precision.
            device: Torch's name of the device; None = the GPU where there is one.
        """
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        on_gpu = where.type == "cuda"
        self._segment_rows = _GPU_SEGMENT_ROWS if on_gpu else _CPU_SEGMENT_ROWS
        self._state = ModelState(config, slot_sizes, where, spare_rows=int(on_gpu))
        make_steps = CudaSteps if on_gpu else CpuSteps
        self._steps = make_steps(self._state, config, slot_sizes, settings)

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, those before `restore` included."""
        return self._state.num_steps

    def restore(self, weights: Path, num_steps: int) -> None:
        """See `Engine`."""
        self._state.restore(weights, num_steps)

    def save(self, folder: Path) -> None:
        """See `Engine`."""
        self._state.save(folder)

    def segment_batches(self, batch_size: int) -> int:
        """See `Engine`."""
        return max(1, self._segment_rows // batch_size)

    def learn(self, rows: Rows, order: NDArray[np.int64], batch_size: int, seed: int) -> Learnt:
        """See `Engine`."""
        losses = self._steps.learn(rows, order, batch_size, seed)
        finite = torch.isfinite(losses)
        bad = None if bool(finite.all()) else int(torch.argmin(finite.int()))
        return Learnt(mean_loss=float(losses.mean()), bad_batches=None if bad is None else range(bad, bad + 1))

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """See `Engine`."""
        probabilities: NDArray[np.float32] = predict(self._state.network, rows.dense, rows.ids)
        return probabilities

    def close(self) -> None:
        """See `Engine`."""
        del self._steps, self._state
