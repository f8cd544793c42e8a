"""Run the training step: fit a network and publish a model to the registry.

A model is published completely or not at all. If the work folder and the registry are on the same
disk, the model's weights are moved and not copied. In this case, a large table is written only
once. The network's ONNX graph is exported with the weights, so that deployment does not need torch.
The evaluation step decides whether the model is good enough.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from components.training.backends import (
    make_engine,
    require_backend,
)
from components.training.checkpoint import START, CheckpointFolder
from components.training.device_memory import device_memory_reported
from components.training.engine import Engine
from components.training.fit import FitJob, FitResult, fit
from components.training.preemption import StopRequest
from components.training.start import continue_from, read_parent
from evergreen.config.model import NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.contracts.manifests import Model, TrainingSet, ValidationReport
from evergreen.networks.files import NETWORK_FILE
from evergreen.registry.models import model_folder
from evergreen.runtime.durable import append_line, sha256_tree, whole_directory, write_whole
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)


def publish(
    store: Path,
    described: Callable[[str, Path, dict[str, str]], Model],
    *,
    weights: Path,
    config: NetworkConfig,
    slot_sizes: list[int],
    workflow_path: Path,
    report: ValidationReport,
    created_at: datetime,
) -> Model:
    """Write the model's folder into the registry and return its manifest.

    The model's id is the time of creation and the first 8 hex digits of the weights' hash. A
    retried task that fits the same weights therefore publishes the same model. A folder with this
    id but other parts is replaced.

    Args:
        store: Folder of the model registry.
        described: Creates the manifest from the model's id, its final folder and the hash of each
            part.
        weights: Folder of the weights. The folder is moved into the registry. A later fit that
            needs this folder writes it again.
        config: Configuration of the network.
        slot_sizes: Number of ids of each slot.
        workflow_path: Folder of the feature workflow.
        report: Manifest of the statistics and the schema.
        created_at: Time of the run's first try, in UTC.

    Raises:
        ContractError: the workflow, the statistics or the schema is absent.
    """
    _export_network(weights, config, slot_sizes)
    weights_hash = sha256_tree(weights)
    model_id = f"{created_at.astimezone(timezone.utc):%Y%m%dT%H%M%SZ}-{weights_hash[:8]}"
    final = model_folder(store, model_id)
    if _is_published(final, weights_hash, created_at):
        logger.info("model %s is already in the registry", model_id)
        return Model.read(final / Model.MANIFEST)
    with whole_directory(final, replace=True) as parts:
        # Move the weights last. If another part is absent, the weights then stay in their source
        # folder.
        _copy_parts(parts, workflow_path, report)
        _move(weights, parts / Model.WEIGHTS)
        sha256 = {name: sha256_tree(parts / name) for name in Model.PARTS if name != Model.WEIGHTS}
        manifest = described(model_id, final, {Model.WEIGHTS: weights_hash, **sha256})
        manifest.write(parts / Model.MANIFEST)
    logger.info("published model %s to the registry", model_id)
    return manifest


def _export_network(weights: Path, config: NetworkConfig, slot_sizes: list[int]) -> None:
    from evergreen.networks.network import export_onnx
    from evergreen.networks.scoring import load_network

    network, _ = load_network(weights, config, slot_sizes)
    write_whole(weights / NETWORK_FILE, export_onnx(network, config))


def _move(source: Path, target: Path) -> None:
    """Move a folder. If the target is on another disk, copy the folder and remove the source.

    At any moment, the source under its own name is either complete or absent.
    """
    # The source is renamed before it is removed. After an interruption, the next try would
    # otherwise treat a partial source as complete. The next try removes the renamed folder.
    shutil.move(source.rename(source.with_name(f".{source.name}.moved")), target)


def _copy_parts(parts: Path, workflow_path: Path, report: ValidationReport) -> None:
    if not workflow_path.is_dir():
        raise ContractError(f"feature workflow {workflow_path} is absent, expected a folder")
    shutil.copytree(workflow_path, parts / Model.WORKFLOW)
    (parts / Model.STATISTICS).parent.mkdir()
    files = [(report.statistics_uri, Model.STATISTICS), (report.schema_uri, Model.SCHEMA)]
    if report.reference_uri:
        files.append((report.reference_uri, Model.REFERENCE))
    if report.windows_uri:
        files.append((report.windows_uri, Model.WINDOWS))
    for uri, name in files:
        source = local_path(uri)
        if not source.is_file():
            raise ContractError(f"{source} is absent, expected a file of the validation report")
        shutil.copyfile(source, parts / name)


def _is_published(folder: Path, weights_hash: str, created_at: datetime) -> bool:
    """Return whether the folder contains this run's model with these weights.

    All parts of the model must be intact.
    """
    try:
        model = Model.read(folder / Model.MANIFEST)
    except ContractError:
        return False
    # Another run may have created the same weights with another workflow within the same second.
    return (
        model.created_at == created_at.isoformat()
        and model.sha256[Model.WEIGHTS] == weights_hash
        and all(sha256_tree(folder / name) == model.sha256[name] for name in Model.PARTS)
    )


_CHECKPOINT = "checkpoint"
_METRICS = "metrics.jsonl"
_ATTEMPT = "attempt.json"
_SCRATCH = "engine"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The inputs and the folders of one training run."""

    run: str
    """Name of the run. A second try with the same name continues the first try."""
    store: Path
    """Folder of the model registry."""
    work: Path
    """Folder for intermediate files."""
    backend: str
    """One of `components.training.backends.BACKENDS`."""
    config: NetworkConfig
    settings: TrainingSettings
    num_gpus: int = 1
    """GPUs that share a batch. Only `hugectr` supports more than one."""


def train(
    request: TrainingRun,
    training_set: TrainingSet,
    report: ValidationReport,
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    stop: StopRequest | None = None,
) -> tuple[Model, FitResult]:
    """Train and publish the model of this run.

    Args:
        request: The request.
        training_set: Manifest of the encoded rows.
        report: Manifest of the statistics and the schema.
        clock: Current time in UTC.
        stop: Request to end the fit early, or None.

    Raises:
        ContractError: an input does not match its manifest, or this run cannot continue its parent.
        PermanentError: the backend's library is not installed, or training diverged.
        Preempted: `stop` was requested. The fit is saved.
    """
    recommender = training_set.recommender
    require_backend(
        request.backend, request.config, recommender.features, weight=recommender.data.weight
    )
    parent = read_parent(training_set)
    folder = request.work / request.run / "training"
    created_at = _begin(folder, _fingerprint(request, training_set, parent), clock)
    result = _fitted(request, training_set, parent, folder=folder, stop=stop or StopRequest())

    def described(model_id: str, final: Path, sha256: dict[str, str]) -> Model:
        return Model(
            model_id=model_id,
            uri=final.absolute().as_uri(),
            backend=request.backend,
            config=request.config.as_document(),
            slot_sizes=list(training_set.slot_sizes),
            parent_model_id=parent.model_id if parent else None,
            seed=request.settings.seed,
            num_train_rows=training_set.num_train_rows,
            optimizer_step=result.optimizer_step,
            progressive=dict(result.progressive),
            last_event_time=training_set.last_event_time,
            watermark=training_set.watermark,
            window_start=training_set.window_start,
            raw_digest=training_set.raw_digest,
            sha256=sha256,
            created_at=created_at.isoformat(),
            negative_rate=training_set.negative_rate,
            served_shift=result.served_shift,
            excluded_columns=training_set.excluded_columns,
            days=training_set.days,
            files=training_set.files,
            unread_files=training_set.unread_files,
            recommender=training_set.recommender,
        )

    model = publish(
        request.store,
        described,
        weights=result.weights,
        config=request.config,
        slot_sizes=training_set.slot_sizes,
        workflow_path=local_path(training_set.workflow_uri),
        report=report,
        created_at=created_at,
    )
    return model, result


def _fitted(
    request: TrainingRun,
    training_set: TrainingSet,
    parent: Model | None,
    *,
    folder: Path,
    stop: StopRequest,
) -> FitResult:
    checkpoint = folder / _CHECKPOINT
    memory_reported = device_memory_reported(
        request.config,
        training_set.slot_sizes,
        batch_size=request.settings.batch_size,
        positions=training_set.recommender.features.id_positions,
    )
    with memory_reported, _engine(request, training_set, folder) as engine:
        job = FitJob(
            training_set=training_set,
            config=request.config,
            settings=request.settings,
            start=_start_from(parent, request, training_set, into=checkpoint / START)
            if parent
            else None,
            checkpoint_path=checkpoint,
        )
        with stop.deferred():
            return fit(
                job,
                engine,
                emit=lambda numbers: append_line(folder / _METRICS, json.dumps(numbers)),
                should_stop=stop,
            )


def _start_from(
    parent: Model, request: TrainingRun, training_set: TrainingSet, *, into: Path
) -> Path:
    return continue_from(
        parent, training_set, request.config, into=into, seed=request.settings.seed
    )


@contextmanager
def _engine(request: TrainingRun, training_set: TrainingSet, folder: Path) -> Iterator[Engine]:
    scratch = folder / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # a killed try leaves tables and other files behind
    engine = make_engine(
        request.backend,
        request.config,
        training_set.slot_sizes,
        settings=request.settings,
        scratch=scratch,
        num_gpus=request.num_gpus,
        features=training_set.recommender.features,
    )
    try:
        yield engine
    finally:
        engine.close()
        shutil.rmtree(scratch, ignore_errors=True)


def remove_checkpoint(work: Path, run: str) -> None:
    """Remove the run's checkpoint after its model and manifest are written.

    Without a checkpoint, a new try fits from the start.
    """
    CheckpointFolder(work / run / "training" / _CHECKPOINT).remove()


def _begin(folder: Path, fingerprint: str, clock: Callable[[], datetime]) -> datetime:
    """Return the time of this run's first try.

    Files of an earlier try with other inputs or settings are removed.
    """
    path = folder / _ATTEMPT
    if path.exists():
        attempt = json.loads(path.read_text())
        if attempt["fingerprint"] == fingerprint:
            return datetime.fromisoformat(attempt["created_at"])
        logger.info("the earlier try of this run had other inputs: starting from scratch")
        # Remove the attempt file first. Otherwise an interrupted removal could leave files that a
        # later try with the old inputs would use.
        path.unlink()
    if folder.exists():
        shutil.rmtree(folder)  # otherwise this try would continue from files of another try
    created_at = clock()
    write_whole(
        path, json.dumps({"fingerprint": fingerprint, "created_at": created_at.isoformat()}) + "\n"
    )
    return created_at


def _fingerprint(request: TrainingRun, training_set: TrainingSet, parent: Model | None) -> str:
    """Return a hash of everything that determines the weights."""
    decides: dict[str, Any] = {
        "backend": request.backend,
        "config": request.config.as_document(),
        "settings": request.settings.deciding(),
        "raw_digest": training_set.raw_digest,
        "num_train_rows": training_set.num_train_rows,
        "num_replay_rows": training_set.num_replay_rows,
        "replay_share": training_set.replay_share,
        "negative_rate": training_set.negative_rate,
        "slot_sizes": training_set.slot_sizes,
        "workflow": sha256_tree(local_path(training_set.workflow_uri)),
        "parent": parent.sha256 if parent else None,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
