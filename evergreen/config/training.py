"""The section `training`: optimizer, batches, passes, precision and checkpoints.

`config.model` describes the shape of the network. The training step chooses the rows and the
parent. The defaults suit both a first model and an incremental run on some ten thousand rows.
"""

from dataclasses import asdict, dataclass
from typing import Any

from evergreen.runtime.errors import ContractError, expect

PRECISIONS = ("float32", "tf32", "bfloat16")
"""Values of `TrainingSettings.precision`."""


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """Settings that only HugeCTR has. The defaults suit data-centre GPUs.

    `TrainingSettings` has the settings that both backends share. Three of these settings replace
    settings of HugeCTR: `passes` replaces `max_iter` and `num_epochs`, `checkpoint_minutes`
    replaces `snapshot`, and `precision="tf32"` replaces `enable_tf32_compute`. `TrainingSettings`
    also has HugeCTR's `batchsize`, `lr` and `seed`. `eval_interval` is not needed, because training
    itself scores the last tenth of the rows. `metrics_spec` would stop the training when the AUC
    reaches a limit. `metrics_spec` is not needed, because the number of passes is fixed. `vvgpu` is
    set to the GPUs of the step. Any other argument of `CreateSolver` has HugeCTR's default.
    """

    prove_restores: bool = True
    """Whether each restored model is saved again at once and compared with the files that were
    loaded. If HugeCTR cannot load a file, it only logs this and continues from random weights."""
    loss_interval: int = 100
    """Steps between two readings of the training loss. Each reading of the loss
    waits for the GPU."""
    stage_rows: int = 1_048_576
    """Number of rows in one set of Parquet files. A set is written while the network is trained on
    the previous set."""
    call_minutes: float = 30.0
    """Maximum duration of one call, or of `loss_interval` steps, in minutes. After some errors,
    HugeCTR waits forever. If HugeCTR exceeds this limit, the step ends with exit code 3, and its
    log has the traceback."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "loss_interval", "stage_rows")
        expect(self, "a number in (0, 10000]", lambda value: 0.0 < value <= 10_000, "call_minutes")
        expect(
            self,
            "at most 1,000,000,000",
            lambda value: value <= 10**9,
            "loss_interval",
            "stage_rows",
        )


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of one fit."""

    learning_rate: float = 0.003
    """Learning rate of Adam, for dense parameters and embeddings, at the start of a first model. An
    incremental run multiplies the learning rate by a factor from `round_rates`."""
    round_rates: tuple[float, ...] = (0.1, 1.5)
    """Factors by which the learning rate is multiplied. An incremental run tries each factor. A
    factor replaces an earlier factor only if the result is better by more than a standard error. On
    20,000 rows of unchanged traffic, factor 0.1 raised the AUC by 0.002, and factor 1.5 lowered it
    by 0.006. On traffic that changed in the newest third of the rows, factor 0.1 recovered 26 % of
    the lost AUC, and factor 1.5 recovered 78 %."""
    beta1: float = 0.9
    """Decay of Adam's mean of gradients, per step."""
    beta2: float = 0.999
    """Decay of Adam's mean of squared gradients, per step."""
    epsilon: float = 1e-7
    """Constant that is added to the square root of Adam's second moment. The moment has no bias
    correction, as in HugeCTR."""
    batch_size: int = 2048
    """Maximum number of rows per optimizer step. A step has fewer rows if a pass would otherwise
    have fewer than `min_steps` steps."""
    min_steps: int = 600
    """Minimum number of optimizer steps in a pass, unless batches would become smaller than
    `min_batch_size`. Each row is used once per pass. A short window therefore needs enough steps to
    change the weights."""
    min_batch_size: int = 16
    """Minimum number of rows per optimizer step, unless `batch_size` is smaller. A window of a few
    hundred rows gets fewer steps than `min_steps`, because smaller batches would follow the noise
    of single rows."""
    passes: int = 1
    """Number of passes over the training rows."""
    seed: int = 42
    """Seed of the initial weights, the order of rows and dropout."""
    precision: str = "float32"
    """Arithmetic of the matrix products: float32, tf32 (a GPU's shortened float32) or bfloat16.
    Weights, sums and the optimizer are always float32."""
    checkpoint_minutes: float = 5.0
    """Time between saves within a fit, in minutes. If the process is killed, at most the work of
    this time is lost. A save writes the table with its optimizer state (2 GB for 10 million rows of
    width 16)."""
    solver: SolverSettings = SolverSettings()
    """HugeCTR's own settings."""

    def __post_init__(self) -> None:
        positive = ("learning_rate", "epsilon", "checkpoint_minutes")
        expect(self, "a positive number", lambda value: 0.0 < value < float("inf"), *positive)
        expect(self, "a number in [0, 1)", lambda value: 0.0 <= value < 1.0, "beta1", "beta2")
        expect(
            self,
            "at least 1",
            lambda value: value >= 1,
            "batch_size",
            "min_batch_size",
            "min_steps",
            "passes",
        )
        expect(
            self,
            "at most 16,777,216",
            lambda value: value <= 1 << 24,
            "batch_size",
            "min_batch_size",
        )
        expect(self, "at most 1,000,000,000", lambda value: value <= 10**9, "min_steps")
        expect(self, "at most 10,000", lambda value: value <= 10_000, "passes")
        expect(self, "at least 0", lambda value: value >= 0, "seed")
        expect(self, "below 2^63", lambda value: value < 1 << 63, "seed")
        expect(
            self, f"one of {', '.join(PRECISIONS)}", lambda value: value in PRECISIONS, "precision"
        )
        if not self.round_rates or not all(
            0.0 < share < float("inf") for share in self.round_rates
        ):
            raise ContractError(
                f"round_rates is {self.round_rates}, expected at least one positive number"
            )

    def deciding(self) -> dict[str, Any]:
        """Return the settings that influence the trained weights, as plain values for JSON."""
        values = asdict(self)
        del values["checkpoint_minutes"], values["solver"]["call_minutes"]
        return values
