"""How HugeCTR runs: the learning rate of each step, the GPU memory of the table. Its settings are `SolverSettings`.

HugeCTR's count of steps, Adam's t, starts anew with every model, which is made whenever weights are restored or the
batch size changes, and HugeCTR does not save it. Its step is
`w -= lr * c(t) * m / (sqrt(v) + eps)` with `c(t) = sqrt(1 - beta2^t) / (1 - beta1^t)`; t enters nowhere else, for dense
parameters and embeddings alike. Giving it `lr * c(T) / c(t)`, with T the steps since the weights were initialised,
therefore makes exactly the step of an Adam that never forgot its count (`rate_correction`).
"""

from __future__ import annotations

from components.training.config import TrainingSettings

_MARGIN_ROWS = 1024
"""Room beyond the keys, since HugeCTR's hash table rounds its own counts."""
_FLOATS_PER_ROW = 3
"""Vectors that each row of the workspace takes: the weights and Adam's two moments."""


def rate_correction(settings: TrainingSettings, *, step: int, model_step: int) -> float:
    """What the learning rate of step `step` of all rounds, its model's own step `model_step`, is multiplied by."""
    return _correction(settings, step) / _correction(settings, model_step)


def _correction(settings: TrainingSettings, step: int) -> float:
    return float((1 - settings.beta2**step) ** 0.5 / (1 - settings.beta1**step))


def max_vocabulary_size(workspace_mb: int, dim: int) -> int:
    """Rows that a HugeCTR workspace holds per GPU, each a vector and Adam's two.

    >>> max_vocabulary_size(267, 16)
    1458176
    """
    return (workspace_mb << 20) // (_FLOATS_PER_ROW * 4 * dim)


def smallest_workspace_mb(num_rows: int, dim: int, *, num_gpus: int) -> int:
    """`workspace_size_per_gpu_in_mb` for a table of `num_rows` vectors of width `dim` with Adam's state.

    HugeCTR stops in the middle of training when a key has no room. All keys are known before, so the size is exact; key
    k lies on GPU k modulo their number. HugeCTR allocates it when the model is built, so too small a GPU fails at once.

    >>> smallest_workspace_mb(1_457_152, 16, num_gpus=1), smallest_workspace_mb(1_457_153, 16, num_gpus=1)
    (267, 268)
    """
    rows_per_gpu = -(-num_rows // num_gpus) + _MARGIN_ROWS
    return -(-rows_per_gpu * _FLOATS_PER_ROW * 4 * dim >> 20)
