"""The step: from manifests and settings to a model in the store, with all that the next steps and rounds need.

The model enters the store whole or not at all. Its weights are moved there, not copied, where work and store share a
disk: a large table is written once, by the engine. The network's own graph is exported beside them, so that deployment
needs no torch. Fitting is left to the modules that are called here, judging to evaluation.
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

from components.training.backends import make_engine, require_backend
from components.training.checkpoint import START, CheckpointFolder
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
    """Writes the model's folder into the store and gives its manifest.

    The id is the time of creation and the first 8 hex digits of the weights' hash, so a retried task that fits the same
    weights publishes the same model; a folder of that id whose parts differ is replaced.

    `described` makes the manifest from model id, final folder and the hash of each part. The folder `weights` is gone
    afterwards; a fit that misses it makes it again. `created_at` is the time of the run's first try, in UTC.

    Raises:
        ContractError: the workflow, the statistics or the schema is absent.
    """
    _export_network(weights, config, slot_sizes)
    weights_hash = sha256_tree(weights)
    model_id = f"{created_at.astimezone(timezone.utc):%Y%m%dT%H%M%SZ}-{weights_hash[:8]}"
    final = model_folder(store, model_id)
    if _is_published(final, weights_hash, created_at):
        logger.info("model %s is in the store already", model_id)
        return Model.read(final / Model.MANIFEST)
    with whole_directory(final, replace=True) as parts:
        # The weights last: what is absent is reported before they are taken from the fit.
        _copy_parts(parts, workflow_path, report)
        _move(weights, parts / Model.WEIGHTS)
        sha256 = {name: sha256_tree(parts / name) for name in Model.PARTS if name != Model.WEIGHTS}
        manifest = described(model_id, final, {Model.WEIGHTS: weights_hash, **sha256})
        manifest.write(parts / Model.MANIFEST)
    logger.info("model %s is in the store", model_id)
    return manifest


def _export_network(weights: Path, config: NetworkConfig, slot_sizes: list[int]) -> None:
    from evergreen.networks.network import export_onnx
    from evergreen.networks.scoring import load_network

    network, _ = load_network(weights, config, slot_sizes)
    write_whole(weights / NETWORK_FILE, export_onnx(network, config))


def _move(source: Path, target: Path) -> None:
    """Moves a folder, to another disk by a copy. Under its own name the source is whole or absent at any moment."""
    # Half of it under its own name would be taken for whole by the next try; under the other name it is removed.
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
            raise ContractError(f"{source} is absent, expected the validation report's file")
        shutil.copyfile(source, parts / name)


def _is_published(folder: Path, weights_hash: str, created_at: datetime) -> bool:
    """Whether the folder holds this run's model of these weights, all of its parts as its manifest says."""
    try:
        model = Model.read(folder / Model.MANIFEST)
    except ContractError:
        return False
    # Another run may have made the same weights of another workflow within the same second.
    return (
        model.created_at == created_at.isoformat()
        and model.sha256[Model.WEIGHTS] == weights_hash
        and all(sha256_tree(folder / name) == model.sha256[name] for name in Model.PARTS)
    )


CHECKPOINT = "checkpoint"
METRICS = "metrics.jsonl"
_ATTEMPT = "attempt.json"
_SCRATCH = "engine"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What one run is asked to do."""

    run: str
    """Name of the run; a second try under the same name continues the first."""
    store: Path
    """Model store."""
    work: Path
    """Folder for intermediate files."""
    backend: str
    """`pytorch` or `hugectr`."""
    config: NetworkConfig
    settings: TrainingSettings
    num_gpus: int = 1
    """GPUs that share a batch; more than one only for `hugectr`."""


def train(
    asked: TrainingRun,
    training_set: TrainingSet,
    report: ValidationReport,
    *,
    clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    stop: StopRequest | None = None,
) -> tuple[Model, FitResult]:
    """The model of this run, in the store.

    Raises:
        ContractError: an input is not what it says, or the parent does not fit.
        PermanentError: the backend's library is not installed, or training diverged.
        Preempted: `stop` came; the fit is saved.
    """
    recommender = training_set.recommender
    require_backend(asked.backend, asked.config, recommender.features, weight=recommender.data.weight)
    parent = read_parent(training_set)
    folder = asked.work / asked.run / "training"
    created_at = _begin(folder, _fingerprint(asked, training_set, parent), clock)
    result = _fitted(asked, training_set, parent, folder=folder, stop=stop or StopRequest())

    def described(model_id: str, final: Path, sha256: dict[str, str]) -> Model:
        return Model(
            model_id=model_id,
            uri=final.absolute().as_uri(),
            backend=asked.backend,
            config=asked.config.as_document(),
            slot_sizes=list(training_set.slot_sizes),
            parent_model_id=parent.model_id if parent else None,
            seed=asked.settings.seed,
            num_train_rows=training_set.num_train_rows,
            optimizer_step=result.optimizer_step,
            progressive=dict(result.progressive),
            last_event_time=training_set.last_event_time,
            last_learned_time=training_set.last_learned_time,
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
        asked.store,
        described,
        weights=result.weights,
        config=asked.config,
        slot_sizes=training_set.slot_sizes,
        workflow_path=local_path(training_set.workflow_uri),
        report=report,
        created_at=created_at,
    )
    return model, result


def _fitted(
    asked: TrainingRun, training_set: TrainingSet, parent: Model | None, *, folder: Path, stop: StopRequest
) -> FitResult:
    checkpoint = folder / CHECKPOINT
    with _engine(asked, training_set, folder) as engine:
        job = FitJob(
            training_set=training_set,
            config=asked.config,
            settings=asked.settings,
            start=_start_from(parent, asked, training_set, into=checkpoint / START) if parent else None,
            checkpoint_path=checkpoint,
        )
        with stop.deferred():
            return fit(
                job,
                engine,
                emit=lambda numbers: append_line(folder / METRICS, json.dumps(numbers)),
                should_stop=stop,
            )


def _start_from(parent: Model, asked: TrainingRun, training_set: TrainingSet, *, into: Path) -> Path:
    return continue_from(parent, training_set, asked.config, into=into, seed=asked.settings.seed)


@contextmanager
def _engine(asked: TrainingRun, training_set: TrainingSet, folder: Path) -> Iterator[Engine]:
    scratch = folder / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # as a killed try leaves it, a table and more
    engine = make_engine(
        asked.backend,
        asked.config,
        training_set.slot_sizes,
        settings=asked.settings,
        scratch=scratch,
        num_gpus=asked.num_gpus,
        features=training_set.recommender.features,
    )
    try:
        yield engine
    finally:
        engine.close()
        shutil.rmtree(scratch, ignore_errors=True)


def forget_checkpoint(work: Path, run: str) -> None:
    """Removes the run's checkpoint, once its model and manifest are written; a new try would fit from the start."""
    CheckpointFolder(work / run / "training" / CHECKPOINT).forget()


def _begin(folder: Path, fingerprint: str, clock: Callable[[], datetime]) -> datetime:
    """When this run was first tried; what another input or other settings left under its name is removed."""
    path = folder / _ATTEMPT
    if path.exists():
        attempt = json.loads(path.read_text())
        if attempt["fingerprint"] == fingerprint:
            return datetime.fromisoformat(attempt["created_at"])
        logger.info("the earlier try of this run had other inputs: starting afresh")
        # First what makes the rest count: half of it must not be taken for whole by a try that goes back to those.
        path.unlink()
    if folder.exists():
        shutil.rmtree(folder)  # else this try would go on from what another one left
    created_at = clock()
    write_whole(path, json.dumps({"fingerprint": fingerprint, "created_at": created_at.isoformat()}) + "\n")
    return created_at


def _fingerprint(asked: TrainingRun, training_set: TrainingSet, parent: Model | None) -> str:
    """Changes with everything that decides the weights."""
    decides: dict[str, Any] = {
        "backend": asked.backend,
        "config": asked.config.as_document(),
        "settings": asked.settings.deciding(),
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
