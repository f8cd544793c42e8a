"""The section `training`: optimizer, batches, passes, precision and checkpoints.

`config.model` has the shape of the network. The step chooses rows and parent. The defaults suit both a first model and
an incremental round on some ten thousand rows.
"""

from dataclasses import asdict, dataclass
from typing import Any

from evergreen.runtime.errors import ContractError, expect

PRECISIONS = ("float32", "tf32", "bfloat16")
"""Values of `TrainingSettings.precision`."""


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """Settings of HugeCTR alone. The defaults suit data-centre GPUs.

    Not here, because both backends have them alike (`TrainingSettings`): `eval_interval`, since a fit scores its last
    tenth itself; the stop at an AUC (`metrics_spec`), since the passes are fixed; `max_iter`, `num_epochs` (`passes`);
    `snapshot` (`checkpoint_minutes`); `batchsize`, `lr`, `seed`; and `enable_tf32_compute`, which `precision="tf32"`
    asks for. `vvgpu` are the GPUs that the step is given. What else `CreateSolver` takes keeps HugeCTR's default.
    """

    prove_restores: bool = True
    """Save every restored model at once and compare it with what was to be loaded: HugeCTR only logs what it could not
    load, and would train on from random weights."""
    loss_interval: int = 100
    """Steps between looks at the loss, each of which waits for the GPU."""
    stage_rows: int = 1_048_576
    """Rows written as one set of Parquet files while the set before is trained."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "loss_interval", "stage_rows")
        expect(self, "at most 1,000,000,000", lambda value: value <= 10**9, "loss_interval", "stage_rows")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings of one fit."""

    learning_rate: float = 0.003
    """Adam's, for dense parameters and embeddings: a first model's at its begin; a round's are shares of it."""
    round_rates: tuple[float, ...] = (0.1, 1.5)
    """Shares of it at which an incremental round is tried; a later one is taken where it is better by a standard error.
    On 20,000 rows of an unchanged world the low rate gains 0.002 AUC and a high one loses 0.006; where the newest third
    has changed, the low one regains 26 % of the lost AUC and the high one 78 %."""
    beta1: float = 0.9
    """Decay of Adam's mean of gradients, per step."""
    beta2: float = 0.999
    """Decay of Adam's mean of squared gradients, per step."""
    epsilon: float = 1e-7
    """Added to the root of Adam's second moment, uncorrected (HugeCTR's placement and default)."""
    batch_size: int = 2048
    """Rows per optimizer step, at most; fewer where a pass would have less than `min_steps` of them."""
    min_steps: int = 600
    """Optimizer steps in a pass, at least, as far as `min_batch_size` allows: a row is learned once, so a short window
    has to move the weights far enough in its few rows."""
    min_batch_size: int = 16
    """Rows per optimizer step, at least, where `batch_size` is not less: a window of a few hundred rows makes fewer
    steps than `min_steps` rather than steps that follow the noise of single rows."""
    passes: int = 1
    """Passes over the rows."""
    seed: int = 42
    """Decides initial weights, the order of rows and dropout."""
    precision: str = "float32"
    """Arithmetic of the matrix products: float32, tf32 (a GPU's shortened float32) or bfloat16. Weights, sums and the
    optimizer are float32 in all three."""
    checkpoint_minutes: float = 5.0
    """Time between saves within a fit: what a kill loses at most. A save writes the table with its optimizer state
    (2 GB for 10 million rows of width 16)."""
    solver: SolverSettings = SolverSettings()
    """HugeCTR's own settings."""

    def __post_init__(self) -> None:
        positive = ("learning_rate", "epsilon", "checkpoint_minutes")
        expect(self, "a positive number", lambda value: 0.0 < value < float("inf"), *positive)
        expect(self, "a number in [0, 1)", lambda value: 0.0 <= value < 1.0, "beta1", "beta2")
        expect(self, "at least 1", lambda value: value >= 1, "batch_size", "min_batch_size", "min_steps", "passes")
        expect(self, "at most 16,777,216", lambda value: value <= 1 << 24, "batch_size", "min_batch_size")
        expect(self, "at most 1,000,000,000", lambda value: value <= 10**9, "min_steps")
        expect(self, "at most 10,000", lambda value: value <= 10_000, "passes")
        expect(self, "at least 0", lambda value: value >= 0, "seed")
        expect(self, "below 2^63", lambda value: value < 1 << 63, "seed")
        expect(self, f"one of {', '.join(PRECISIONS)}", lambda value: value in PRECISIONS, "precision")
        if not self.round_rates or not all(0.0 < share < float("inf") for share in self.round_rates):
            raise ContractError(f"round_rates is {self.round_rates}, expected at least one positive number")

    def deciding(self) -> dict[str, Any]:
        """Return the settings that decide the fitted weights, as JSON-ready values."""
        return {name: value for name, value in asdict(self).items() if name != "checkpoint_minutes"}
