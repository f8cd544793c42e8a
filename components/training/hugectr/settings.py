"""How HugeCTR runs: what its solver takes besides `TrainingSettings`, and what this engine adds around it.

Names are those of `hugectr.CreateSolver` where it has them, so NVIDIA's documentation applies. What `hugectr.Model.fit`
takes has no setting here, because `training.fit` runs the passes of every engine; see `SolverSettings`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from components.runtime.errors import ContractError

ALL_REDUCE = ("NCCL", "OneShot")
"""Members of `hugectr.AllReduceAlgo`."""
LR_POLICIES = ("fixed",)
"""Members of `hugectr.LrPolicy_t`."""
SCALERS = (128.0, 256.0, 512.0, 1024.0)
"""All that HugeCTR takes with mixed precision."""
_COUNTS = (
    "batchsize_eval",
    "max_eval_batches",
    "num_workers",
    "warmup_steps",
    "decay_steps",
    "loss_interval",
    "stage_rows",
)


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """Settings of a HugeCTR run; the defaults suit one data-centre GPU.

    Not here, because both backends have them alike (`TrainingSettings`): `eval_interval`, since the newest rows judge
    after every pass; the stop at an AUC (`metrics_spec`), since training ends after `patience` passes without a better
    log loss; `max_iter`, `num_epochs` (`max_epochs`); `snapshot` (`checkpoint_minutes`); `batchsize`, `lr`, `seed`; and
    `enable_tf32_compute`, which `precision="tf32"` asks for.
    """

    vvgpu: tuple[tuple[int, ...], ...] = ((0,),)
    """Devices per node; this engine is one process, so one node."""
    use_mixed_precision: bool = False
    """float16 products and activations (tensor cores). Saved weights stay float32, but HugeCTR keeps the embeddings'
    Adam moments as float16 then, in which second moments below 6e-8 are zero: off unless the speed is needed."""
    scaler: float = 1024.0
    """Factor on the loss against underflow of float16 gradients; only with `use_mixed_precision`. One of 128, 256, 512
    and 1024."""
    use_cuda_graph: bool = True
    """Record forward and backward pass once and replay them: a step of this network is many short kernels. The
    optimizer's update is not in the record, so the learning rate may change from step to step."""
    use_algorithm_search: bool = True
    """Let cuBLAS try its algorithms for the products, once per model."""
    train_intra_iteration_overlap: bool = False
    train_inter_iteration_overlap: bool = False
    eval_intra_iteration_overlap: bool = False
    eval_inter_iteration_overlap: bool = False
    """The overlaps act on HugeCTR's asynchronous raw reader and embedding collections; with Parquet and a hash
    embedding, as here, its sources do not look at them."""
    all_reduce_algo: str = "NCCL"
    """How several GPUs add their gradients: NCCL or OneShot."""
    grouped_all_reduce: bool = False
    lr_policy: str = "fixed"
    """HugeCTR's only one; the schedule below applies to it."""
    warmup_steps: int = 1
    """Steps over which the learning rate rises from 0; 1 = none."""
    decay_start: int = 0
    """Step at which the learning rate begins to fall; 0 = never."""
    decay_steps: int = 1
    """Steps that the fall takes."""
    decay_power: float = 2.0
    """The fall is the remaining share of `decay_steps` to this power."""
    end_lr: float = 0.0
    """Least learning rate of the fall."""
    batchsize_eval: int = 2048
    max_eval_batches: int = 512
    """HugeCTR's own evaluation, of at most batchsize_eval x max_eval_batches rows, only cross-checks the scores. The
    batch is small because the newest tenth of a small window must make one."""
    auc_tolerance: float = 0.002
    """By how much HugeCTR's AUC may differ from that of the scores computed from its files; 0 = do not compare."""
    prove_restores: bool = True
    """Save every restored model at once and compare it with what was to be loaded: HugeCTR only logs what it could not
    load, and would train on from random weights."""
    num_workers: int = 12
    """Threads that read Parquet; HugeCTR uses no more than one per GPU."""
    max_workspace_mb: int = 0
    """Most MiB per GPU for the embedding table and its optimizer; 0 = nine tenths of the GPU's memory, as nvidia-smi
    tells it."""
    loss_interval: int = 100
    """Steps between looks at the loss, each of which waits for the GPU."""
    stage_rows: int = 1_048_576
    """Rows written as one set of Parquet files while the set before is trained."""

    def __post_init__(self) -> None:
        """Refuses what HugeCTR would refuse later, or not at all."""
        if len(self.vvgpu) != 1 or not self.vvgpu[0] or len(set(self.vvgpu[0])) != len(self.vvgpu[0]):
            raise ContractError(f"vvgpu is {[list(node) for node in self.vvgpu]}, expected one node's distinct GPUs")
        if self.all_reduce_algo not in ALL_REDUCE:
            raise ContractError(f"all_reduce_algo is {self.all_reduce_algo!r}, expected one of {', '.join(ALL_REDUCE)}")
        if self.lr_policy not in LR_POLICIES:
            raise ContractError(f"lr_policy is {self.lr_policy!r}, expected one of {', '.join(LR_POLICIES)}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("decay_start", "decay_power", "end_lr", "max_workspace_mb", "auc_tolerance"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ContractError(f"{name} is {getattr(self, name)}, expected a number of at least 0")
        if self.scaler not in SCALERS:
            raise ContractError(f"scaler is {self.scaler:g}, expected one of {', '.join(f'{s:g}' for s in SCALERS)}")
        if self.decay_start and self.decay_start < self.warmup_steps:
            raise ContractError(
                f"decay_start is {self.decay_start}, expected at least warmup_steps {self.warmup_steps}"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs that share a batch."""
        return len(self.vvgpu[0])


def parse_solver(text: str) -> SolverSettings:
    """The settings that a JSON object overrides; an empty text overrides none.

    Raises:
        ContractError: not a JSON object, an unknown name, a value of another type or out of range.

    >>> parse_solver('{"vvgpu": [[0, 1]], "warmup_steps": 500}').num_gpus
    2
    """
    try:
        document = json.loads(text or "{}")
    except ValueError as error:
        raise ContractError(f"solver is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ContractError(f"solver holds a {type(document).__name__}, expected a JSON object of settings")
    defaults = {f.name: f.default for f in fields(SolverSettings)}
    if unknown := sorted(document.keys() - defaults.keys()):
        raise ContractError(f"solver has unknown settings {unknown}, expected some of {sorted(defaults)}")
    return SolverSettings(**{name: _typed(name, value, defaults[name]) for name, value in document.items()})


def _typed(name: str, value: Any, default: Any) -> Any:
    if name == "vvgpu":
        is_nested = isinstance(value, list) and all(isinstance(node, list) for node in value)
        if not is_nested or not all(type(gpu) is int and gpu >= 0 for node in value for gpu in node):
            raise ContractError(f"vvgpu is {value!r}, expected device numbers per node such as [[0, 1]]")
        return tuple(tuple(node) for node in value)
    wanted = (int, float) if isinstance(default, float) else (type(default),)
    # A bool is an int to isinstance.
    if type(value) not in wanted:
        raise ContractError(f"{name} is {value!r}, expected a value such as {default!r}")
    return float(value) if isinstance(default, float) else value
