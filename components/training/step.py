"""The step: from manifests and settings to a model in the store. Sequences; the work is in the modules it calls."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from components.contracts import model_store
from components.contracts.dcn import DcnConfig
from components.contracts.durable import write_whole
from components.contracts.manifests import Model, TrainingSet, ValidationReport
from components.contracts.uris import local_path
from components.training.backends import make_trainer
from components.training.config import TrainingSettings
from components.training.metrics_sink import JsonLinesSink
from components.training.parent import continue_from
from components.training.publish import publish
from components.training.trainer import FitJob, FitResult

logger = logging.getLogger(__name__)

CHECKPOINT = "checkpoint"
METRICS = "metrics.jsonl"
_ATTEMPT = "attempt.json"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What one run is asked to do."""

    run: str
    """Name of the run; a second try under the same name continues the first."""
    store: Path
    """Model store."""
    work: Path
    """Folder for intermediate files."""
    parent: str
    """`current`, `none`, or a model's id."""
    backend: str
    """`pytorch` or `hugectr`."""
    config: DcnConfig
    settings: TrainingSettings


def train(
    asked: TrainingRun,
    training_set: TrainingSet,
    report: ValidationReport,
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
) -> tuple[Model, FitResult]:
    """The model of this run, in the store.

    Raises:
        ContractError: an input is not what it says, or the parent does not fit.
        PermanentError: the backend is not in this version, or training diverged.
    """
    parent = model_store.parent(asked.store, asked.parent)
    folder = asked.work / asked.run / "training"
    created_at = _begin(folder, _fingerprint(asked, training_set, parent), clock)
    sink = JsonLinesSink(folder / METRICS)
    try:
        trainer = make_trainer(asked.backend, sink)
        job = FitJob(
            training_set=training_set,
            config=asked.config,
            settings=asked.settings,
            start=continue_from(parent, training_set, asked.config) if parent else None,
            checkpoint_path=folder / CHECKPOINT,
        )
        result = trainer.fit(job)
    finally:
        sink.close()

    def described(model_id: str, final: Path, sha256: dict[str, str]) -> Model:
        return Model(
            model_id=model_id,
            uri=final.absolute().as_uri(),
            backend=trainer.backend,
            config=asked.config.as_document(),
            slot_sizes=list(training_set.slot_sizes),
            parent_model_id=parent.model_id if parent else None,
            seed=asked.settings.seed,
            num_train_rows=training_set.num_train_rows,
            optimizer_step=result.optimizer_step,
            early_stopping=dict(result.early_stopping),
            last_event_time=training_set.last_event_time,
            raw_digest=training_set.raw_digest,
            sha256=sha256,
            created_at=created_at.isoformat(),
        )

    model = publish(
        asked.store,
        described,
        config=asked.config,
        result=result,
        workflow_path=local_path(training_set.workflow_uri),
        report=report,
        created_at=created_at,
    )
    return model, result


def forget_checkpoint(work: Path, run: str) -> None:
    """Removes the run's checkpoint, once its model and manifest are written; a new try would fit from the start."""
    shutil.rmtree(work / run / "training" / CHECKPOINT, ignore_errors=True)


def _begin(folder: Path, fingerprint: str, clock: Callable[[], datetime]) -> datetime:
    """When this run was first tried; what another input or other settings left under its name is removed."""
    path = folder / _ATTEMPT
    if path.exists():
        attempt = json.loads(path.read_text())
        if attempt["fingerprint"] == fingerprint:
            return datetime.fromisoformat(attempt["created_at"])
        logger.info("the earlier try of this run had other inputs: starting afresh")
    shutil.rmtree(folder, ignore_errors=True)
    created_at = clock()
    write_whole(path, json.dumps({"fingerprint": fingerprint, "created_at": created_at.isoformat()}) + "\n")
    return created_at


def _fingerprint(asked: TrainingRun, training_set: TrainingSet, parent: Model | None) -> str:
    """Changes with everything that decides the weights."""
    decides: dict[str, Any] = {
        "backend": asked.backend,
        "config": asked.config.as_document(),
        "settings": asked.settings.as_document(),
        "raw_digest": training_set.raw_digest,
        "num_train_rows": training_set.num_train_rows,
        "slot_sizes": training_set.slot_sizes,
        "parent": parent.sha256 if parent else None,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
