"""The parent a round continues: what it must share with the training set, and its files at the new slot sizes.

Which model a reference means is `contracts.model_store`'s, how rows are laid out `growth`'s.
"""

from __future__ import annotations

import logging
from pathlib import Path

from components.contracts.criteo import CATEGORICAL
from components.contracts.dcn import DcnConfig
from components.contracts.durable import whole_directory
from components.contracts.errors import ContractError
from components.contracts.manifests import Model, TrainingSet
from components.contracts.model_files import open_model
from components.contracts.uris import local_path
from components.contracts.workflow import FeatureWorkflow
from components.training.growth import RowPlan, grow
from components.training.start import Start

logger = logging.getLogger(__name__)


def continue_from(parent: Model, training_set: TrainingSet, config: DcnConfig, into: Path) -> Start:
    """The parent's weights, moments and step count, its table grown to the training set's vocabularies.

    Args:
        parent: The model to continue.
        training_set: This round's rows, encoded with the workflow that goes on from the parent's.
        config: The network of this run.
        into: Folder for the grown model's files; one left by an earlier try is replaced.

    Raises:
        ContractError: the parent has another network, its ids mean other categories than the training set's, a slot
            shrank, or one of its files is damaged.
        PermanentError: a file cannot be written.
    """
    parent_config = DcnConfig.from_document(parent.config)
    if parent_config != config:
        raise ContractError(
            f"network of this run is {config.as_document()}, expected the parent {parent.model_id}'s "
            f"{parent_config.as_document()}; use its settings, or train from scratch"
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
    except ContractError as error:
        raise ContractError(
            f"workflow {training_set.workflow_uri} does not go on from the parent {parent.model_id}'s: {error}"
        ) from error
    with whole_directory(into, replace=True) as aside:
        grow(stored, plan, aside)
    added = sum(training_set.slot_sizes) - sum(parent.slot_sizes)
    logger.info("continuing %s: step %d, %d ids more", parent.model_id, parent.optimizer_step, added)
    return Start(weights=into, optimizer_step=parent.optimizer_step)


def _workflow(folder: Path, slot_sizes: list[int]) -> FeatureWorkflow:
    workflow = FeatureWorkflow.load(folder)
    if workflow.slot_sizes != slot_sizes:
        raise ContractError(f"workflow in {folder} has slot sizes {workflow.slot_sizes}, expected {slot_sizes}")
    return workflow
