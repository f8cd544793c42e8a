"""Steps on a GPU: the whole step of a full batch as one CUDA graph, the next batches copied to the device meanwhile.

Launching a step's hundred kernels one by one takes the host longer than the device needs to run them; a replayed graph
is one launch. Only the last, smaller batch of a call runs kernel by kernel.

None of this was run on a GPU here: there was none. The arithmetic is `static_step`'s, tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.contracts.dcn import DcnConfig
from components.training.config import TrainingSettings
from components.training.pytorch.model_state import ModelState
from components.training.pytorch.prefetch import ahead
from components.training.pytorch.static_step import StaticStepper
from components.training.rows import Rows

_DEPTH = 3
_WARM_UP_STEPS = 3
"""Steps outside the graph first: libraries choose kernels and workspaces then, which a capture must not."""


class CudaSteps:
    """Takes steps of one model on a GPU."""

    def __init__(self, state: ModelState, config: DcnConfig, slot_sizes: list[int], settings: TrainingSettings) -> None:
        """Makes the steps of `state`; the graph is captured in the first call that has enough full batches."""
        self._state, self._device = state, state.flat.device
        # For the whole process, which has one engine; a float32 product is else exact.
        torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"
        self._stepper = StaticStepper(state, config, settings)
        self._copying = torch.cuda.Stream(self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._loss = torch.zeros((), device=self._device)
        self._batch_size, self._num_warm = 0, 0

    def learn(self, rows: Rows, order: NDArray[np.int64], batch_size: int, seed: int) -> Tensor:
        """The mean loss of each batch in nats, on the device, after the steps; `seed` decides dropout."""
        parts = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
        losses = torch.zeros(len(parts), device=self._device)
        self._stepper.begin()
        # Dropout draws from the device's generator, which stays the caller's.
        with torch.random.fork_rng([self._device]), closing(ahead(self._copied(rows, parts), _DEPTH)) as batches:
            torch.cuda.manual_seed(seed)
            for number, (batch, copied) in enumerate(batches):
                current = torch.cuda.current_stream(self._device)
                current.wait_event(copied)
                for values in batch:
                    values.record_stream(current)
                losses[number] = self._step(batch, batch_size)
        self._state.num_steps += len(parts)
        return losses

    def _copied(
        self, rows: Rows, parts: list[NDArray[np.int64]]
    ) -> Iterator[tuple[tuple[Tensor, ...], torch.cuda.Event]]:
        """Batches on the device, copied from pinned memory on a stream of their own, with the event of the copy."""
        for numbers in parts:
            pinned = [torch.from_numpy(a[numbers]).pin_memory() for a in (rows.labels, rows.dense, rows.ids)]
            with torch.cuda.stream(self._copying):
                batch = tuple(values.to(self._device, non_blocking=True) for values in pinned)
                copied = torch.cuda.Event()
                copied.record(self._copying)
            yield batch, copied

    def _step(self, batch: tuple[Tensor, ...], batch_size: int) -> Tensor:
        if len(batch[0]) < batch_size:
            return self._stepper.step(*batch)
        if self._batch_size != batch_size:
            self._graph, self._batch_size, self._num_warm = None, batch_size, 0
            self._inputs = tuple(torch.empty_like(values) for values in batch)
        if self._num_warm < _WARM_UP_STEPS:
            self._num_warm += 1
            return self._stepper.step(*batch)
        for target, values in zip(self._inputs, batch):
            target.copy_(values)
        if self._graph is None:
            # A capture records and does not run: the step is taken by the replay below, like all later ones.
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = self._stepper.step(*self._inputs)
        self._graph.replay()
        return self._loss
