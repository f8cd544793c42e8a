"""The model store: which model a run continues, and which one it must beat.

Joins training (writes models), deployment (writes releases and the journal) and the steps of the next run, which are
given references: `current` (what is live), `none`, or the id of a stored model.

Layout: `<store>/models/<model_id>/` (see `manifests.Model`), `<store>/verdicts/<model_id>/{verdict,raw_dataset}.json`
(evaluation's last answer), with `scores.json` (`evergreen.statistics.reference`), `card.json` (`registry.model_cards`),
`<store>/releases/<version>.json`, `<store>/graphs/<version>/` (a version's graph and golden rows, which outlive their
place in Triton's repository), `<store>/serving.json` (`manifests.ServingPlace`), `<store>/journal.jsonl`
(`registry.promotion_journal`), `<store>/runs/` (`registry.runs`).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path

from evergreen.contracts.manifests import CURRENT, NONE, Model, RawDataset, Release, ServingPlace, Verdict
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import moment_of
from evergreen.registry.runs import read_notes, trained_model
from evergreen.runtime.durable import sha256_file, sha256_tree
from evergreen.runtime.errors import ContractError
from evergreen.storage.references import keep, refer
from evergreen.storage.uris import local_path

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.data"
"""The files of a served graph: the second one only where tables are too large for one protobuf message. It must lie
beside the first as a file or a hard link, because ONNX Runtime refuses a symbolic link out of the folder."""


def model_folder(store: Path, model_id: str) -> Path:
    """Where the model `model_id` lies."""
    return store / "models" / model_id


def release_path(store: Path, version: int) -> Path:
    """Where the `Release` manifest of `version` lies."""
    return store / "releases" / f"{version}.json"


def graph_folder(store: Path, version: int) -> Path:
    """Where the graph of `version` is kept, with its golden rows."""
    return store / "graphs" / str(version)


def graph_sha256(folder: Path) -> str:
    """The hash of the graph in `folder`: of `model.onnx` where that is all, else of both files and their names."""
    if not (folder / DATA_FILE).exists():
        return sha256_file(folder / GRAPH_FILE)
    names = f"{GRAPH_FILE} {sha256_file(folder / GRAPH_FILE)}\n{DATA_FILE} {sha256_file(folder / DATA_FILE)}\n"
    return hashlib.sha256(names.encode()).hexdigest()


def verdict_paths(store: Path, model_id: str) -> tuple[Path, Path]:
    """Where the last `Verdict` on a model lies, and the `RawDataset` whose rows it was judged by."""
    folder = store / "verdicts" / model_id
    return folder / "verdict.json", folder / "raw_dataset.json"


def scores_path(store: Path, model_id: str) -> Path:
    """Where the histogram of a model's scores of the held-out rows lies."""
    return store / "verdicts" / model_id / "scores.json"


def keep_verdict(store: Path, verdict: Verdict, raw: RawDataset) -> Verdict:
    """Keep what deployment, or a later `promote`, needs of an evaluation, in place of that of an earlier one.

    Args:
        store: The model store; it holds the candidate.
        verdict: The gate's answer.
        raw: The rows that it judged by.

    Returns:
        The verdict with references to the candidate and the rows.

    Raises:
        ContractError: The candidate is not in the store.
    """
    of_verdict, of_raw = verdict_paths(store, verdict.candidate_model_id)
    model = refer(model_folder(store, verdict.candidate_model_id) / Model.MANIFEST)
    verdict = replace(verdict, model=model, raw_dataset=keep(raw, of_raw))
    verdict.write(of_verdict)
    return verdict


def judged_model(store: Path, model_id: str) -> tuple[Model, Verdict, RawDataset]:
    """The stored model with its last verdict, and the rows that it was judged by.

    Raises:
        ContractError: it is not in the store, or was never judged.
    """
    model = stored_model(store, model_id)
    of_verdict, of_raw = verdict_paths(store, model_id)
    if not of_verdict.exists():
        raise ContractError(
            f"{of_verdict} is absent: model {model_id} was never judged, so there is no parity to prove"
        )
    return model, Verdict.read(of_verdict), RawDataset.read(of_raw)


def judged_run(store: Path, run: str) -> tuple[Verdict, RawDataset] | None:
    """The gate's verdict on what `run` trained, and the rows that it was judged by; None where it did not come to that.

    Raises:
        ContractError: the files are corrupt.
    """
    name = trained_model(read_notes(store, run))
    if name is None or not verdict_paths(store, name)[0].exists():
        return None
    return judged_model(store, name)[1:]


def write_serving_place(store: Path, place: ServingPlace) -> None:
    """Notes where releases go, unless that is noted already."""
    if read_serving_place(store) != place:
        place.write(store / "serving.json")


def read_serving_place(store: Path) -> ServingPlace | None:
    """Where the last release went; None before the first one."""
    path = store / "serving.json"
    return ServingPlace.read(path) if path.exists() else None


def model_in(folder: Path) -> Model:
    """Read the manifest of the model in a folder. Its `uri` is that folder, also in a store that was copied or moved.

    Raises:
        ContractError: the manifest is absent or corrupt.
    """
    return replace(Model.read(folder / Model.MANIFEST), uri=folder.absolute().as_uri())


def read_release(store: Path, version: int) -> Release:
    """Read the manifest of a version. Model and graph that it names are this store's, also in a copied or moved one.

    Raises:
        ContractError: the manifest is absent or corrupt.
    """
    found = Release.read(release_path(store, version))
    model, graph = model_folder(store, found.model_id), graph_folder(store, version) / GRAPH_FILE
    return replace(found, model_uri=model.absolute().as_uri(), graph_uri=graph.absolute().as_uri())


def verified_part(model: Model, part: str) -> Path:
    """Return the folder of one part of a model, whose bytes were compared with the manifest once in this process.

    Args:
        model: The manifest, as `model_in` reads it.
        part: One of `Model.PARTS`.

    Raises:
        ContractError: the files are not those that the model was stored with; the message names the folder.
    """
    folder = local_path(model.uri) / part
    if part in model.sha256:
        _expect_tree(folder, model.sha256[part], model.model_id)
    return folder


@lru_cache(maxsize=256)
def _expect_tree(folder: Path, expected: str, model_id: str) -> None:
    found = sha256_tree(folder)
    if found != expected:
        names = ", ".join(sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()))
        raise ContractError(
            f"{folder} with {names or 'no files'} has sha256 {found}, expected {expected} as in the manifest of model "
            f"{model_id}: a file was changed, corrupted or lost since the model was stored; restore the folder, or "
            "continue another model"
        )


def stored_model(store: Path, model_id: str, *, role: str = "model") -> Model:
    """The model `model_id`, which errors call by its `role`.

    Raises:
        ContractError: it is not in the store.
    """
    manifest = model_folder(store, model_id) / Model.MANIFEST
    if not manifest.exists():
        raise ContractError(f"{role} {model_id!r} is not in the model store {store}")
    return model_in(manifest.parent)


def referenced_model(store: Path, reference: str) -> Model:
    """The model that a person named by the number of a version, or by its id, which is no number.

    Raises:
        ContractError: there is no such version or model.
    """
    if not reference.isdecimal():
        return stored_model(store, reference)
    if not (manifest := release_path(store, int(reference))).exists():
        raise ContractError(f"version {reference} is not in the model store {store}, expected a released version")
    return stored_model(store, Release.read(manifest).model_id)


def champion(store: Path, reference: str) -> Release | None:
    """The release that `reference` names; None for `none`, and for `current` where nothing is live.

    Raises:
        ContractError: no release of the named model is in the journal.
    """
    if reference == NONE:
        return None
    if reference == CURRENT:
        live = promotion_journal.current(store)
    else:
        promotions = [p for p in promotion_journal.read_journal(store) if p.model_id == reference]
        if not promotions:
            raise ContractError(f"champion {reference!r} was never released, expected a released model's id")
        live = promotions[-1]
    return read_release(store, live.version) if live else None


def parent(store: Path, reference: str) -> Model | None:
    """The model that `reference` names; None for `none`, and for `current` where nothing is live.

    Raises:
        ContractError: no model of that id is in the store, or the reference names several.
    """
    if reference == NONE:
        return None
    if len(names := [name for name in re.split(r"[\s,;+]+", reference) if name]) > 1:
        raise ContractError(
            f"parent is {reference!r}, which names {len(names)} models, expected one: models cannot be merged, because "
            "the same id means another category, and the same weight another feature, in each"
        )
    if reference == CURRENT:
        release = champion(store, CURRENT)
        return stored_model(store, release.model_id, role="parent") if release else None
    return stored_model(store, reference, role="parent")


def learned_later(model: Model, models: Mapping[str, Model]) -> list[str]:
    """Ids of the models with whose round a line that continues `model` had learned all rows that judged it.

    Models further down such a line, which keep what it learned, are left out. A round whose window begins after some of
    the rows (`window_start`) leaves them to a later one whose window begins early enough. Rows that were thinned away
    or quarantined count as learned.

    Raises:
        ValueError: a manifest that matters holds something else than times.
    """
    found = []

    def follow(parent_id: str, learned: datetime) -> None:
        for each in models.values():
            if each.parent_model_id != parent_id:
                continue
            skips = each.window_start and moment_of(each.window_start) > learned + timedelta(microseconds=1)
            until = learned if skips else max(learned, moment_of(each.last_learned_time))
            if until >= moment_of(model.last_event_time):
                found.append(each.model_id)
            else:
                follow(each.model_id, until)

    follow(model.model_id, moment_of(model.last_learned_time))
    return found
