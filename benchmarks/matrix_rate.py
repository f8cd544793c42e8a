"""The machine's limit for the network's dense part: the rate of its matrix products, and how near the engine comes.

The limit is the rate of the tower's products alone, forward and backward, by the fastest public way torch has of
multiplying two matrices: `torch.mm` or the oneDNN operator behind compiled linear layers. The dense part does more than
these products (bias, ReLU, cross layers, casts, sums), which a share of less than 1 shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from components.contracts.dcn import DcnConfig
from components.contracts.model_files import num_dense_parameters
from components.training.pytorch.gradients import Backpropagation

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ALIGNED = 16
"""Widths are rounded up to a multiple of it for the limit: the rate is that of shapes which suit the machine."""
_REPEATS = 3
_PART_ROWS = 2048
"""Rows that the engine puts through the dense part at once."""


def operations_per_row(config: DcnConfig) -> int:
    """Multiplications and additions of the dense part per row, forward and backward.

    The cross layers (v1) count as their closed form, one scalar product per layer and one for the logit; elementwise
    work is not counted.
    """
    widths = [config.input_width, *config.tower]
    products = sum(a * b for a, b in zip(widths, config.tower)) + config.tower[-1]
    return 6 * (products + config.input_width * (config.num_cross_layers + 1))


def limit(config: DcnConfig, batch_size: int, dtype: torch.dtype) -> float:
    """Operations per second of the tower's products, each by its fastest way, best of some repeats."""
    operations, seconds = 0.0, 0.0
    widths = [-(-width // _ALIGNED) * _ALIGNED for width in (config.input_width, *config.tower)]
    for inputs, outputs in zip(widths, widths[1:]):
        x, weight = _random(batch_size, inputs, dtype), _random(inputs, outputs, dtype)
        to_output = _random(batch_size, outputs, dtype)
        for a, b in ((x, weight), (to_output, weight.t()), (x.t(), to_output)):
            operations += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            seconds += min(_best(way, a, b) for way in _ways(dtype))
    return operations / seconds


def dense_part_rows_per_second(config: DcnConfig, batch_size: int, dtype: torch.dtype) -> float:
    """Rows per second of the engine's loss and gradients alone: no table, no optimizer, no batch assembly."""
    flat = 0.02 * torch.randn(num_dense_parameters(config))
    backpropagation = Backpropagation(config, flat, dtype)
    num_rows = min(batch_size, _PART_ROWS)
    x0, labels = torch.randn(num_rows, config.input_width), torch.randint(0, 2, (num_rows,)).float()

    def batch() -> None:
        backpropagation.begin()
        backpropagation.part(x0, labels, num_rows, None)

    return num_rows / _best_of(batch)


def _random(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns).to(dtype)


def _ways(dtype: torch.dtype) -> list[Callable[[Tensor, Tensor], Tensor]]:
    ways: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    if dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        ways.append(lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], ""))
    return ways


def _best(way: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    return _best_of(lambda: way(a, b))


def _best_of(action: Callable[[], object]) -> float:
    action()
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
