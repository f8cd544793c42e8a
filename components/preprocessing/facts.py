"""The few numbers that a run of preprocessing tells people: rows, ids, and how the vocabularies turned over."""

from __future__ import annotations

from components.contracts.manifests import TrainingSet
from components.contracts.vocabulary_changes import vocabulary_changes
from components.contracts.workflow import FeatureWorkflow
from components.preprocessing import admission
from components.preprocessing.parent import Parent
from components.storage.uris import local_path


def facts(training_set: TrainingSet, parent: Parent | None) -> dict[str, int]:
    """The numbers of the training set made from `parent`, summed over the categorical columns."""
    folder = local_path(training_set.workflow_uri)
    features = FeatureWorkflow.load(folder)
    columns = admission.load(folder, features, otherwise_last_seen=0)
    changes = vocabulary_changes(parent.features if parent else None, features)
    return {
        "train_rows": training_set.num_train_rows,
        "holdout_rows": training_set.num_holdout_rows,
        "ids": sum(training_set.slot_sizes),
        "new_categories": sum(training_set.new_categories),
        "reused_ids": sum(len(change.reused) for change in changes),
        "evicted": sum(len(change.evicted) for change in changes),
        "tombstones": sum(training_set.tombstones),
        "candidates": sum(len(column.candidates.categories) for column in columns),
    }
