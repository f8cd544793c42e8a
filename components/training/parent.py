"""The parent a round continues: what it must share with the training set, and its weights at the new slot sizes.

Which model a reference means is `contracts.model_store`'s.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from components.contracts.criteo import CATEGORICAL
from components.contracts.dcn import DcnConfig
from components.contracts.errors import ContractError
from components.contracts.manifests import Model, TrainingSet
from components.contracts.model_files import read_model
from components.contracts.uris import local_path
from components.contracts.workflow import FeatureWorkflow
from components.training.initial import grow
from components.training.trainer import Start

logger = logging.getLogger(__name__)


def continue_from(parent: Model, training_set: TrainingSet, config: DcnConfig) -> Start:
    """The parent's weights, moments and step count, grown to the training set's slot sizes.

    Raises:
        ContractError: the parent has another network, its ids mean other categories than the training set's, a slot
            shrank, or one of its files is damaged.
    """
    parent_config = DcnConfig.from_document(parent.config)
    if parent_config != config:
        raise ContractError(
            f"network of this run is {config.as_document()}, expected the parent {parent.model_id}'s "
            f"{parent_config.as_document()}; use its settings, or train from scratch"
        )
    _check_ids(parent, training_set)
    folder = local_path(parent.uri) / Model.WEIGHTS
    weights = read_model(folder, config, parent.slot_sizes, optimizer=True)
    grown = grow(weights, parent.slot_sizes, training_set.slot_sizes)
    added = sum(training_set.slot_sizes) - sum(parent.slot_sizes)
    logger.info("continuing %s: step %d, %d new ids", parent.model_id, parent.optimizer_step, added)
    return Start(weights=grown, optimizer_step=parent.optimizer_step)


def _check_ids(parent: Model, training_set: TrainingSet) -> None:
    """Refuses a training set whose vocabularies do not begin with the parent's: its ids would mean other categories."""
    for name, before, now in zip(CATEGORICAL, parent.slot_sizes, training_set.slot_sizes):
        if now < before:
            raise ContractError(
                f"slot size of {name} is {now} in the training set and {before} in the parent {parent.model_id}, "
                "expected at least as many"
            )
    old = FeatureWorkflow.load(_workflow_of(parent))
    new = FeatureWorkflow.load(local_path(training_set.workflow_uri))
    for name, known, extended in zip(CATEGORICAL, old.vocabularies, new.vocabularies):
        if not np.array_equal(extended[: len(known)], known):
            raise ContractError(
                f"vocabulary of {name} in {training_set.workflow_uri} does not begin with that of the parent "
                f"{parent.model_id}, expected the workflow fitted on from it"
            )


def _workflow_of(model: Model) -> Path:
    return local_path(model.uri) / Model.WORKFLOW
