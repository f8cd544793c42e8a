"""Write the training set of a run from its raw rows, completely or not at all.

The step fits the workflow, encodes the rows and verifies the files. The step compares the encoded
files with `evergreen.contracts.workflow`, because the served graph is built from this workflow
alone.

This module also does negative downsampling. Only a share of the training rows without a click is
kept. Replayed rows are downsampled too. The choice is the same in every try. Extraction does not
downsample. Validation and the monitor's reference therefore see all rows, and windows of runs with
different rates stay comparable. Categories are counted after downsampling. Held-out rows are never
downsampled. `components.training.start` corrects the model's bias for the share of kept rows.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from components.preprocessing import encode, fitting, raw_partitions
from components.preprocessing.engines import EncodingEngine, engine_of
from components.preprocessing.parent import (
    ParentWorkflow,
    expect_parents_columns,
    save_columns,
)
from components.preprocessing.raw_partitions import open_raw, raw_files
from components.preprocessing.vocabularies import Column
from evergreen.config.data import WEIGHT
from evergreen.config.features import Features
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset, TrainingSet
from evergreen.contracts.raw_rows import LABEL, REQUEST_ID, ROW
from evergreen.contracts.row_hash import row_identities, uniforms
from evergreen.contracts.workflow import FeatureWorkflow, VocabularyChange, vocabulary_changes
from evergreen.registry.promotion_journal import moment_of
from evergreen.rows.archived_rows import parquet_writer, reading_parquet
from evergreen.runtime import forked
from evergreen.runtime.durable import whole_directory, whole_file
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.runtime.workers import THIS_PROCESS, Workers, workers_of
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

_SALT = 0x5EED0F7415
"""Salt of the random choice. The sampling of old rows must use a different salt. Otherwise the old
rows would not be downsampled at `negative_rate`."""
_GROUP_ROWS = 65_536
_DOWNSAMPLED_ROWS = 250_000
"""Approximate number of rows of a downsampled file."""
_FIT_ROWS = 65_536
"""Maximum rows of a partition while categories are counted. The row groups of the raw rows have
this size too, so processes get similar numbers of rows."""

_TRAIN, _HOLDOUT, _WORKFLOW = "train", "holdout", "workflow"
_REPLAY, _REPLAY_HOLDOUT = "replay", "replay_holdout"
"""Parts of the dataset with old rows for rehearsal. Old rows are encoded with this run's workflow,
but the workflow is not fitted on these rows."""
_SCRATCH = ".scratch"
"""Temporary folder. At first, the folder contains counts of parts of the rows. Afterwards, the
folder contains files of the engine."""
_DOWNSAMPLED = ".downsampled"
"""Temporary folder for the training rows that `negative_rate` keeps."""


def downsample(
    source: Path,
    into: Path,
    negative_rate: float,
    *,
    features: Features,
    expected_rows: int,
    weighted: bool = False,
    workers: Workers = THIS_PROCESS,
) -> int:
    """Copy the raw rows that negative downsampling keeps, and return the number of copied rows.

    Rows stay in order, and weights do not change. Each worker has one batch in memory at a time.

    Args:
        source: Folder of the raw rows.
        into: Folder to create. The written files have about `_DOWNSAMPLED_ROWS` rows each. The
            folder stays empty if all rows are dropped.
        negative_rate: Share of the rows without a click that is kept.
        features: The recommender's features.
        expected_rows: Number of rows of `source` according to its manifest.
        weighted: Whether the rows have weights.
        workers: Processes that share the files.

    Raises:
        ContractError: a file cannot be read or has other types than the raw schema, or the folder
            has another number of rows.
    """
    into.mkdir(parents=True)
    groups = forked.shares(
        raw_files(source), max(1, round(expected_rows * negative_rate / _DOWNSAMPLED_ROWS))
    )
    copied = [LABEL, *features.names, *([WEIGHT] if weighted else [])]
    tasks = [(group, into / f"part-{number:05d}.parquet") for number, group in enumerate(groups)]
    downsample_files = partial(
        _downsample_files, negative_rate=negative_rate, features=features, copied=copied
    )
    found = workers.run_all(downsample_files, tasks)
    if (num_read := sum(read for read, _ in found)) != expected_rows:
        raise ContractError(
            f"raw folder {source} has {num_read} rows, expected the manifest's {expected_rows}"
        )
    return sum(num_kept for _, num_kept in found)


def _downsample_files(
    task: tuple[list[Path], Path], *, negative_rate: float, features: Features, copied: list[str]
) -> tuple[int, int]:
    """Copy the kept rows of the task's files into one file.

    Returns the number of rows read and the number of rows kept.
    """
    paths, into = task
    columns = [*copied, REQUEST_ID, ROW]
    num_read = num_rows = 0
    with ExitStack() as stack:
        writer = None
        for path in paths:
            with reading_parquet(path):
                for batch in open_raw(path, features, columns).iter_batches(
                    batch_size=_GROUP_ROWS, columns=columns
                ):
                    downsampled = pa.Table.from_batches([batch]).filter(
                        pa.array(sampled_rows(batch, negative_rate))
                    )
                    num_read, num_rows = num_read + batch.num_rows, num_rows + downsampled.num_rows
                    if downsampled.num_rows:
                        table = downsampled.select(copied)
                        writer = writer or stack.enter_context(
                            parquet_writer(stack.enter_context(whole_file(into)), table.schema)
                        )
                        writer.write_table(table)
    return num_read, num_rows


def sampled_rows(batch: Any, negative_rate: float) -> Any:
    """Return a mask of the rows that negative downsampling keeps.

    Negative downsampling keeps all clicks and a share of the other rows. The choice depends only on
    the row's identity, not on its position or its neighbours.

    Args:
        batch: Arrow batch with label, request id and row number.
        negative_rate: Share of the rows without a click to keep.
    """
    identities = row_identities(
        batch.column(REQUEST_ID), batch.column(ROW).to_numpy(zero_copy_only=False)
    )
    clicked = pc.equal(batch.column(LABEL), 1).fill_null(True).to_numpy(zero_copy_only=False)
    return clicked | (uniforms(identities, _SALT) < negative_rate)


def preprocess(
    raw: RawDataset, *, parent: ParentWorkflow | None, final: Path, dask_scheduler: str = ""
) -> tuple[TrainingSet, dict[str, Any]]:
    """Write the training set into `final`, replacing that of an earlier try.

    Args:
        raw: Manifest of the raw rows.
        parent: Workflow of the parent model, or None.
        final: Folder of the training set.
        dask_scheduler: Address of a Dask scheduler. Empty to use this machine.

    Returns:
        The manifest, and numbers of the training set that the run's report shows.

    Raises:
        ContractError: the raw rows do not match their manifest, a setting is wrong, or the parent
            was trained on other columns.
        PermanentError: the written files do not match what HugeCTR or the served graph expects.
    """
    settings = raw.recommender.section("preprocessing", PreprocessingSettings)
    engine = engine_of(settings.engine)
    processes = settings.processes or forked.usual_processes()
    named, weighted = raw.recommender.features, raw.recommender.data.has_weights
    expect_parents_columns(named, raw.excluded_columns, parent)
    with (
        whole_directory(final, replace=True) as aside,
        workers_of(dask_scheduler, processes=processes, shared=aside) as workers,
        _parts(raw, settings.negative_rate, aside=aside, workers=workers) as parts,
    ):
        excluded = tuple(raw.excluded_columns)
        plan = partial(
            raw_partitions.plan_partitions, features=named, excluded=excluded, weighted=weighted
        )
        plans = {part: plan(*at, settings.partition_rows) for part, at in parts.items()}
        to_fit = plan(*parts[_TRAIN], min(settings.partition_rows, _FIT_ROWS))
        features, columns = _fit_workflow(
            to_fit, raw, parent=parent, engine=engine, workers=workers, aside=aside
        )
        encoder = engine.encoder(features, scratch=aside / _SCRATCH, weighted=weighted)
        rows = encode.encode_parts(
            encoder, features, plans, aside=aside, final=final, workers=workers
        )
        _expect_all_rows(rows, {part: num_rows for part, (_, num_rows) in parts.items()}, aside)
        shutil.rmtree(aside / _SCRATCH, ignore_errors=True)
    changes = vocabulary_changes(parent.features if parent else None, features)
    training_set = TrainingSet(
        train_uri=(final / _TRAIN).as_uri(),
        holdout_uri=(final / _HOLDOUT).as_uri(),
        num_train_rows=rows[_TRAIN],
        num_holdout_rows=raw.num_holdout_rows,
        slot_sizes=features.slot_sizes,
        new_categories=[len(change.entered) for change in changes],
        tombstones=features.tombstones,
        workflow_uri=(final / _WORKFLOW).as_uri(),
        raw_digest=raw.digest,
        last_event_time=raw.last_event_time,
        watermark=raw.watermark,
        window_start=raw.window_start,
        parent_model_uri=parent.model.uri if parent else None,
        replay_uri=(final / _REPLAY).as_uri() if _REPLAY in plans else None,
        num_replay_rows=rows.get(_REPLAY, 0),
        replay_holdout_uri=(final / _REPLAY_HOLDOUT).as_uri() if _REPLAY_HOLDOUT in plans else None,
        num_replay_holdout_rows=raw.num_replay_holdout_rows,
        replay_share=raw.replay_share,
        excluded_columns=raw.excluded_columns,
        negative_rate=settings.negative_rate,
        days=raw.seen_days(),
        files=raw.files,
        unread_files=raw.unread_files,
        recommender=raw.recommender,
        num_sampled_out=raw.num_train_rows - rows[_TRAIN],
    )
    facts = _facts_of(training_set, changes, columns)
    logger.info("workflow fitted: %s", facts)
    return training_set, facts


def _expect_all_rows(rows: dict[str, int], expected: dict[str, int], aside: Path) -> None:
    for part, num_rows in expected.items():
        if rows[part] != num_rows:
            raise PermanentError(
                f"encoded folder {aside / part} has {rows[part]} rows, expected {num_rows}"
            )
        logger.info("%s encoded: %d rows", part, num_rows)


def _facts_of(
    training_set: TrainingSet, changes: list[VocabularyChange], columns: list[Column]
) -> dict[str, Any]:
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


@contextmanager
def _parts(
    raw: RawDataset, negative_rate: float, *, aside: Path, workers: Workers
) -> Iterator[dict[str, tuple[Path, int]]]:
    """Downsample the training rows, and yield the folder and the number of rows of each part."""
    stated = {
        _TRAIN: (raw.train_uri, raw.num_train_rows),
        _HOLDOUT: (raw.holdout_uri, raw.num_holdout_rows),
        _REPLAY: (raw.replay_uri, raw.num_replay_rows),
        _REPLAY_HOLDOUT: (raw.replay_holdout_uri, raw.num_replay_holdout_rows),
    }
    parts = {
        part: (local_path(uri), num_rows)
        for part, (uri, num_rows) in stated.items()
        if uri is not None
    }
    if negative_rate == 1:
        yield parts
        return
    for part in (_TRAIN, _REPLAY):
        if part in parts:
            folder = aside / _DOWNSAMPLED / part
            source, num_rows = parts[part]
            num_kept = downsample(
                source,
                folder,
                negative_rate,
                features=raw.recommender.features,
                expected_rows=num_rows,
                weighted=raw.recommender.data.has_weights,
                workers=workers,
            )
            parts[part] = (folder, num_kept)
            logger.info("%s downsampled: %d rows kept", part, parts[part][1])
    if not parts[_TRAIN][1]:
        raise ContractError(
            f"negative_rate {negative_rate} keeps no row of {raw.train_uri}, expected a larger one"
        )
    yield {
        part: (folder, num_rows)
        for part, (folder, num_rows) in parts.items()
        if part != _REPLAY or num_rows
    }
    shutil.rmtree(aside / _DOWNSAMPLED)


def _fit_workflow(
    plan: list[raw_partitions.Partition],
    raw: RawDataset,
    *,
    parent: ParentWorkflow | None,
    engine: EncodingEngine,
    workers: Workers,
    aside: Path,
) -> tuple[FeatureWorkflow, list[Column]]:
    """Fit the workflow of this run. Write the workflow and the recorded counts into `aside`."""
    now = raw_rows.microseconds(moment_of(raw.last_event_time).timestamp())
    features = raw.recommender.features
    new = tuple(name for name in features.numeric if parent is None or name not in parent.scaling)
    unscaled = engine.unscaler(features, new) if new else None
    # pyarrow imports pandas lazily, if pandas is installed. Import pandas once, before the
    # processes are forked.
    pa.scalar(0)
    shares = forked.shares(plan, workers.num_shares, weight=lambda partition: partition.num_rows)
    workflow, columns = fitting.next_workflow(
        fitting.statistics_of_all(
            shares, unscaled=unscaled, workers=workers, scratch=aside / _SCRATCH
        ),
        of=features,
        parent=parent,
        now=now,
        rules=raw.recommender.section("preprocessing", PreprocessingSettings),
        excluded=tuple(raw.excluded_columns),
    )
    workflow.save(aside / _WORKFLOW)
    save_columns(columns, aside / _WORKFLOW)
    return workflow, columns
