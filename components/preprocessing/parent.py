"""The workflow that this round carries on: that of the model which training will continue.

Refuses a stored workflow that is not the one the model was trained with: ids that moved would silently give every
embedding another meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from components.contracts.manifests import Model
from components.contracts.workflow import FeatureWorkflow
from components.preprocessing import admission
from components.preprocessing.vocabularies import Column
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.store import models as model_store


@dataclass(frozen=True, kw_only=True)
class Parent:
    """A stored model, its feature workflow, and what that round remembered of its categories."""

    model: Model
    features: FeatureWorkflow
    columns: list[Column]


def expect_parents_columns(excluded_columns: list[str], parent: Parent | None) -> None:
    """Refuses a round that leaves out other columns than its parent: the parent's weights were fitted to them.

    Raises:
        ContractError: the excluded columns differ; names those that do.
    """
    if parent is not None and set(excluded_columns) != set(parent.features.excluded):
        missing = sorted(set(excluded_columns) - set(parent.features.excluded))
        added = sorted(set(parent.features.excluded) - set(excluded_columns))
        raise ContractError(
            f"columns of this run lack {missing or 'none'} of the parent {parent.model.model_id}'s and add "
            f"{added or 'none'}, expected the parent's columns; state those, or train from scratch with parent=none"
        )


def find_parent(store: Path, reference: str) -> Parent | None:
    """The parent that `reference` names (`current`, `none` or a model's id); None where there is none.

    Raises:
        ContractError: the model or its workflow is missing, or the workflow is not the one it was trained with.
    """
    try:
        model = model_store.parent(store, reference)
    except OSError as error:
        raise ContractError(f"parent {reference!r} cannot be read: {error}") from error
    if model is None:
        return None
    folder = local_path(model.uri) / Model.WORKFLOW
    features = FeatureWorkflow.load(folder)
    found, expected = sha256_tree(folder), model.sha256.get("workflow")
    if expected is not None and found != expected:
        raise ContractError(
            f"workflow in {folder} has sha256 {found}, expected {expected} as the model was trained with"
        )
    if features.slot_sizes != model.slot_sizes:
        raise ContractError(f"workflow in {folder} has slot sizes {features.slot_sizes}, expected {model.slot_sizes}")
    watermark = admission.microseconds(f"last_event_time of model {model.model_id}", model.last_event_time)
    columns = admission.load(folder, features, otherwise_last_seen=watermark)
    return Parent(model=model, features=features, columns=columns)
