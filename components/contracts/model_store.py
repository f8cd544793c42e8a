"""The model store: which model a run continues, and which one it must beat.

Joins training (writes models), deployment (writes releases and the journal) and the steps of the next run, which are
given references: `current` (what is live), `none`, or the id of a stored model.

Layout: `<store>/models/<model_id>/` (see `manifests.Model`), `<store>/releases/<version>.json`,
`<store>/journal.jsonl` (`contracts.promotion_journal`), `<store>/runs/` (`contracts.run_notes`).
"""

from __future__ import annotations

from pathlib import Path

from components.contracts import promotion_journal
from components.contracts.errors import ContractError
from components.contracts.manifests import Model, Release
from components.contracts.retrain_request import CURRENT, NONE
from components.contracts.uris import local_path


def model_folder(store: Path, model_id: str) -> Path:
    """Where the model `model_id` lies."""
    return store / "models" / model_id


def release_path(store: Path, version: int) -> Path:
    """Where the `Release` manifest of `version` lies."""
    return store / "releases" / f"{version}.json"


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
    return Release.read(local_path(live.release_uri)) if live else None


def parent(store: Path, reference: str) -> Model | None:
    """The model that `reference` names; None for `none`, and for `current` where nothing is live.

    Raises:
        ContractError: no model of that id is in the store.
    """
    if reference == NONE:
        return None
    if reference == CURRENT:
        release = champion(store, CURRENT)
        return Model.read(local_path(release.model_uri) / Model.MANIFEST) if release else None
    manifest = model_folder(store, reference) / Model.MANIFEST
    if not manifest.exists():
        raise ContractError(f"parent {reference!r} is not in the model store {store}")
    return Model.read(manifest)
