"""A trained model enters the model store: one folder with all that the next steps and rounds need, whole or absent.

The weights are moved there, not copied, where work and store share a disk: a large table is written once, by the
engine. The network's own graph is exported beside them, so that deployment needs no torch. The folder's layout is
`manifests.Model`'s. Fitting happened before; judging comes after.
"""

import logging
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from components.contracts.manifests import Model, ValidationReport
from components.models.configs import NetworkConfig
from components.models.files import NETWORK_FILE
from components.runtime.durable import sha256_tree, whole_directory, write_whole
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.store.models import model_folder

logger = logging.getLogger(__name__)

_PARTS = (Model.WEIGHTS, Model.WORKFLOW, "statistics")


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
        sha256 = {name: sha256_tree(parts / name) for name in _PARTS if name != Model.WEIGHTS}
        manifest = described(model_id, final, {Model.WEIGHTS: weights_hash, **sha256})
        manifest.write(parts / Model.MANIFEST)
    logger.info("model %s is in the store", model_id)
    return manifest


def _export_network(weights: Path, config: NetworkConfig, slot_sizes: list[int]) -> None:
    from components.models.network import export_onnx
    from components.models.scoring import load_network

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
        and all(sha256_tree(folder / name) == model.sha256[name] for name in _PARTS)
    )
