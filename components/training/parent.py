"""The parent a round continues: which one, what it must share with the training set, its files at the new slot sizes.

Which model an id names is `store.models`'s, how rows are laid out `growth`'s.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from components.contracts.criteo import CATEGORICAL
from components.contracts.dcn import DcnConfig
from components.contracts.manifests import Model, TrainingSet
from components.contracts.model_files import open_model
from components.contracts.retrain_request import CURRENT
from components.contracts.workflow import FeatureWorkflow
from components.runtime.durable import whole_directory
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.store import models as model_store
from components.training.calibration import log_odds_correction, shift_logits
from components.training.growth import RowPlan, grow
from components.training.start import Start

logger = logging.getLogger(__name__)


def find_parent(store: Path, reference: str, training_set: TrainingSet) -> Model | None:
    """The model that `reference` names (`current`, `none` or a model's id); None where there is none.

    `current` is what was live when the rows were encoded. Another run's release or a rollback may have come since: the
    ids are not that model's, and a retry that took it would throw the first try's fit away.

    Raises:
        ContractError: the model is not there.
    """
    if reference != CURRENT:
        return model_store.parent(store, reference)
    uri = training_set.parent_model_uri
    return Model.read(local_path(uri) / Model.MANIFEST) if uri else None


def continue_from(parent: Model, training_set: TrainingSet, config: DcnConfig, into: Path) -> Start:
    """The parent's weights, moments and step count, its table grown to the training set's vocabularies.

    Its logits are those of rows thinned as the training set's are, whatever the parent's own rate was: weights in the
    store are corrected for theirs (`calibration`).

    Args:
        parent: The model to continue.
        training_set: This round's rows, encoded with the workflow that goes on from the parent's.
        config: The network of this run.
        into: Folder for the grown model's files; one left by an earlier try is replaced.

    Raises:
        ContractError: the parent has another network, its ids mean other categories than the training set's or its
            dense values other numbers, a slot shrank, or one of its files is damaged.
        PermanentError: a file cannot be written.
    """
    parent_config = DcnConfig.from_document(parent.config)
    if parent_config != config:
        asked, kept = config.as_document(), parent_config.as_document()
        other = {name: value for name, value in asked.items() if value != kept[name]}
        raise ContractError(
            f"network of this run has {other}, expected the parent {parent.model_id}'s "
            f"{ {name: kept[name] for name in other} }; state those, or train from scratch with parent=none"
        )
    for name, before, now in zip(CATEGORICAL, parent.slot_sizes, training_set.slot_sizes):
        if now < before:
            raise ContractError(
                f"slot size of {name} is {now} in the training set and {before} in the parent {parent.model_id}, "
                "expected at least as many"
            )
    old = _workflow(local_path(parent.uri) / Model.WORKFLOW, parent.slot_sizes)
    new = _workflow(local_path(training_set.workflow_uri), training_set.slot_sizes)
    stored = open_model(local_path(parent.uri) / Model.WEIGHTS, config, parent.slot_sizes)
    try:
        plan = RowPlan.between(old, new)
        _expect_same_arithmetic(old, new)
    except ContractError as error:
        raise ContractError(
            f"workflow {training_set.workflow_uri} does not go on from the parent {parent.model_id}'s: {error}"
        ) from error
    with whole_directory(into, replace=True) as aside:
        grow(stored, plan, aside)
        shift_logits(aside, config, -log_odds_correction(training_set.negative_rate))
    added = sum(training_set.slot_sizes) - sum(parent.slot_sizes)
    logger.info("continuing %s: step %d, %d ids more", parent.model_id, parent.optimizer_step, added)
    return Start(weights=into, optimizer_step=parent.optimizer_step)


def _workflow(folder: Path, slot_sizes: list[int]) -> FeatureWorkflow:
    workflow = FeatureWorkflow.load(folder)
    if workflow.slot_sizes != slot_sizes:
        raise ContractError(f"workflow in {folder} has slot sizes {workflow.slot_sizes}, expected {slot_sizes}")
    return workflow


def _expect_same_arithmetic(old: FeatureWorkflow, new: FeatureWorkflow) -> None:
    if set(old.excluded) != set(new.excluded):
        raise ContractError(f"excluded columns are {list(new.excluded)}, expected {list(old.excluded)} as before")
    for name in ("fill", "clip_min", "means", "stds"):
        before, now = getattr(old, name), getattr(new, name)
        if not np.array_equal(before, now):
            raise ContractError(f"{name} of the dense columns are {now}, expected {before} as before")
