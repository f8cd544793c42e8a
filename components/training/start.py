"""Initial weights of a fit: fresh weights, or a parent's weights in the layout of this run.

A parent's table is copied in chunks from one mapped file to another, so that no complete table has
to be in memory. Extraction chooses the parent, and `evergreen.contracts.workflow` describes the
changes of the vocabularies.

This module also corrects for negative downsampling (`TrainingSet.negative_rate`). Suppose that each
row without a click is kept with probability r, independently of its features. The odds of a click
among the kept rows are then 1/r times the odds among all rows. The logits of a model that was
trained on the kept rows are too large by log(1/r). The ranking of this model is right, but its
probabilities are wrong. Adding log(r) to the bias corrects every logit (King and Zeng 2001,
"Logistic Regression in Rare Events Data", prior correction).

The registry stores corrected weights, and a fit uses uncorrected weights. The correction is
therefore subtracted when a fit starts from a parent, and added once when the final weights of the
fit are written.
"""

import logging
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import FeaturePositions, Features
from evergreen.config.model import NetworkConfig, config_from_document, network_changes
from evergreen.contracts.manifests import Model, TrainingSet
from evergreen.contracts.workflow import (
    FIRST_ID,
    OOV_ID,
    TOMBSTONE,
    FeatureWorkflow,
    VocabularyChange,
    vocabulary_changes,
)
from evergreen.networks.files import (
    StoredModel,
    Table,
    Tensors,
    add_to_bias,
    chunks,
    new_model,
    num_rows,
    one_id_per_slot,
    open_model,
    table_shapes,
    tables_of,
)
from evergreen.registry.models import model_in, verified_part
from evergreen.runtime.durable import whole_directory
from evergreen.runtime.errors import ContractError, run_again
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)


def log_odds_correction(negative_rate: float) -> float:
    """Return log(rate), the correction of a logit that was trained on downsampled rows, at most 0.

    Raises:
        ContractError: the rate is not in (0, 1].

    >>> round(log_odds_correction(0.1), 3), log_odds_correction(1.0)
    (-2.303, 0.0)
    """
    if not 0 < negative_rate <= 1:
        raise ContractError(f"negative_rate is {negative_rate}, expected more than 0 and at most 1")
    return math.log(negative_rate)


def write_initial(
    folder: Path,
    config: NetworkConfig,
    slot_sizes: list[int],
    *,
    click_rate: float,
    seed: int,
    positions: FeaturePositions | None = None,
) -> None:
    """Write fresh weights into `folder`, without optimizer state.

    Equal seeds give equal weights. The dense parameters are the network's initial parameters. The
    bias is the log-odds of the click rate. With small data sets, training would need hundreds of
    steps to find this bias. The vectors of a slot are drawn from U(+-f/sqrt(slot size)), where f is
    the network's `fresh_vectors`.

    Args:
        folder: Folder to write.
        config: Configuration of the network.
        slot_sizes: Number of ids of each slot.
        click_rate: Share of clicks, in (0, 1).
        seed: Seed of the weights.
        positions: Slot of each categorical position, and the positions of each list. If `positions`
            is None, a row looks up each slot once.
    """
    dense = _fresh_dense(config, seed)
    tables = tables_of(positions or one_id_per_slot(slot_sizes), config.widths)
    shapes = table_shapes(list(zip(num_rows(tables, slot_sizes), config.table_widths)))
    shapes |= {name: each.shape for name, each in dense.items()}
    random = np.random.default_rng(seed)
    with new_model(folder, shapes, with_moments=False) as fresh:
        for name, values in dense.items():
            fresh.weights.dense[name][:] = values
        fresh.weights.dense["bias"][:] = np.log(click_rate / (1 - click_rate))
        for vectors in fresh.weights.slots(slot_sizes, tables):
            _write_fresh_rows(vectors, random, config)


def read_parent(training_set: TrainingSet) -> Model | None:
    """Return the model that this run continues, or None to train from scratch.

    Raises:
        ContractError: the parent's manifest is absent or corrupt.
    """
    uri = training_set.parent_model_uri
    return model_in(local_path(uri)) if uri else None


def continue_from(
    parent: Model, training_set: TrainingSet, config: NetworkConfig, *, into: Path, seed: int = 0
) -> Path:
    """Write a warm start: the parent's weights, moments and step count for this run's vocabularies.

    The written weights give logits for rows that are downsampled at the training set's rate. The
    parent's own rate can differ. The logits do not include the parent's `served_shift`.

    Args:
        parent: The parent model.
        training_set: Training set of this run. The set's workflow must continue the parent's
            workflow.
        config: Configuration of this run's network.
        into: Folder to write. A folder of an earlier try is replaced.
        seed: Seed of the fresh weights for columns that the parent lacks.

    Returns:
        `into`.

    Raises:
        ContractError: the parent's network, the categories of its ids, or its transforms of dense
            values are not the same as in this run. The error is also raised if a slot shrank, or if
            a file of the parent is corrupt.
        PermanentError: a file cannot be written.
    """
    features, features_before = training_set.recommender.features, parent.recommender.features
    features.expect_continues(features_before, parent=parent.model_id)
    network = _network_before(parent, config)
    sizes_before = dict(zip(features_before.slots, parent.slot_sizes))
    for name, now in zip(features.slots, training_set.slot_sizes):
        if now < (before := sizes_before.get(name, 0)):
            raise ContractError(
                f"slot size of {name} is {now} in the training set and {before} in the parent "
                f"{parent.model_id}, expected at least the parent's"
            )
    old = _workflow(verified_part(parent, Model.WORKFLOW), parent.slot_sizes)
    new = _workflow(local_path(training_set.workflow_uri), training_set.slot_sizes)
    stored = open_model(verified_part(parent, Model.WEIGHTS), parent.slot_sizes)
    try:
        with whole_directory(into, replace=True) as aside:
            grow(stored, ModelLayout(old, network), ModelLayout(new, config), into=aside, seed=seed)
            _require_same_transforms(old, new)
            add_to_bias(
                aside, -log_odds_correction(training_set.negative_rate) - parent.served_shift
            )
    except ContractError as error:
        raise ContractError(
            f"workflow {training_set.workflow_uri} does not continue the workflow of the "
            f"parent {parent.model_id}: {error}"
        ) from error
    added = sum(training_set.slot_sizes) - sum(parent.slot_sizes)
    logger.info("continuing %s: step %d, %d new ids", parent.model_id, stored.step, added)
    return into


class ModelLayout(NamedTuple):
    """Shapes of a model's tensors, and the meaning of each position."""

    workflow: FeatureWorkflow
    network: NetworkConfig

    @property
    def tables(self) -> tuple[Table, ...]:
        """See `tables_of`."""
        return tables_of(self.workflow.features.id_positions, self.network.widths)

    @property
    def column_axes(self) -> dict[str, tuple[int, list[Hashable]]]:
        """See `NetworkConfig.column_axes`."""
        features = self.workflow.features
        return self.network.column_axes(features.vector_names, features.dense_inputs)


def grow(
    stored: StoredModel, before: ModelLayout, now: ModelLayout, *, into: Path, seed: int = 0
) -> None:
    """Write a stored model in the layout of new vocabularies and columns.

    The following parts are copied bit for bit: the rows and moments of ids whose category stays,
    the reserved ids, and the dense parameters. The score of a row with only these ids does not
    change.

    A new category starts with the vector of its slot's out-of-vocabulary id, because the parent
    scored the category with this vector. The moments of a new category are zero, because it has no
    history. The row and the moments of a tombstone are zero.

    Columns are matched by name. New columns do not change the logits, except for rounding, because
    their dense parameters and moments are zero. New columns have the vectors of a fresh model, or
    vectors of zero (`NetworkConfig.takes_new_vectors_at_zero`). Parameters of removed columns are
    dropped.

    Args:
        stored: The model to copy.
        before: Layout of `stored`.
        now: Layout to write.
        into: Folder to write.
        seed: Seed of fresh weights.

    Raises:
        ContractError: the category of an id has changed, or a new list would change the logits.
        PermanentError: a file cannot be written.
    """
    features_before, features = before.workflow.features, now.workflow.features
    if now.network.takes_new_vectors_at_zero:
        _refuse_new_lists_of_known_vectors(features, features_before)
    changes = vocabulary_changes(before.workflow, now.workflow)
    axes_before, axes = before.column_axes, now.column_axes
    fresh = {} if axes == axes_before else _fresh_dense(now.network, seed)
    rows = num_rows(now.tables, now.workflow.slot_sizes)
    shapes = table_shapes(list(zip(rows, now.network.table_widths)))
    shapes |= {name: each.shape for name, each in (fresh or stored.weights.dense).items()}
    with new_model(
        into, shapes, step=stored.step, with_moments=stored.moments is not None
    ) as grown:
        for old, new in zip(stored.parts, grown.parts):
            for name, values in new.dense.items():
                if name in axes:
                    if name in old.dense:
                        _copy_positions(
                            old.dense[name], values, old_axis=axes_before[name], new_axis=axes[name]
                        )
                elif name in old.dense:
                    values[:] = old.dense[name]
                elif new is grown.weights:
                    values[:] = fresh[name]
            random = np.random.default_rng(seed) if new is grown.weights else None
            _copy_tables(old, new, before=before, now=now, changes=changes, random=random)


def _fresh_dense(config: NetworkConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    from evergreen.networks.network import build_network

    return {
        name: each.detach().numpy() for name, each in build_network(config, seed).named_parameters()
    }


def _refuse_new_lists_of_known_vectors(now: Features, before: Features) -> None:
    for name in now.lists:
        if (
            name not in before.lists
            and (table := now.list_options_of(name).table) in before.categorical
        ):
            raise ContractError(
                f"list {name} is new and shares the vectors of {table}, expected vectors of its "
                "own: this network has no weights that could keep the parent's logits unchanged. "
                "Give the list its own vectors, or, to train from scratch, "
                + run_again("-p parent=none")
            )


def _copy_positions(
    old: NDArray[np.float32],
    new: NDArray[np.float32],
    *,
    old_axis: tuple[int, list[Hashable]],
    new_axis: tuple[int, list[Hashable]],
) -> None:
    """Copy the values of the columns that both layouts have.

    The values of other columns are unchanged.
    """
    where = {position: i for i, position in enumerate(old_axis[1])}
    kept = [(i, where[position]) for i, position in enumerate(new_axis[1]) if position in where]
    here, there = np.array(kept, np.int64).reshape(-1, 2).T
    np.moveaxis(new, new_axis[0], 0)[here] = np.moveaxis(old, old_axis[0], 0)[there]


def _copy_tables(
    old: Tensors,
    new: Tensors,
    *,
    before: ModelLayout,
    now: ModelLayout,
    changes: Sequence[VocabularyChange],
    random: np.random.Generator | None,
) -> None:
    """Copy the rows of each old slot into the new tables, which contain zeros, see `grow`.

    `random` generates fresh vectors if the tensors are weights. If the tensors are moments,
    `random` is None.
    """
    kept = dict(
        zip(before.workflow.features.slots, old.slots(before.workflow.slot_sizes, before.tables))
    )
    slots = new.slots(now.workflow.slot_sizes, now.tables)
    for name, vectors, change, vocabulary in zip(
        now.workflow.features.slots, slots, changes, now.workflow.vocabularies
    ):
        if name in kept:
            for part in chunks(0, len(kept[name])):
                vectors[part] = kept[name][part]
            vectors[change.entered] = 0 if random is None else vectors[OOV_ID]
        elif random is not None and not now.network.takes_new_vectors_at_zero:
            _write_fresh_rows(vectors, random, now.network)
        vectors[FIRST_ID + np.flatnonzero(vocabulary == TOMBSTONE)] = 0


def _write_fresh_rows(
    vectors: NDArray[np.float32], random: np.random.Generator, network: NetworkConfig
) -> None:
    """Write fresh vectors of a slot, see `write_initial`."""
    bound = network.fresh_vectors * len(vectors) ** -0.5
    for part in chunks(0, len(vectors)):
        vectors[part] = random.uniform(-bound, bound, vectors[part].shape)


def _network_before(parent: Model, config: NetworkConfig) -> NetworkConfig:
    """Return the parent's network if it differs from `config` only in its columns."""
    network = config_from_document(parent.config)
    if other := network_changes(network, config):
        kept = network.as_document()
        raise ContractError(
            f"network of this run has {other}, expected the parent {parent.model_id}'s "
            f"{ {name: kept.get(name) for name in other} }; use the parent's values, or, to "
            "train from scratch, " + run_again("-p parent=none")
        )
    return network


def _workflow(folder: Path, slot_sizes: list[int]) -> FeatureWorkflow:
    workflow = FeatureWorkflow.load(folder)
    if workflow.slot_sizes != slot_sizes:
        raise ContractError(
            f"workflow in {folder} has slot sizes {workflow.slot_sizes}, expected {slot_sizes}"
        )
    return workflow


def _require_same_transforms(old: FeatureWorkflow, new: FeatureWorkflow) -> None:
    """Check that both workflows scale and exclude their common columns in the same way."""
    both = set(old.features.names).intersection(new.features.names)
    excluded, expected = (both.intersection(workflow.excluded) for workflow in (new, old))
    if excluded != expected:
        raise ContractError(
            f"excluded columns are {sorted(excluded)}, expected the parent's {sorted(expected)}"
        )
    for name in ("means", "stds"):
        before, now = (
            dict(zip(each.features.numeric, getattr(each, name).tolist())) for each in (old, new)
        )
        if other := {
            column: value for column, value in now.items() if before.get(column, value) != value
        }:
            was = {column: before[column] for column in other}
            raise ContractError(
                f"{name} of the dense columns are {other}, expected the parent's {was}"
            )
    for name, boundaries in new.boundaries.items():
        if not np.array_equal(boundaries, kept := old.boundaries.get(name, boundaries)):
            raise ContractError(
                f"boundaries of {name} are {boundaries}, expected the parent's {kept}"
            )
