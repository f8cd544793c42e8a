"""All that a step changes: a network's parameters, Adam's moments and the step count, and the way from and to files.

The arithmetic is `cpu_steps`' and `static_step`'s (GPU). Tables go from and to disk in chunks, so restoring and
saving hold one chunk beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.contracts.dcn import DcnConfig
from components.contracts.model_files import RowChunk, open_model, write_model_chunks
from components.contracts.sparse_files import ROWS_PER_CHUNK
from components.dcn.network import DcnNetwork
from components.training.pytorch.gradients import views


class ModelState:
    """Network, moments and step count on one device."""

    def __init__(self, config: DcnConfig, slot_sizes: list[int], device: torch.device, *, spare_rows: int = 0) -> None:
        """Makes a network of zeros; `restore` gives it weights.

        Args:
            config: Shape of the network.
            slot_sizes: Number of ids per categorical column.
            device: Where all of it lies.
            spare_rows: Rows behind the table's own that belong to no id and are in no file.
        """
        self._config, self._slot_sizes = config, slot_sizes
        self.num_rows, self.num_steps = sum(slot_sizes), 0
        self.rows = _zeros((self.num_rows + spare_rows, 3, config.embedding_dim), device)
        """Vector, m and v of each row of the table, [rows, 3, E]. Side by side they are fetched and stored at once: 1.6
        ms of one core for the 34,000 distinct rows of a batch from 10 million, where three tables took 3.2."""
        self.table, self.row_m, self.row_v = self.rows.unbind(1)
        self.network = DcnNetwork(config, slot_sizes, self.table[: self.num_rows])
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.network.dense_parameters])
        """The dense parameters in the weight file's order; the network's are views of it."""
        for parameter, view in zip(self.network.dense_parameters, views(config, self.flat).values()):
            parameter.data = view
        self.flat_m, self.flat_v = torch.zeros_like(self.flat), torch.zeros_like(self.flat)

    @torch.no_grad()
    def restore(self, folder: Path, num_steps: int) -> None:
        """Takes over a model's weights, moments (zero where the folder has none) and step count.

        Raises:
            ContractError: a file is absent, truncated, oversized or of another network.
        """
        stored = open_model(folder, self._config, self._slot_sizes)
        parameters = views(self._config, self.flat)
        for name, value in stored.dense().items():
            parameters[name].copy_(_tensor(value))
        for target, source in zip((self.flat_m, self.flat_v), stored.dense_moments() or (None, None)):
            target.zero_() if source is None else target.copy_(_tensor(source))
        tables = (self.table, self.row_m, self.row_v)
        for table in tables:
            table.zero_()
        for chunk in stored.chunks():
            keys = _tensor(chunk.keys).to(self.table.device)
            for table, values in zip(tables, (chunk.vectors, *(chunk.moments or ()))):
                table.index_copy_(0, keys, _tensor(values).to(table.device))
        self.num_steps = num_steps

    def save(self, folder: Path) -> None:
        """Writes weights and moments into `folder`, keys ascending, all of them."""
        write_model_chunks(
            folder,
            self._config,
            num_rows=self.num_rows,
            dense={name: p.detach().cpu().numpy() for name, p in self.network.named_dense().items()},
            dense_moments=(self.flat_m.cpu().numpy(), self.flat_v.cpu().numpy()),
            chunks=self._chunks(),
            with_moments=True,
        )

    def _chunks(self) -> Iterator[RowChunk]:
        for start in range(0, self.num_rows, ROWS_PER_CHUNK):
            stop = min(start + ROWS_PER_CHUNK, self.num_rows)
            vectors, m, v = (table[start:stop].cpu().numpy() for table in (self.table, self.row_m, self.row_v))
            yield RowChunk(keys=np.arange(start, stop), vectors=vectors, moments=(m, v))


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros, which on a CPU take memory only when they are touched: torch.zeros writes them at once.

    Rows are decoded before an engine is restored, and what that needs is free again before the table fills.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, device=device)


def _tensor(values: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
    # Arrays read from files may be read-only, which torch.from_numpy warns of.
    return torch.from_numpy(values if values.flags.writeable else values.copy())
