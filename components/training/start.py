"""The weights that a fit starts from: fresh ones, or a parent's laid out for this round's vocabularies.

A parent's table is written piece by piece from one mapped file into another, so that no table is held in memory. Which
model is the parent is extraction's choice, what changed in the vocabularies is `contracts.vocabulary_changes`'.

Here is also the correction for training rows of which only a share without a click was kept
(`TrainingSet.negative_rate`). Rows without a click that are kept with probability r, whatever their features, have 1/r
times the odds of a click that all rows have, so a model of the kept rows has logits that are log(1/r) too large. Its
ranking is right, its probabilities are not. Adding log(r) to every logit corrects them, which the bias alone does (King
and Zeng 2001, "Logistic Regression in Rare Events Data", prior correction). Weights in the model store are corrected;
weights of a fit under way are not. So the correction is taken back where a fit starts from a parent, and added once
where its final weights are written.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np

from components.contracts.manifests import Model, TrainingSet
from components.contracts.vocabulary_changes import vocabulary_changes
from components.contracts.workflow import FIRST_ID, OOV_ID, TOMBSTONE, FeatureWorkflow
from components.models.configs import NetworkConfig, config_from_document
from components.models.files import TABLE, StoredModel, add_to_bias, chunks, new_model, open_model, slot_offsets
from components.runtime.durable import whole_directory
from components.runtime.errors import ContractError
from components.storage.uris import local_path

logger = logging.getLogger(__name__)


def log_odds_correction(negative_rate: float) -> float:
    """What a logit learned from rows thinned at this rate lacks of one of all rows: log(rate), at most 0.

    Raises:
        ContractError: the rate is not in (0, 1].

    >>> round(log_odds_correction(0.1), 3), log_odds_correction(1.0)
    (-2.303, 0.0)
    """
    if not 0 < negative_rate <= 1:
        raise ContractError(f"negative_rate is {negative_rate}, expected more than 0 and at most 1")
    return math.log(negative_rate)


def write_initial(folder: Path, config: NetworkConfig, slot_sizes: list[int], *, click_rate: float, seed: int) -> None:
    """Writes fresh weights into `folder`, without optimizer state; the same ones for the same seed.

    The dense parameters are the network's own initial ones; its bias is the log-odds of `click_rate` (a share in
    (0, 1)), since small data would need hundreds of steps to get there. Vectors are U(+-1/sqrt(slot size)) per slot, as
    HugeCTR initialises them.
    """
    from components.models.network import build_network

    dense = {name: each.detach().numpy() for name, each in build_network(config, seed).named_parameters()}
    shapes = {TABLE: (sum(slot_sizes), config.embedding_dim), **{name: each.shape for name, each in dense.items()}}
    random = np.random.default_rng(seed)
    with new_model(folder, shapes, with_moments=False) as fresh:
        for name, values in dense.items():
            fresh.weights.dense[name][:] = values
        fresh.weights.dense["bias"][:] = np.log(click_rate / (1 - click_rate))
        for offset, size in zip(slot_offsets(slot_sizes).tolist(), slot_sizes):
            for part in chunks(offset, offset + size):
                shape = (part.stop - part.start, config.embedding_dim)
                fresh.weights.table[part] = random.uniform(-(size**-0.5), size**-0.5, shape)


def read_parent(training_set: TrainingSet) -> Model | None:
    """The model that the round continues, which the rows were encoded for; None = from scratch.

    Raises:
        ContractError: its manifest is absent or damaged.
    """
    uri = training_set.parent_model_uri
    return Model.read(local_path(uri) / Model.MANIFEST) if uri else None


def continue_from(parent: Model, training_set: TrainingSet, config: NetworkConfig, *, into: Path) -> Path:
    """Writes the parent's weights, moments and step count into the folder `into`, with this round's vocabularies.

    The logits are those of rows thinned as the training set's are, whatever the parent's own rate was, and without the
    parent's `served_shift`.

    The training set is this round's, encoded with the workflow that goes on from the parent's. A folder `into` that an
    earlier try left is replaced.

    Raises:
        ContractError: the parent has another network, its ids mean other categories than the training set's or its
            dense values other numbers, a slot shrank, or one of its files is damaged.
        PermanentError: a file cannot be written.
    """
    _require_same_network(parent, config)
    names = training_set.recommender.features.slots
    for name, before, now in zip(names, parent.slot_sizes, training_set.slot_sizes):
        if now < before:
            raise ContractError(
                f"slot size of {name} is {now} in the training set and {before} in the parent {parent.model_id}, "
                "expected at least as many"
            )
    old = _workflow(local_path(parent.uri) / Model.WORKFLOW, parent.slot_sizes)
    new = _workflow(local_path(training_set.workflow_uri), training_set.slot_sizes)
    stored = open_model(local_path(parent.uri) / Model.WEIGHTS, parent.slot_sizes)
    try:
        with whole_directory(into, replace=True) as aside:
            grow(stored, old, new, into=aside)
            _require_same_transforms(old, new)
            add_to_bias(aside, -log_odds_correction(training_set.negative_rate) - parent.served_shift)
    except ContractError as error:
        raise ContractError(
            f"workflow {training_set.workflow_uri} does not go on from the parent {parent.model_id}'s: {error}"
        ) from error
    added = sum(training_set.slot_sizes) - sum(parent.slot_sizes)
    logger.info("continuing %s: step %d, %d ids more", parent.model_id, stored.step, added)
    return into


def grow(stored: StoredModel, before: FeatureWorkflow, now: FeatureWorkflow, *, into: Path) -> None:
    """Writes the model `stored`, trained with the workflow `before`, into the folder `into`, laid out for `now`.

    An id whose category lives on keeps its row and its moments, bit for bit, and so do the reserved ids and the dense
    parameters: rows of such ids alone are scored as before. An id that got its category now starts with its slot's
    out-of-vocabulary row, by which that category was scored until now, and with zero moments: nothing was observed of
    it alone. A tombstone's row and moments are zero.

    Raises:
        ContractError: an id means another category than before.
        PermanentError: a file cannot be written.
    """
    changes = vocabulary_changes(before, now)
    shapes = {**stored.shapes, TABLE: (sum(now.slot_sizes), stored.weights.table.shape[1])}
    old_offsets, offsets = (slot_offsets(workflow.slot_sizes).tolist() for workflow in (before, now))
    with new_model(into, shapes, step=stored.step, with_moments=stored.moments is not None) as grown:
        for old, new in zip(stored.parts, grown.parts):
            for name, values in old.dense.items():
                new.dense[name][:] = values
            for old_offset, offset, size in zip(old_offsets, offsets, before.slot_sizes):
                for part in chunks(0, size):
                    new.table[offset + part.start : offset + part.stop] = old.table[
                        old_offset + part.start : old_offset + part.stop
                    ]
            for offset, change, vocabulary in zip(offsets, changes, now.vocabularies):
                new.table[offset + change.entered] = new.table[offset + OOV_ID] if new is grown.weights else 0
                new.table[offset + FIRST_ID + np.flatnonzero(vocabulary == TOMBSTONE)] = 0


def _require_same_network(parent: Model, config: NetworkConfig) -> None:
    kept, asked = config_from_document(parent.config).as_document(), config.as_document()
    if other := {name: value for name, value in asked.items() if kept.get(name) != value}:
        raise ContractError(
            f"network of this run has {other}, expected the parent {parent.model_id}'s "
            f"{ {name: kept.get(name) for name in other} }; state those, or train from scratch with parent=none"
        )


def _workflow(folder: Path, slot_sizes: list[int]) -> FeatureWorkflow:
    workflow = FeatureWorkflow.load(folder)
    if workflow.slot_sizes != slot_sizes:
        raise ContractError(f"workflow in {folder} has slot sizes {workflow.slot_sizes}, expected {slot_sizes}")
    return workflow


def _require_same_transforms(old: FeatureWorkflow, new: FeatureWorkflow) -> None:
    if set(old.excluded) != set(new.excluded):
        raise ContractError(f"excluded columns are {list(new.excluded)}, expected {list(old.excluded)} as before")
    for name in ("means", "stds"):
        before, now = getattr(old, name), getattr(new, name)
        if not np.array_equal(before, now):
            raise ContractError(f"{name} of the dense columns are {now}, expected {before} as before")
    for name, boundaries in new.boundaries.items():
        if not np.array_equal(boundaries, expected := old.boundaries[name]):
            raise ContractError(f"boundaries of {name} are {boundaries}, expected {expected} as before")
