"""The step itself: raw rows in, training set out, published whole or not at all.

Sequences fit, transform, verification and the comparison of what was written with `contracts.workflow`, from which
alone the served graph is built. How each is done is left to the modules named in the imports.

Here is also negative down-sampling: of the rows without a click that are to be learned, replayed ones included, a share
is kept, the same in every try. It is not extraction's, so that validation judges, and the monitor's reference counts,
the rows as they are, and a later round may compare its windows with this one's whatever rate either had. Categories are
counted in the rows that are kept; held-out rows are never thinned. `training.start` corrects the bias for it.
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

SALT = 0x5EED0F7415
"""Another than replay's (its salt is a time), so that the rows drawn to be replayed are thinned like all others."""
GROUP_ROWS = 65_536
THINNED_ROWS = 250_000
"""Of a thinned file, about."""


def thin(
    source: Path,
    into: Path,
    negative_rate: float,
    *,
    features: Features,
    expected_rows: int,
    weighted: bool = False,
    workers: Workers = THIS_PROCESS,
) -> int:
    """Copies what the raw rows of a folder say, without those that the rate leaves out; returns how many are kept.

    Rows keep their order, and each of the workers has one batch in memory at a time. `into` is created, with files of
    about `THINNED_ROWS` rows, or none where no row is kept; `expected_rows` are the source's by its manifest. Weights
    stay as they are.

    Raises:
        ContractError: a file cannot be read or has not the raw schema's types, or the folder has another number of
            rows.
    """
    into.mkdir(parents=True)
    lots = forked.shares(raw_files(source), max(1, round(expected_rows * negative_rate / THINNED_ROWS)))
    copied = [LABEL, *features.names, *([WEIGHT] if weighted else [])]
    tasks = [(lot, into / f"part-{number:05d}.parquet") for number, lot in enumerate(lots)]
    thinning = partial(_thin_files, negative_rate=negative_rate, features=features, copied=copied)
    found = workers.run_all(thinning, tasks)
    if (num_read := sum(read for read, _ in found)) != expected_rows:
        raise ContractError(f"raw folder {source} has {num_read} rows, expected the manifest's {expected_rows}")
    return sum(kept for _, kept in found)


def _thin_files(
    task: tuple[list[Path], Path], *, negative_rate: float, features: Features, copied: list[str]
) -> tuple[int, int]:
    """How many rows were read, and kept in the one file of the task."""
    paths, into = task
    columns = [*copied, REQUEST_ID, ROW]
    num_read = num_rows = 0
    with ExitStack() as stack:
        writer = None
        for path in paths:
            with reading_parquet(path):
                for batch in open_raw(path, features, columns).iter_batches(batch_size=GROUP_ROWS, columns=columns):
                    kept = pa.Table.from_batches([batch]).filter(pa.array(kept_rows(batch, negative_rate)))
                    num_read, num_rows = num_read + batch.num_rows, num_rows + kept.num_rows
                    if kept.num_rows:
                        table = kept.select(copied)
                        writer = writer or stack.enter_context(
                            parquet_writer(stack.enter_context(whole_file(into)), table.schema)
                        )
                        writer.write_table(table)
    return num_read, num_rows


def kept_rows(batch: Any, negative_rate: float) -> Any:
    """Which rows of an Arrow batch with label, request id and row are kept: all clicks, and a share of the others.

    Decided by the row's identity alone: not by its place, nor by the rows beside it.
    """
    identities = row_identities(batch.column(REQUEST_ID), batch.column(ROW).to_numpy(zero_copy_only=False))
    clicked = pc.equal(batch.column(LABEL), 1).fill_null(True).to_numpy(zero_copy_only=False)
    return clicked | (uniforms(identities, SALT) < negative_rate)


logger = logging.getLogger(__name__)

FIT_ROWS = 65_536
"""Rows of a partition while categories are counted, at most: those of a raw row group, so that processes count equally
many."""

TRAIN, HOLDOUT, WORKFLOW = "train", "holdout", "workflow"
REPLAY, REPLAY_HOLDOUT = "replay", "replay_holdout"
"""Old rows: encoded with the round's workflow, which is fitted without them."""
SCRATCH = ".scratch"
"""While the step works: counts of parts of the rows, then files that the engine needs."""
THINNED = ".thinned"
"""While the step works: the rows to be learned that `negative_rate` keeps."""


def preprocess(
    raw: RawDataset, *, parent: ParentWorkflow | None, final: Path, dask_scheduler: str = ""
) -> tuple[TrainingSet, dict[str, Any]]:
    """The training set that is now in `final`, in place of an earlier try's; and numbers of it for people.

    Raises:
        ContractError: the raw rows are not what they say, a setting is wrong, or the parent learned other columns.
        PermanentError: what was written is not what HugeCTR or the served graph expects.
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
        plan = partial(raw_partitions.plan_partitions, features=named, excluded=excluded, weighted=weighted)
        plans = {part: plan(*at, settings.partition_rows) for part, at in parts.items()}
        to_fit = plan(*parts[TRAIN], min(settings.partition_rows, FIT_ROWS))
        features, columns = _fit_workflow(to_fit, raw, parent=parent, engine=engine, workers=workers, aside=aside)
        encoder = engine.encoder(features, scratch=aside / SCRATCH, weighted=weighted)
        rows = encode.encode_parts(encoder, features, plans, aside=aside, final=final, workers=workers)
        _expect_all_rows(rows, {part: num_rows for part, (_, num_rows) in parts.items()}, aside)
        shutil.rmtree(aside / SCRATCH, ignore_errors=True)
    changes = vocabulary_changes(parent.features if parent else None, features)
    training_set = TrainingSet(
        train_uri=(final / TRAIN).as_uri(),
        holdout_uri=(final / HOLDOUT).as_uri(),
        num_train_rows=rows[TRAIN],
        num_holdout_rows=raw.num_holdout_rows,
        slot_sizes=features.slot_sizes,
        new_categories=[len(change.entered) for change in changes],
        tombstones=features.tombstones,
        workflow_uri=(final / WORKFLOW).as_uri(),
        raw_digest=raw.digest,
        last_event_time=raw.last_event_time,
        last_learned_time=raw.last_learned_time,
        window_start=raw.window_start,
        parent_model_uri=parent.model.uri if parent else None,
        replay_uri=(final / REPLAY).as_uri() if REPLAY in plans else None,
        num_replay_rows=rows.get(REPLAY, 0),
        replay_holdout_uri=(final / REPLAY_HOLDOUT).as_uri() if REPLAY_HOLDOUT in plans else None,
        num_replay_holdout_rows=raw.num_replay_holdout_rows,
        replay_share=raw.replay_share,
        excluded_columns=raw.excluded_columns,
        negative_rate=settings.negative_rate,
        days=raw.seen_days(),
        files=raw.files,
        unread_files=raw.unread_files,
        recommender=raw.recommender,
        num_sampled_out=raw.num_train_rows - rows[TRAIN],
    )
    facts = _facts_of(training_set, changes, columns)
    logger.info("workflow fitted: %s", facts)
    return training_set, facts


def _expect_all_rows(rows: dict[str, int], expected: dict[str, int], aside: Path) -> None:
    for part, num_rows in expected.items():
        if rows[part] != num_rows:
            raise PermanentError(f"encoded folder {aside / part} has {rows[part]} rows, expected {num_rows}")
        logger.info("%s encoded: %d rows", part, num_rows)


def _facts_of(training_set: TrainingSet, changes: list[VocabularyChange], columns: list[Column]) -> dict[str, Any]:
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
    """Folder and number of rows of each part that there is; of what is to be learned, the rows that are kept of it."""
    stated = {
        TRAIN: (raw.train_uri, raw.num_train_rows),
        HOLDOUT: (raw.holdout_uri, raw.num_holdout_rows),
        REPLAY: (raw.replay_uri, raw.num_replay_rows),
        REPLAY_HOLDOUT: (raw.replay_holdout_uri, raw.num_replay_holdout_rows),
    }
    parts = {part: (local_path(uri), num_rows) for part, (uri, num_rows) in stated.items() if uri is not None}
    if negative_rate == 1:
        yield parts
        return
    for part in (TRAIN, REPLAY):
        if part in parts:
            folder = aside / THINNED / part
            source, num_rows = parts[part]
            kept = thin(
                source,
                folder,
                negative_rate,
                features=raw.recommender.features,
                expected_rows=num_rows,
                weighted=raw.recommender.data.has_weights,
                workers=workers,
            )
            parts[part] = (folder, kept)
            logger.info("%s thinned: %d rows kept", part, parts[part][1])
    if not parts[TRAIN][1]:
        raise ContractError(f"negative_rate {negative_rate} keeps no row of {raw.train_uri}, expected a larger one")
    yield {part: (folder, num_rows) for part, (folder, num_rows) in parts.items() if part != REPLAY or num_rows}
    shutil.rmtree(aside / THINNED)


def _fit_workflow(
    plan: list[raw_partitions.Partition],
    raw: RawDataset,
    *,
    parent: ParentWorkflow | None,
    engine: EncodingEngine,
    workers: Workers,
    aside: Path,
) -> tuple[FeatureWorkflow, list[Column]]:
    """Writes this round's workflow, with what the next one should know, into its folder in `aside`."""
    now = raw_rows.microseconds(moment_of(raw.last_event_time).timestamp())
    features = raw.recommender.features
    new = tuple(name for name in features.numeric if parent is None or name not in parent.scaling)
    unscaled = engine.unscaler(features, new) if new else None
    pa.scalar(0)  # pyarrow imports pandas, if it is there, at its first use: once, not in every process that is forked
    shares = forked.shares(plan, workers.num_shares, weight=lambda partition: partition.num_rows)
    workflow, columns = fitting.next_workflow(
        fitting.statistics_of_all(shares, unscaled=unscaled, workers=workers, scratch=aside / SCRATCH),
        of=features,
        parent=parent,
        now=now,
        rules=raw.recommender.section("preprocessing", PreprocessingSettings),
        excluded=tuple(raw.excluded_columns),
    )
    workflow.save(aside / WORKFLOW)
    save_columns(columns, aside / WORKFLOW)
    return workflow, columns
