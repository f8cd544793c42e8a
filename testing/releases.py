"""A release's verdict, manifest and journal line in a model registry."""

from pathlib import Path
from typing import Any

from evergreen.contracts.manifests import Model, ModelQuality, Release, Verdict
from evergreen.registry.models import model_folder, release_path
from evergreen.registry.promotion_journal import RELEASE, Promotion, append_promotion
from testing.recommenders import SHOP


def store_model(store, model_id, **changes) -> Model:
    """Write the manifest of a stored model, without its files."""
    folder = model_folder(store, model_id)
    values = {
        "model_id": model_id,
        "uri": folder.as_uri(),
        "backend": "pytorch",
        "config": {},
        "slot_sizes": [4] * len(SHOP.features.slots),
        "parent_model_id": None,
        "seed": 0,
        "num_train_rows": 12_345,
        "optimizer_step": 1,
        "progressive": {},
        "last_event_time": "",
        "watermark": "",
        "raw_digest": "",
        "sha256": {},
        "created_at": "",
        "recommender": SHOP,
    }
    made = Model(**{**values, **changes})
    made.write(folder / Model.MANIFEST)
    return made


def passing_verdict(model_id: str, scores: Path, *, num_rows: int, **changes: Any) -> Verdict:
    """Return a passing verdict of the gate.

    The file `scores` contains the candidate's holdout scores.
    """
    fields: dict[str, Any] = {
        "candidate_model_id": model_id,
        "champion_model_id": None,
        "decision": "pass",
        "accepted": True,
        "reason": "auc is high enough",
        "num_rows": num_rows,
        "num_clicks": 1,
        "candidate": ModelQuality(),
        "champion": None,
        "difference": None,
        "scores_uri": scores.as_uri(),
    }
    return Verdict(**{**fields, **changes})


def release(store: Path, version: int, model_id: str = "m1", **changes: Any) -> Release:
    """Write the manifest of a version without making it live."""
    fields: dict[str, Any] = {
        "model_name": "click_model",
        "version": version,
        "previous_version": None,
        "model_id": model_id,
        "model_uri": model_folder(store, model_id).as_uri(),
        "graph_uri": "file:///graph",
        "sha256": {},
        "raw_digest": "d",
        "parity_max_abs_diff": 0.0,
        "parity_rows": 1,
        "repository_uri": "file:///repository",
        "trigger_id": None,
        "reason": "test",
        "published_at": "2026-01-01T00:00:00Z",
    }
    made = Release(**(fields | changes))
    made.write(release_path(store, version))
    return made


def make_live(store: Path, made: Release) -> None:
    """Write the journal's line that makes the release the champion."""
    append_promotion(
        store,
        Promotion(
            time=made.published_at,
            action=RELEASE,
            version=made.version,
            previous_version=made.previous_version,
            model_id=made.model_id,
            model_uri=made.model_uri,
            release_uri=release_path(store, made.version).as_uri(),
            trigger_id=None,
            reason="test",
        ),
    )
