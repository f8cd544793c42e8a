"""The seam between the step and what fits the network: `Trainer`, its input and its output.

A backend reads the training set itself, because each has its own reader; what it returns goes into the model store in
HugeCTR's files whichever backend it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from components.contracts.dcn import DcnConfig
from components.contracts.manifests import TrainingSet
from components.contracts.model_files import ModelWeights
from components.training.config import TrainingSettings


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """Where an incremental round takes over, already grown to the training set's slot sizes."""

    weights: ModelWeights
    """With Adam's moments where the parent kept them."""
    optimizer_step: int


@dataclass(frozen=True, kw_only=True, eq=False)
class FitJob:
    """One fit."""

    training_set: TrainingSet
    config: DcnConfig
    settings: TrainingSettings
    start: Start | None
    """None = from scratch."""
    checkpoint_path: Path
    """Folder for checkpoints of this fit; a fit that finds one there continues it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FitResult:
    """What a fit ended with."""

    weights: ModelWeights
    """With Adam's moments."""
    optimizer_step: int
    """Steps taken, those before `Start` included."""
    early_stopping: Mapping[str, float | None]
    """`auc` and `log_loss` of the best weights on the stopping slice, before that slice was learnt."""
    rows_per_second: float | None
    """Fitted rows per second of fitting; None where nothing was fitted in this process."""


class Trainer(Protocol):
    """Fits a network to a training set."""

    backend: str

    def fit(self, job: FitJob) -> FitResult:
        """The fitted weights.

        Raises:
            ContractError: the training set is not what its manifest says, or has labels of one class.
            PermanentError: the loss is no longer a number.
        """
