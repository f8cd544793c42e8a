"""Fit the feature workflow of a run on its training rows, or continue the parent's workflow."""

import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.preprocessing.engines import Columns
from components.preprocessing.parent import ParentWorkflow
from components.preprocessing.raw_partitions import Partition, read_partition
from components.preprocessing.vocabularies import Column, next_column, unseen_column
from components.preprocessing.window_statistics import Moments, Statistics, merged, statistics_of
from evergreen.config.features import Features, NumericOptions
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.runtime.workers import Pickled, Workers

_MERGED_AT_A_TIME = 8


def statistics_of_all(
    shares: Sequence[Sequence[Partition]],
    *,
    unscaled: Callable[[Any], Columns] | None,
    workers: Workers,
    scratch: Path,
) -> Statistics:
    """Return the statistics of all rows, which `shares` divides among tasks.

    Each worker has only a few statistics in memory at a time.

    Args:
        shares: Partitions for each task. There must be at least one task.
        unscaled: Result of `engines.EncodingEngine.unscaler` for the numeric columns to fit. None
            if there are no numeric columns to fit.
        workers: Processes that share the tasks.
        scratch: Temporary folder, which this function creates and removes. Workers exchange counts
            of millions of categories through files in this folder.
    """
    scratch.mkdir()
    tasks = [(share, scratch / str(number)) for number, share in enumerate(shares)]
    found = workers.run_all(partial(_count_share, unscaled=unscaled), tasks)
    while len(found) > 1:
        groups = [
            found[begin : begin + _MERGED_AT_A_TIME]
            for begin in range(0, len(found), _MERGED_AT_A_TIME)
        ]
        found = workers.run_all(_merge_files, groups)
    statistics: Statistics = found[0].read()
    shutil.rmtree(scratch, ignore_errors=True)  # a worker that is reported as lost may still write
    return statistics


def _count_share(
    task: tuple[Sequence[Partition], Path], *, unscaled: Callable[[Any], Columns] | None
) -> Pickled:
    share, path = task
    return Pickled.write(path, pickle.dumps(_statistics_of_share(share, unscaled)))


def _merge_files(found: list[Pickled]) -> Pickled:
    """Merge statistics files into a new file. The inputs stay, because a task may run again."""
    result = found[0].read()
    for each in found[1:]:
        result = merged([result, each.read()])
    return Pickled.write(Path(f"{found[0].path}-merged"), pickle.dumps(result))


def _statistics_of_share(
    partitions: Sequence[Partition], unscaled: Callable[[Any], Columns] | None
) -> Statistics:
    found: list[Statistics] = []
    for partition in partitions:
        rows = read_partition(partition)
        found.append(statistics_of(rows, partition.features, unscaled(rows) if unscaled else {}))
        if len(found) == _MERGED_AT_A_TIME:
            found = [merged(found)]
    return merged(found)


def next_workflow(
    statistics: Statistics,
    *,
    of: Features,
    parent: ParentWorkflow | None,
    now: int,
    rules: PreprocessingSettings,
    excluded: tuple[str, ...] = (),
) -> tuple[FeatureWorkflow, list[Column]]:
    """Return the workflow of this run, and the columns that the next run continues.

    Without a parent, the workflow is fitted on these rows alone. With a parent, dense columns are
    transformed as in the parent's workflow, because the parent's weights were trained with these
    transforms. Only columns that the parent lacks are fitted on these rows.

    Args:
        statistics: Statistics of the training rows.
        of: The recommender's features.
        parent: Workflow of the parent model, or None.
        now: Time of the window's newest row, in microseconds since 1970 (UTC).
        rules: Settings for the admission of categories.
        excluded: Features that are missing in all rows. The workflow encodes these features as
            missing in every row.
    """
    counts, moments = statistics
    before, unseen = parent.columns if parent else {}, unseen_column(np.zeros(0, np.int64))
    own = of.slots[: len(of.slots) - len(of.bucketed)]
    after = [
        next_column(before.get(name, unseen), *counts[name], now=now, rules=rules) for name in own
    ]
    num_buckets = {name: of.options_of(name).num_buckets for name in of.bucketed}
    after += [
        unseen_column(np.arange(0 if name in excluded else n)) for name, n in num_buckets.items()
    ]
    means, stds = _scaling(moments, of, known=parent.scaling if parent else {})
    known = parent.features.boundaries if parent else {}
    boundaries = {
        n: known[n] if n in known else _boundaries(*counts[n], number)
        for n, number in num_buckets.items()
    }
    features = FeatureWorkflow(
        features=of,
        vocabularies=tuple(column.vocabulary for column in after),
        means=means,
        stds=stds,
        frequency_threshold=rules.frequency_threshold,
        excluded=excluded,
        boundaries=boundaries,
    )
    return features, after


def _scaling(
    moments: Moments, features: Features, *, known: Mapping[str, tuple[float, float]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the centre and the scale of each numeric column.

    The centre is subtracted, then the value is divided by the scale. The scale is 1 if all values
    are equal.
    """
    found = np.array(
        [
            known[name] if name in known else _fitted(moments, name, features.options_of(name))
            for name in features.numeric
        ]
    ).reshape(-1, 2)
    centres, scales = found.T.astype(np.float32)
    return centres, np.where(scales == 0, np.float32(1), scales)


def _fitted(moments: Moments, name: str, options: NumericOptions) -> tuple[float, float]:
    if options.is_standardized:
        return moments[name].mean_and_std()
    if options.is_minmax:
        return moments[name].least, moments[name].largest - moments[name].least
    return 0.0, 1.0


def _boundaries(
    values: NDArray[np.float32], counts: NDArray[np.int64], num_buckets: int
) -> NDArray[np.float32]:
    """Return the quantiles i / `num_buckets` of a column.

    Each quantile is a value of the column (NumPy's method `higher`), so the quantile is exact in
    float32. A quantile is dropped if it equals another quantile or the smallest value, so that no
    bucket is empty.

    Args:
        values: Distinct values of the column, ascending.
        counts: Number of rows with each value.
        num_buckets: Number of buckets.
    """
    if not len(values):
        return np.zeros(0, np.float32)
    up_to = np.cumsum(counts)
    ranks = -(-np.arange(1, num_buckets) * (up_to[-1] - 1) // num_buckets)
    positions = np.unique(np.searchsorted(up_to, ranks, side="right"))
    found: NDArray[np.float32] = values[positions[positions > 0]] + np.float32(0)
    return found
