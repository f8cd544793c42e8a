"""A fit's checkpoint: everything that decides the epochs to come, in one folder that is whole or absent.

Random numbers need no state here: each epoch seeds its own from the seed and its number. Whether a checkpoint belongs
to the run that finds it is the step's question.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.contracts.dcn import DcnConfig
from components.contracts.durable import whole_directory, write_whole
from components.contracts.model_files import ModelWeights, read_model, write_model

logger = logging.getLogger(__name__)

_PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """A network at the end of an epoch, and how it did on the stopping slice."""

    epoch: int
    """Epochs completed; 0 = as the fit began."""
    step: int
    weights: ModelWeights
    """With moments."""
    scores: Mapping[str, float | None]
    """`auc` and `log_loss`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Where a fit stands."""

    now: Moment
    best: Moment


def save(folder: Path, config: DcnConfig, checkpoint: Checkpoint) -> None:
    """Writes the checkpoint below `folder`, then removes the older ones."""
    final = folder / f"{checkpoint.now.epoch:04d}"
    shutil.rmtree(final, ignore_errors=True)
    with whole_directory(final) as aside:
        moments = {"now": checkpoint.now, "best": checkpoint.best}
        for name, moment in moments.items():
            if name == "now" or moment.epoch != checkpoint.now.epoch:
                write_model(aside / name, config, moment.weights)
        described = {name: {"epoch": m.epoch, "step": m.step, "scores": dict(m.scores)} for name, m in moments.items()}
        write_whole(aside / _PROGRESS, json.dumps(described, indent=2) + "\n")
    for older in folder.iterdir():
        if older != final:
            shutil.rmtree(older)


def load(folder: Path, config: DcnConfig, slot_sizes: list[int]) -> Checkpoint | None:
    """The newest checkpoint below `folder`; None where there is none."""
    # A folder that was never finished begins with a dot.
    whole = sorted(path for path in folder.glob("[0-9]*") if path.is_dir())
    if not whole:
        return None
    described = json.loads((whole[-1] / _PROGRESS).read_text())
    moments = {}
    for name in ("now", "best"):
        own = described["best"]["epoch"] != described["now"]["epoch"]
        weights = read_model(whole[-1] / (name if own else "now"), config, slot_sizes, optimizer=True)
        moments[name] = Moment(weights=weights, **described[name])
    logger.info("checkpoint found: epoch %d, step %d", moments["now"].epoch, moments["now"].step)
    return Checkpoint(**moments)
