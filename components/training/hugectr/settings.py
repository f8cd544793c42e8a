"""How HugeCTR runs: its solver's settings, the learning rate of each step, the GPU memory of the table.

Names are those of `hugectr.CreateSolver` where it has them, so NVIDIA's documentation applies. What `hugectr.Model.fit`
takes has no setting here, because `training.fit` runs the passes of every engine; see `SolverSettings`.

HugeCTR's count of steps, Adam's t, starts anew with every model, which is made whenever weights are restored or the
batch size changes, and HugeCTR does not save it. Its step is
`w -= lr * c(t) * m / (sqrt(v) + eps)` with `c(t) = sqrt(1 - beta2^t) / (1 - beta1^t)`; t enters nowhere else, for dense
parameters and embeddings alike. Giving it `lr * c(T) / c(t)`, with T the steps since the weights were initialised,
therefore makes exactly the step of an Adam that never forgot its count (`rate_correction`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from components.runtime.errors import ContractError
from components.training.config import TrainingSettings

_MARGIN_ROWS = 1024
"""Room beyond the keys, since HugeCTR's hash table rounds its own counts."""
_FLOATS_PER_ROW = 3
"""Vectors that each row of the workspace takes: the weights and Adam's two moments."""


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """Settings of a HugeCTR run; the defaults suit one data-centre GPU.

    Not here, because both backends have them alike (`TrainingSettings`): `eval_interval`, since a fit scores its last
    tenth itself; the stop at an AUC (`metrics_spec`), since the passes are fixed; `max_iter`, `num_epochs` (`passes`);
    `snapshot` (`checkpoint_minutes`); `batchsize`, `lr`, `seed`; and `enable_tf32_compute`, which `precision="tf32"`
    asks for. What else `CreateSolver` takes keeps HugeCTR's default.
    """

    vvgpu: tuple[tuple[int, ...], ...] = ((0,),)
    """Devices per node; this engine is one process, so one node."""
    prove_restores: bool = True
    """Save every restored model at once and compare it with what was to be loaded: HugeCTR only logs what it could not
    load, and would train on from random weights."""
    loss_interval: int = 100
    """Steps between looks at the loss, each of which waits for the GPU."""
    stage_rows: int = 1_048_576
    """Rows written as one set of Parquet files while the set before is trained."""

    def __post_init__(self) -> None:
        """Refuses what HugeCTR would refuse later, or not at all."""
        # A bool is an int to isinstance.
        numbers = [gpu for node in self.vvgpu for gpu in node]
        if len(self.vvgpu) != 1 or not numbers or len(set(numbers)) != len(numbers) or {*map(type, numbers)} != {int}:
            raise ContractError(f"vvgpu is {[*map(list, self.vvgpu)]}, expected one node's GPUs such as [[0, 1]]")
        for name in ("loss_interval", "stage_rows"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ContractError(f"{name} is {value!r}, expected a whole number of at least 1")

    @property
    def num_gpus(self) -> int:
        """GPUs that share a batch."""
        return len(self.vvgpu[0])


def parse_solver(text: str) -> SolverSettings:
    """The settings that a JSON object overrides; an empty text overrides none.

    Raises:
        ContractError: not a JSON object, an unknown name, a value of another type or out of range.

    >>> parse_solver('{"vvgpu": [[0, 1]], "stage_rows": 500}').num_gpus
    2
    """
    try:
        document = json.loads(text or "{}")
        if "vvgpu" in document:
            document["vvgpu"] = tuple(map(tuple, document["vvgpu"]))
        return SolverSettings(**document)
    except (TypeError, ValueError) as error:
        raise ContractError(f"solver is {text!r}, expected a JSON object of HugeCTR's settings: {error}") from error


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
