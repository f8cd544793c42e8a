"""The parent model's feature workflow and category counts, which this run continues.

A stored workflow is refused unless the model was trained with it. With another workflow, every
embedding could silently belong to another category. `admission.npz` is used only by the
preprocessing of the next run. The file records when each category was last seen, and the counts of
categories that have no id yet. Training copies the folder into the model, so a rollback to an older
model also restores its counts.
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
from evergreen.registry import models as registry
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, run_again

logger = logging.getLogger(__name__)

ADMISSION_FILE = "admission.npz"
"""File with int64 arrays for each column, named by the column's position. Array `0` contains the
time at which each id of column 0 was last seen. The arrays `0_candidates`, `0_frequencies` and
`0_last_seen` describe the candidates of this column."""


def save_columns(columns: Sequence[Column], folder: Path) -> None:
    """Write the counts and times of the categorical columns into `folder`.

    Columns with the same content give the same bytes.
    """
    arrays: dict[str, Any] = {}
    for i, column in enumerate(columns):
        known = column.candidates
        arrays |= {f"{i}": column.last_seen, f"{i}_candidates": known.categories}
        arrays |= {f"{i}_frequencies": known.frequencies, f"{i}_last_seen": known.last_seen}
    content = io.BytesIO()
    # All categories of one window have the same time, so compression is effective. The times of a
    # million ids from 30 windows take 1 MB instead of 8 MB.
    np.savez_compressed(content, **{name: array.astype("<i8") for name, array in arrays.items()})
    write_whole(folder / ADMISSION_FILE, content.getvalue())


def load_columns(folder: Path, features: FeatureWorkflow) -> list[Column]:
    """Read the categorical columns from `folder`. The columns belong to the workflow `features`.

    Raises:
        ContractError: the file is absent or corrupt.
    """
    path, columns = folder / ADMISSION_FILE, []
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for i, vocabulary in enumerate(features.vocabularies):
                candidates = Candidates(
                    categories=arrays[f"{i}_candidates"],
                    frequencies=arrays[f"{i}_frequencies"],
                    last_seen=arrays[f"{i}_last_seen"],
                )
                columns.append(
                    Column(vocabulary=vocabulary, last_seen=arrays[f"{i}"], candidates=candidates)
                )
        return columns
    except (OSError, KeyError, ValueError, EOFError, BadZipFile) as error:
        raise ContractError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ParentWorkflow:
    """The parent model, its feature workflow, and the recorded counts of its categories."""

    model: Model
    features: FeatureWorkflow
    columns: dict[str, Column]
    """Vocabulary and counts of each slot."""

    @property
    def scaling(self) -> dict[str, tuple[float, float]]:
        """Centre and scale of each numeric feature. The centre is subtracted first."""
        means, stds = map(np.ndarray.tolist, (self.features.means, self.features.stds))
        return dict(zip(self.features.features.numeric, zip(means, stds)))


def expect_parents_columns(
    features: Features, excluded_columns: list[str], parent: ParentWorkflow | None
) -> None:
    """Check that the columns of this run have the same meaning as the parent's columns.

    Added and removed columns are allowed, and a warning names them.

    Raises:
        ContractError: a column has another kind or other options, or only one of the two runs
            excludes it.
    """
    if parent is None:
        return
    before = parent.features.features
    features.expect_continues(before, parent=parent.model.model_id)
    if added := [name for name in features.names if name not in before.names]:
        logger.warning(
            "columns %s are new: the parent %s was not trained on them",
            added,
            parent.model.model_id,
        )
    if gone := [name for name in before.names if name not in features.names]:
        logger.warning(
            "columns %s are gone: their weights in the parent %s are dropped",
            gone,
            parent.model.model_id,
        )
    shared_names = {name for name in before.names if name in features.names}
    excluded, excluded_before = (
        shared_names.intersection(excluded_columns),
        shared_names.intersection(parent.features.excluded),
    )
    if excluded != excluded_before:
        raise ContractError(
            f"this run excludes the columns {sorted(excluded) or 'none'}, expected the columns "
            f"that its parent {parent.model.model_id} excludes: "
            f"{sorted(excluded_before) or 'none'}. Exclude the same columns, or, to train from "
            "scratch, " + run_again("-p parent=none")
        )


def find_parent(store: Path, model_id: str | None) -> ParentWorkflow | None:
    """Return the workflow of the parent that extraction chose, or None without a parent.

    Args:
        store: Folder of the model registry.
        model_id: Id of the parent, or None.

    Raises:
        ContractError: the model or its workflow is missing, or the model was trained with another
            workflow.
    """
    if model_id is None:
        return None
    model = registry.stored_model(store, model_id, role="parent")
    folder = registry.verified_part(model, Model.WORKFLOW)
    features = FeatureWorkflow.load(folder)
    if features.slot_sizes != model.slot_sizes:
        raise ContractError(
            f"workflow in {folder} has slot sizes {features.slot_sizes}, expected "
            f"{model.slot_sizes}"
        )
    return ParentWorkflow(
        model=model,
        features=features,
        columns=dict(zip(features.features.slots, load_columns(folder, features))),
    )
