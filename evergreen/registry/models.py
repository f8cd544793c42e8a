"""The model registry: paths of its files, and look-up of models, releases and verdicts.

Training writes models, and deployment writes releases and the journal. Steps of a run refer to a
model by its id, by `current` (the live model) or by `none` (no model).

Layout of `<store>`:

- `models/<model_id>/`: a model, see `manifests.Model`.
- `verdicts/<model_id>/`: the last evaluation, as `verdict.json`, `raw_dataset.json`, `scores.json`
  (`evergreen.statistics.reference`) and `card.json` (`evergreen.registry.model_cards`).
- `releases/<version>.json`: a `Release`.
- `graphs/<version>/`: a version's graph and golden rows. The files remain in this folder after
  Triton's repository has removed its copies.
- `serving.json`: `manifests.ServingTarget`.
- `journal.jsonl`: `evergreen.registry.promotion_journal`.
- `runs/`: `evergreen.registry.runs`.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path

from evergreen.contracts.manifests import (
    CURRENT,
    NONE,
    Model,
    RawDataset,
    Release,
    ServingTarget,
    Verdict,
)
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import moment_of
from evergreen.registry.runs import read_notes, trained_model
from evergreen.runtime.durable import sha256_file, sha256_tree
from evergreen.runtime.errors import ContractError
from evergreen.storage.references import keep, refer
from evergreen.storage.uris import local_path

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.data"
"""Names of the files of a served graph.

`model.data` exists only if the tables are too large for one protobuf message. The file must be in
the same folder, as a plain file or a hard link, because ONNX Runtime refuses a symbolic link out of
the folder.
"""


def model_folder(store: Path, model_id: str) -> Path:
    """Return the folder of a model."""
    return store / "models" / model_id


def release_path(store: Path, version: int) -> Path:
    """Return the path of a version's `Release` manifest."""
    return store / "releases" / f"{version}.json"


def graph_folder(store: Path, version: int) -> Path:
    """Return the folder of a version's graph and golden rows."""
    return store / "graphs" / str(version)


def graph_sha256(folder: Path) -> str:
    """Return the hash of the graph in `folder`.

    The result is normally the hash of `model.onnx`. If the folder has a `model.data`, the hash
    covers the names and hashes of both files.
    """
    if not (folder / DATA_FILE).exists():
        return sha256_file(folder / GRAPH_FILE)
    names = (
        f"{GRAPH_FILE} {sha256_file(folder / GRAPH_FILE)}\n{DATA_FILE} "
        f"{sha256_file(folder / DATA_FILE)}\n"
    )
    return hashlib.sha256(names.encode()).hexdigest()


def verdict_paths(store: Path, model_id: str) -> tuple[Path, Path]:
    """Return the paths of a model's last `Verdict` and of the `RawDataset` behind this verdict."""
    folder = store / "verdicts" / model_id
    return folder / "verdict.json", folder / "raw_dataset.json"


def scores_path(store: Path, model_id: str) -> Path:
    """Return the path of the file with a model's score histogram."""
    return store / "verdicts" / model_id / "scores.json"


def keep_verdict(store: Path, verdict: Verdict, raw: RawDataset) -> Verdict:
    """Store the result of an evaluation for deployment or a later `promote`.

    An earlier result for the same model is replaced.

    Args:
        store: Folder of the model registry, which contains the candidate.
        verdict: Verdict of the gate.
        raw: Manifest of the dataset with the holdout rows.

    Returns:
        The stored verdict, with references to the candidate and the dataset.

    Raises:
        ContractError: the candidate is not in the registry.
    """
    of_verdict, of_raw = verdict_paths(store, verdict.candidate_model_id)
    model = refer(model_folder(store, verdict.candidate_model_id) / Model.MANIFEST)
    verdict = replace(verdict, model=model, raw_dataset=keep(raw, of_raw))
    verdict.write(of_verdict)
    return verdict


def evaluated_model(store: Path, model_id: str) -> tuple[Model, Verdict, RawDataset]:
    """Return a stored model, its last verdict, and the dataset with its holdout rows.

    Raises:
        ContractError: the model is not in the registry, or was never evaluated.
    """
    model = stored_model(store, model_id)
    of_verdict, of_raw = verdict_paths(store, model_id)
    if not of_verdict.exists():
        raise ContractError(
            f"{of_verdict} is absent: model {model_id} was never evaluated, so its parity cannot "
            "be checked"
        )
    return model, Verdict.read(of_verdict), RawDataset.read(of_raw)


def evaluated_run(store: Path, run: str) -> tuple[Verdict, RawDataset] | None:
    """Return the verdict on the model that `run` trained, and the dataset with its holdout rows.

    Returns None if the run trained no model or did not evaluate it.

    Raises:
        ContractError: the files are corrupt.
    """
    name = trained_model(read_notes(store, run))
    if name is None or not verdict_paths(store, name)[0].exists():
        return None
    return evaluated_model(store, name)[1:]


def write_serving_target(store: Path, target: ServingTarget) -> None:
    """Record where releases are published, unless the same target is recorded already."""
    if read_serving_target(store) != target:
        target.write(store / "serving.json")


def read_serving_target(store: Path) -> ServingTarget | None:
    """Return where the last release was published, or None before the first release."""
    path = store / "serving.json"
    return ServingTarget.read(path) if path.exists() else None


def model_in(folder: Path) -> Model:
    """Read the manifest of the model in a folder.

    The `uri` of the returned model is the given folder, even if the registry was copied or moved.

    Raises:
        ContractError: the manifest is missing or corrupt.
    """
    return replace(Model.read(folder / Model.MANIFEST), uri=folder.absolute().as_uri())


def read_release(store: Path, version: int) -> Release:
    """Read the manifest of a version.

    The model and graph URIs of the result point into `store`, even if the registry was copied or
    moved.

    Raises:
        ContractError: the manifest is absent or corrupt.
    """
    found = Release.read(release_path(store, version))
    model, graph = model_folder(store, found.model_id), graph_folder(store, version) / GRAPH_FILE
    return replace(found, model_uri=model.absolute().as_uri(), graph_uri=graph.absolute().as_uri())


def verified_part(model: Model, part: str) -> Path:
    """Compare the files of one part of a model with the manifest, and return the part's folder.

    A process compares each part only once.

    Args:
        model: Manifest from `model_in`.
        part: One of `Model.PARTS`.

    Raises:
        ContractError: a file was changed or lost after the model was stored. The message names the
            folder.
    """
    folder = local_path(model.uri) / part
    if part in model.sha256:
        _expect_tree(folder, model.sha256[part], model.model_id)
    return folder


@lru_cache(maxsize=256)
def _expect_tree(folder: Path, expected: str, model_id: str) -> None:
    found = sha256_tree(folder)
    if found != expected:
        names = ", ".join(
            sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        )
        raise ContractError(
            f"{folder} with {names or 'no files'} has sha256 {found}, expected {expected} as in "
            f"the manifest of model {model_id}: a file was changed, corrupted or lost since the "
            "model was stored; restore the folder, or continue another model"
        )


def stored_model(store: Path, model_id: str, *, role: str = "model") -> Model:
    """Return the model `model_id`.

    Args:
        store: Folder of the model registry.
        model_id: Id of the model.
        role: Noun for the model in error messages.

    Raises:
        ContractError: the model is not in the registry.
    """
    manifest = model_folder(store, model_id) / Model.MANIFEST
    if not manifest.exists():
        raise ContractError(f"{role} {model_id!r} is not in the model registry {store}")
    return model_in(manifest.parent)


def referenced_model(store: Path, reference: str) -> Model:
    """Return the model with this version number or model id.

    A model id is never a number.

    Raises:
        ContractError: the version or model does not exist.
    """
    if not reference.isdecimal():
        return stored_model(store, reference)
    if not (manifest := release_path(store, int(reference))).exists():
        raise ContractError(
            f"version {reference} is not in the model registry {store}, expected a released version"
        )
    return stored_model(store, Release.read(manifest).model_id)


def champion(store: Path, reference: str) -> Release | None:
    """Return the release that `reference` names.

    Returns None for `none`, and for `current` if no version is live.

    Raises:
        ContractError: the journal contains no release of the named model.
    """
    if reference == NONE:
        return None
    if reference == CURRENT:
        live = promotion_journal.current(store)
    else:
        promotions = [p for p in promotion_journal.read_journal(store) if p.model_id == reference]
        if not promotions:
            raise ContractError(
                f"champion {reference!r} was never released, expected a released model's id"
            )
        live = promotions[-1]
    return read_release(store, live.version) if live else None


def parent(store: Path, reference: str) -> Model | None:
    """Return the model that `reference` names.

    Returns None for `none`, and for `current` if no version is live.

    Raises:
        ContractError: the registry has no model of that id, or the reference names several models.
    """
    if reference == NONE:
        return None
    if len(names := [name for name in re.split(r"[\s,;+]+", reference) if name]) > 1:
        raise ContractError(
            f"parent is {reference!r}, which names {len(names)} models, expected one, because "
            "models cannot be merged: their vocabularies differ"
        )
    if reference == CURRENT:
        release = champion(store, CURRENT)
        return stored_model(store, release.model_id, role="parent") if release else None
    return stored_model(store, reference, role="parent")


def trained_later(model: Model, models: Mapping[str, Model]) -> list[str]:
    """Return the descendants of `model` that trained on all of its evaluation rows.

    For each branch of the lineage, only the first of these descendants is returned. If the training
    window of a run begins after some of the rows (`window_start`), the run did not train on all
    rows. The search then continues with later runs of the same branch. A row counts as a training
    row even if it was downsampled away or quarantined.

    Args:
        model: Model with the evaluation rows.
        models: All models of the registry by id.

    Raises:
        ValueError: a manifest has no valid time in a field that must contain a time.
    """
    found = []

    def follow(parent_id: str, trained_until: datetime) -> None:
        for each in models.values():
            if each.parent_model_id != parent_id:
                continue
            skips = each.window_start and moment_of(each.window_start) > trained_until + timedelta(
                microseconds=1
            )
            until = trained_until if skips else max(trained_until, moment_of(each.watermark))
            if until >= moment_of(model.last_event_time):
                found.append(each.model_id)
            else:
                follow(each.model_id, until)

    follow(model.model_id, moment_of(model.watermark))
    return found
