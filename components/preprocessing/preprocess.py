"""The step itself: raw rows in, training set out, published whole or not at all.

Sequences fit, transform, verification and the comparison of NVTabular with `contracts.workflow`, from which alone the
served graph is built. How each is done is left to the modules named in the imports.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import nvtabular as nvt
import pyarrow.parquet as pq

from components.contracts.criteo import CATEGORICAL, DENSE, MISSING_CATEGORY
from components.contracts.durable import whole_directory
from components.contracts.errors import PermanentError
from components.contracts.hugectr_folder import write_file_list
from components.contracts.manifests import RawDataset, TrainingSet
from components.contracts.uris import local_path
from components.contracts.vocabulary_changes import VocabularyChange, vocabulary_changes
from components.contracts.workflow import FeatureWorkflow
from components.preprocessing import admission, feature_graph, hugectr_parquet, raw_partitions
from components.preprocessing.parent import Parent
from components.preprocessing.settings import PreprocessingSettings

logger = logging.getLogger(__name__)

TRAIN, HOLDOUT, WORKFLOW = "train", "holdout", "workflow"
REPLAY, REPLAY_HOLDOUT = "replay", "replay_holdout"
"""Old rows: encoded with the round's workflow, which is fitted without them."""
NVTABULAR = "nvtabular"
"""NVTabular's own saved workflow, inside the feature workflow's folder."""
COMPARED_ROWS = 4096
TOLERANCE = 1e-6
"""Of dense values. On one machine they are equal bit by bit, which the tests hold."""


def preprocess(raw: RawDataset, *, parent: Parent | None, final: Path, settings: PreprocessingSettings) -> TrainingSet:
    """The manifest of the training set that is now in `final`, where it replaces what an earlier try left.

    Raises:
        ContractError: the raw rows are not what their manifest says.
        PermanentError: what was written is not what HugeCTR or the served graph expects.
    """
    parts = {
        TRAIN: (raw.train_uri, raw.num_train_rows),
        HOLDOUT: (raw.holdout_uri, raw.num_holdout_rows),
        REPLAY: (raw.replay_uri, raw.num_replay_rows),
        REPLAY_HOLDOUT: (raw.replay_holdout_uri, raw.num_replay_holdout_rows),
    }
    rows = {part: num_rows for part, (uri, num_rows) in parts.items() if uri is not None}
    plans = {part: _plan(uri, num_rows, settings) for part, (uri, num_rows) in parts.items() if uri is not None}
    with _dask(settings.dask_scheduler), whole_directory(final, replace=True) as aside:
        features = _fit(plans[TRAIN], parent, raw, settings, aside / WORKFLOW)
        datasets = {part: _dataset(plan) for part, plan in plans.items()}
        workflow = feature_graph.explicit_workflow(features, datasets[TRAIN].schema, aside / WORKFLOW / NVTABULAR)
        for part, dataset in datasets.items():
            feature_graph.write_encoded(workflow, dataset, aside / part)
            names = sorted(path.name for path in (aside / part).glob("*.parquet"))
            write_file_list(aside / part, names, final=final / part)  # NVTabular's own names this folder aside
            hugectr_parquet.verify(aside / part, expected_rows=rows[part], slot_sizes=features.slot_sizes)
            _compare(features, plans[part][0], aside / part)
            logger.info("%s encoded: %d rows in %d files", part, rows[part], len(plans[part]))
        # By value, so that whoever loads it needs NVTabular only.
        workflow.save(aside / WORKFLOW / NVTABULAR, modules_byvalue=[feature_graph])
    return TrainingSet(
        train_uri=(final / TRAIN).as_uri(),
        holdout_uri=(final / HOLDOUT).as_uri(),
        num_train_rows=raw.num_train_rows,
        num_holdout_rows=raw.num_holdout_rows,
        slot_sizes=features.slot_sizes,
        new_categories=[len(change.entered) for change in _changes(features, parent)],
        tombstones=features.tombstones,
        workflow_uri=(final / WORKFLOW).as_uri(),
        raw_digest=raw.digest,
        last_event_time=raw.last_event_time,
        parent_model_uri=parent.model.uri if parent else None,
        replay_uri=(final / REPLAY).as_uri() if REPLAY in plans else None,
        num_replay_rows=raw.num_replay_rows,
        replay_holdout_uri=(final / REPLAY_HOLDOUT).as_uri() if REPLAY_HOLDOUT in plans else None,
        num_replay_holdout_rows=raw.num_replay_holdout_rows,
        replay_share=raw.replay_share,
    )


def _plan(uri: str, num_rows: int, settings: PreprocessingSettings) -> list[raw_partitions.Partition]:
    return raw_partitions.plan_partitions(
        local_path(uri), expected_rows=num_rows, partition_rows=settings.partition_rows
    )


def _dataset(plan: list[raw_partitions.Partition]) -> Any:
    return nvt.Dataset(raw_partitions.read_lazily(plan), cpu=True)


def _fit(
    plan: list[raw_partitions.Partition],
    parent: Parent | None,
    raw: RawDataset,
    settings: PreprocessingSettings,
    folder: Path,
) -> FeatureWorkflow:
    """Writes this round's workflow, with what the next one should know, into `folder`."""
    now = admission.microseconds("last_event_time of the raw dataset", raw.last_event_time)
    with tempfile.TemporaryDirectory(prefix="categories-") as scratch:
        features, columns = feature_graph.fit(
            _dataset(plan), parent=parent, now=now, rules=settings.rules, scratch=Path(scratch)
        )
    features.save(folder)
    admission.save(columns, folder)
    changes = _changes(features, parent)
    logger.info(
        "workflow fitted: %d ids, %d categories new, %d evicted",
        sum(features.slot_sizes),
        sum(len(change.entered) for change in changes),
        sum(len(change.evicted) for change in changes),
    )
    return features


def _changes(features: FeatureWorkflow, parent: Parent | None) -> list[VocabularyChange]:
    return vocabulary_changes(parent.features if parent else None, features)


def _compare(features: FeatureWorkflow, partition: raw_partitions.Partition, folder: Path) -> None:
    """Refuses an encoding by NVTabular that differs from `features`, on the first rows of a partition.

    Raises:
        PermanentError: an id differs, or a dense value by more than `TOLERANCE`.
    """
    raw = raw_partitions.read_partition(partition).head(COMPARED_ROWS)
    first = pq.ParquetFile(min(folder.glob("*.parquet")))
    written = next(first.iter_batches(batch_size=len(raw))).to_pandas()
    categories = raw[list(CATEGORICAL)].fillna(MISSING_CATEGORY).to_numpy().astype(np.int64)
    wrong_ids = np.count_nonzero(features.encode_categorical(categories) != written[list(CATEGORICAL)].to_numpy())
    dense = features.encode_dense(raw[list(DENSE)].to_numpy())
    difference = float((np.abs(dense - written[list(DENSE)].to_numpy()) / np.maximum(np.abs(dense), 1.0)).max())
    if wrong_ids or difference > TOLERANCE:
        raise PermanentError(
            f"NVTabular and the feature workflow differ in {wrong_ids} ids and by {difference} in dense values "
            f"over {len(raw)} rows of {folder.name}, expected none and at most {TOLERANCE}"
        )


@contextmanager
def _dask(scheduler: str) -> Iterator[None]:
    """Runs Dask on the scheduler at that address, which NVTabular finds by itself; empty = in this process."""
    if not scheduler:
        yield
        return
    from distributed import Client

    with Client(scheduler):
        yield
