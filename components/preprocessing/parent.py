"""The workflow that this round continues, which is that of training's parent, and what its round remembered.

A stored workflow that is not the one the model was trained with is refused: ids that moved would silently give every
embedding another meaning. Beside the vocabularies, which every reader of a workflow needs, `admission.npz` is for the
next round's preprocessing only: when each category was last seen, and the counts of those that have no id yet. It lies
in the folder that training copies into the model, so going back to an older model goes back to what was known then.
"""

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from components.preprocessing.vocabularies import Candidates, Column
from evergreen.config.features import Features
from evergreen.contracts.manifests import Model
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.registry import models as model_store
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, run_again

logger = logging.getLogger(__name__)

ADMISSION_FILE = "admission.npz"
"""Per column, by its position, int64: `0` (last seen, per id); of its candidates `0_candidates`, `0_sightings`,
`0_last_seen`."""


def save_columns(columns: Sequence[Column], folder: Path) -> None:
    """Writes what is remembered of the categorical columns into `folder`; the same columns give the same bytes."""
    arrays: dict[str, Any] = {}
    for i, column in enumerate(columns):
        known = column.candidates
        arrays |= {f"{i}": column.last_seen, f"{i}_candidates": known.categories}
        arrays |= {f"{i}_sightings": known.sightings, f"{i}_last_seen": known.last_seen}
    content = io.BytesIO()
    # All that one window held has one time: compressed, a million ids of 30 windows take 1 MB instead of 8.
    np.savez_compressed(content, **{name: array.astype("<i8") for name, array in arrays.items()})
    write_whole(folder / ADMISSION_FILE, content.getvalue())


def load_columns(folder: Path, features: FeatureWorkflow) -> list[Column]:
    """The categorical columns of the workflow `features`, which lies in `folder`.

    Raises:
        ContractError: the file is absent or damaged.
    """
    path, columns = folder / ADMISSION_FILE, []
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for i, vocabulary in enumerate(features.vocabularies):
                candidates = Candidates(
                    categories=arrays[f"{i}_candidates"],
                    sightings=arrays[f"{i}_sightings"],
                    last_seen=arrays[f"{i}_last_seen"],
                )
                columns.append(Column(vocabulary=vocabulary, last_seen=arrays[f"{i}"], candidates=candidates))
        return columns
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ContractError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ParentWorkflow:
    """A stored model, its feature workflow, and what that round remembered of its categories."""

    model: Model
    features: FeatureWorkflow
    columns: dict[str, Column]
    """By slot."""

    @property
    def scaling(self) -> dict[str, tuple[float, float]]:
        """What is subtracted from each numeric feature, and what it is then divided by."""
        means, stds = map(np.ndarray.tolist, (self.features.means, self.features.stds))
        return dict(zip(self.features.features.numeric, zip(means, stds)))


def expect_parents_columns(features: Features, excluded_columns: list[str], parent: ParentWorkflow | None) -> None:
    """Refuses a round whose columns mean something else than its parent's; tells which come and which go.

    Raises:
        ContractError: a column has another kind or other options, or only one of the two excludes it; names it.
    """
    if parent is None:
        return
    before = parent.features.features
    features.expect_continues(before, parent=parent.model.model_id)
    if added := [name for name in features.names if name not in before.names]:
        logger.warning("columns %s are new: the parent %s did not learn from them", added, parent.model.model_id)
    if gone := [name for name in before.names if name not in features.names]:
        logger.warning("columns %s are gone: what the parent %s learned of them is, too", gone, parent.model.model_id)
    kept = {name for name in before.names if name in features.names}
    excluded, excluded_before = kept.intersection(excluded_columns), kept.intersection(parent.features.excluded)
    if excluded != excluded_before:
        missing = sorted(excluded - excluded_before)
        added = sorted(excluded_before - excluded)
        raise ContractError(
            f"columns of this run lack {missing or 'none'} of the parent {parent.model.model_id}'s and add "
            f"{added or 'none'}, expected the parent's columns; state those, or, to train from scratch, "
            + run_again("-p parent=none")
        )


def find_parent(store: Path, model_id: str | None) -> ParentWorkflow | None:
    """The workflow of the parent that extraction found; None where there is none.

    Raises:
        ContractError: the model or its workflow is missing, or the workflow is not the one it was trained with.
    """
    if model_id is None:
        return None
    model = model_store.stored_model(store, model_id, role="parent")
    folder = model_store.verified_part(model, Model.WORKFLOW)
    features = FeatureWorkflow.load(folder)
    if features.slot_sizes != model.slot_sizes:
        raise ContractError(f"workflow in {folder} has slot sizes {features.slot_sizes}, expected {model.slot_sizes}")
    return ParentWorkflow(
        model=model, features=features, columns=dict(zip(features.features.slots, load_columns(folder, features)))
    )
