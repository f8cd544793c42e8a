"""A trained model enters the model store: one folder with all that the next steps and rounds need, whole or absent.

The weights are moved there, not copied, where work and store share a disk: a large table is written once, by the
engine. The network's own graph is exported beside them, so that deployment needs no torch. The folder's layout is
`manifests.Model`'s. Fitting happened before; judging comes after.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    Args:
        store: The model store.
        described: Makes the manifest from model id, final folder and the hash of each part.
        weights: Folder of the fitted weights; it is gone afterwards. A fit that misses it makes it again.
        config: The network, whose graph is exported.
        slot_sizes: Number of ids per categorical column.
        workflow_path: Folder of the feature workflow.
        report: Names TFDV's statistics and schema.
        created_at: Time of the run's first try, in UTC.

    Raises:
        ContractError: the workflow, the statistics or the schema is absent.
    """
    models = store / "models"
    models.mkdir(parents=True, exist_ok=True)
    # Named after the run's first try, so that a try that was killed leaves nothing that the next does not remove.
    with _emptied(models / f".incoming-{created_at.astimezone(timezone.utc):%Y%m%dT%H%M%S.%f}") as parts:
        # The weights last: what is absent is said before they are taken from the fit.
        _copy_parts(parts, workflow_path, report)
        _move(weights, parts / Model.WEIGHTS)
        _export_network(parts / Model.WEIGHTS, config, slot_sizes)
        sha256 = {name: sha256_tree(parts / name) for name in _PARTS}
        model_id = f"{created_at.astimezone(timezone.utc):%Y%m%dT%H%M%SZ}-{sha256[Model.WEIGHTS][:8]}"
        final = model_folder(store, model_id)
        manifest = described(model_id, final, sha256)
        if final.exists():
            if _is_whole(final, manifest):
                logger.info("model %s is in the store already", model_id)
                return manifest
            logger.warning("model %s in the store is damaged and gets replaced", model_id)
        with whole_directory(final, replace=True) as aside:
            for name in _PARTS:
                (parts / name).rename(aside / name)
            manifest.write(aside / Model.MANIFEST)
    logger.info("model %s is in the store", model_id)
    return manifest


def _export_network(weights: Path, config: NetworkConfig, slot_sizes: list[int]) -> None:
    from components.models.network import export_onnx
    from components.models.scoring import load_network

    network, _ = load_network(weights, config, slot_sizes)
    write_whole(weights / NETWORK_FILE, export_onnx(network, config))


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """An empty folder of that name, gone afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Moves a folder; to another disk by a copy. Under its own name the source is whole or absent at any moment."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(source, target)
        # A fit that finds half of it would take it for whole; under the other name it removes it.
        shutil.rmtree(source.rename(source.with_name(f".{source.name}.moved")))


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


def _is_whole(folder: Path, manifest: Model) -> bool:
    try:
        stored = Model.read(folder / Model.MANIFEST)
    except (OSError, ContractError):
        return False
    return stored == manifest and all(sha256_tree(folder / name) == manifest.sha256[name] for name in _PARTS)
