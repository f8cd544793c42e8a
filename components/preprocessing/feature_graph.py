"""The NVTabular workflow: fitted on the training rows, then stated explicitly, then applied.

Two graphs. The first is fitted (category counts, moments). The second is built from a `FeatureWorkflow`: Categorify
with a vocabulary file whose order is that of our ids, and `Normalize` with given moments, so what NVTabular writes is,
number for number, what the served graph computes from the same description. The operators are `operators`', reading
rows is left to `raw_partitions`, which categories have an id to `vocabularies`, who runs which partition to `encode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import nvtabular as nvt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from merlin.schema import ColumnSchema, Schema
from numpy.typing import NDArray
from nvtabular import ops

from components.contracts.features import MISSING_CATEGORY, Features, NumericOptions
from components.contracts.raw_rows import LABEL, WEIGHT
from components.contracts.workflow import FIRST_ID, TOMBSTONE, FeatureWorkflow
from components.preprocessing import operators
from components.preprocessing.operators import (
    Counts,
    DistinctCategorify,
    Emptied,
    IsMissing,
    KnownBucketize,
    Moments,
    RoundedLogOp,
    stored_name,
)
from components.preprocessing.parent import ParentWorkflow
from components.preprocessing.raw_partitions import Partition, read_lazily, read_types
from components.preprocessing.settings import PreprocessingSettings
from components.preprocessing.vocabularies import Column, next_column, unseen_column


def statistics_of(partitions: list[Partition], *, numeric: tuple[str, ...]) -> tuple[dict[str, Counts], Moments]:
    """Category counts of the rows by slot, and what numeric columns are fitted by: the fitted graph.

    That is, of a bucketed column, how often each value occurs, clipped, in the place of its slot's categories, and of
    any other one the moments before scaling.

    Args:
        partitions: At least one.
        numeric: The numeric columns that are fitted.
    """
    features = partitions[0].features
    bucketed = tuple(name for name in features.bucketed if name in numeric)
    numeric = tuple(name for name in numeric if name not in bucketed)
    is_logged = {name: features.options_of(name).is_logged for name in numeric}
    counted = {*features.place_names, *bucketed}
    columns = {name: slot for name, slot in zip(features.id_names, features.id_places.slots) if name in counted}
    slots: dict[str, list[str]] = {features.slots[slot]: [] for slot in sorted(columns.values())}
    for name, slot in columns.items():
        slots[features.slots[slot]].append(name)
    statistics = operators.WindowStatistics(slots, is_logged)
    inputs = [list(features.place_names)] * bool(features.place_names) + unscaled(features, numeric)
    inputs += [_clipped([name], features.options_of(name)) for name in bucketed]
    if not inputs:
        return {}, {}
    workflow = nvt.Workflow(_joined(inputs) >> statistics)
    workflow.graph.construct_schema(_input_schema(features, weighted=partitions[0].weighted))
    # What Workflow.fit does, but for the types of the output, for which it reads and transforms a partition once more.
    workflow.executor.fit_phase(_dataset(partitions), [workflow.output_node])
    return statistics.counts, statistics.moments


def next_workflow(
    statistics: tuple[dict[str, Counts], Moments],
    *,
    of: Features,
    parent: ParentWorkflow | None,
    now: int,
    rules: PreprocessingSettings,
    excluded: tuple[str, ...] = (),
) -> tuple[FeatureWorkflow, list[Column]]:
    """The workflow of this round, and what the next one should know of its categories.

    Args:
        statistics: Those of the training rows.
        of: The columns.
        parent: Whose workflow to carry on; None = fitted on these rows alone. The arithmetic on its dense columns stays
            the parent's, because its weights were trained on it; columns that it lacks are fitted on these rows.
        now: Newest row of the window, microseconds of UTC since 1970.
        rules: When a category enters and leaves.
        excluded: Features that the rows all lack, and that what is fitted always takes as missing.
    """
    counts, moments = statistics
    before, unseen = parent.columns if parent else {}, unseen_column(np.zeros(0, np.int64))
    own = of.slots[: len(of.slots) - len(of.bucketed)]
    after = [next_column(before.get(name, unseen), *counts[name], now=now, rules=rules) for name in own]
    num_buckets = {name: of.options_of(name).num_buckets for name in of.bucketed}
    after += [unseen_column(np.arange(0 if name in excluded else n)) for name, n in num_buckets.items()]
    means, stds = _scaling(moments, of, known=parent.scaling if parent else {})
    known = parent.features.boundaries if parent else {}
    boundaries = {n: known[n] if n in known else _boundaries(*counts[n], number) for n, number in num_buckets.items()}
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


def explicit_workflow(features: FeatureWorkflow, storage: Path, *, weighted: bool = False) -> Any:
    """The NVTabular workflow that computes what `features` says; its category files lie below `storage`.

    A weight of `weighted` rows stays as it is, behind all other columns.
    """
    columns = features.features
    categorify = DistinctCategorify(_write_vocabularies(features, storage), columns, folder=storage)
    normalize = ops.Normalize(out_dtype=np.float32)
    # A float32 scalar written as a Python float keeps the arithmetic in float32.
    normalize.means = dict(zip(columns.numeric, map(float, features.means)))
    normalize.stds = dict(zip(columns.numeric, map(float, features.stds)))
    categorify.fitted = normalize.fitted = True
    outputs = [[LABEL] >> ops.AddMetadata(tags=["target"])]
    if plain := tuple(columns.numeric[place] for place in columns.plain_numeric):
        dense = _joined(unscaled(columns, plain, excluded=features.excluded)) >> normalize
        if columns.indicated:
            dense += _present(columns.indicated, features.excluded) >> IsMissing()
        outputs.append(dense[list(columns.dense_inputs)])
    if columns.id_names:
        places = zip(columns.place_names, columns.place_features)
        left_out = tuple(place for place, name in places if name in features.excluded)
        inputs = [_present(columns.place_names, left_out)] * bool(columns.place_names)
        bucketize = KnownBucketize({name: values.tolist() for name, values in features.boundaries.items()})
        for name in columns.bucketed:
            inputs.append(_clipped(_present((name,), features.excluded), columns.options_of(name)) >> bucketize)
        outputs.append(_joined(inputs) >> categorify)
    if weighted:
        outputs.append([WEIGHT] >> ops.AddMetadata(tags=["sample_weight"]))
    return nvt.Workflow(_joined(outputs)).fit_schema(_input_schema(columns, weighted=weighted))


def write_encoded(workflow: Any, partitions: list[Partition], *, folder: Path, names: list[str]) -> None:
    """Writes the encoded rows to `folder` in HugeCTR's Parquet form, one file per partition, called by its name."""
    encoded = workflow.transform(_dataset(partitions))
    encoded.schema = _movable(encoded.schema)
    features = partitions[0].features
    columns = {"cats": list(features.id_names), "conts": list(features.dense_inputs), "labels": [LABEL]}
    encoded.to_parquet(str(folder), output_files=names, **columns)


def unscaled(features: Features, names: tuple[str, ...], *, excluded: tuple[str, ...] = ()) -> list[Any]:
    """The parts of the graph of these numeric columns before they are scaled, one for all columns of equal options."""
    groups: dict[tuple[float, tuple[float, float], bool], list[str]] = {}
    for name in names:
        options = features.options_of(name)
        groups.setdefault((options.fill, options.bounds, options.is_logged), []).append(name)
    parts = []
    for (fill, _, is_logged), columns in groups.items():
        part = _clipped(
            _present(tuple(columns), excluded) >> ops.FillMissing(fill_val=fill), features.options_of(columns[0])
        )
        parts.append(part >> RoundedLogOp() if is_logged else part)
    return parts


def _clipped(part: Any, options: NumericOptions) -> Any:
    least, largest = options.bounds
    if least == -np.inf:
        return part
    return part >> ops.Clip(min_value=least, max_value=largest if largest < np.inf else None)


def _dataset(partitions: list[Partition]) -> Any:
    schema = _input_schema(partitions[0].features, weighted=partitions[0].weighted)
    return nvt.Dataset(read_lazily(partitions), cpu=True, schema=schema)


def _input_schema(features: Features, *, weighted: bool) -> Any:
    """Stated, because NVTabular would read a partition to find out."""
    types = read_types(features, weighted=weighted)
    return Schema([ColumnSchema(name, dtype=np.dtype(dtype)) for name, dtype in types.items()])


def _joined(parts: list[Any]) -> Any:
    """The columns of all parts, at least one, in their order."""
    return sum(parts[1:], start=parts[0])


def _write_vocabularies(features: FeatureWorkflow, storage: Path) -> dict[str, str]:
    """Files as Categorify leaves them: the id as the index, the category as the column; no table of its sizes.

    Integers, because pandas merges floats as objects, five times slower.
    """
    folder = storage / "categories"
    folder.mkdir(parents=True)
    paths = {}
    for i, (name, values) in enumerate(zip(features.features.slots, features.vocabularies)):
        # NVTabular cannot encode with an empty vocabulary; this value, which no raw row holds, stands in for it.
        listed = _without_tombstones(values) if len(values) else np.array([MISSING_CATEGORY])
        frame = pd.DataFrame({stored_name(name): listed}, index=pd.RangeIndex(FIRST_ID, FIRST_ID + len(listed)))
        paths[name] = str(folder / f"unique.{i}.parquet")
        pq.write_table(pa.Table.from_pandas(frame), paths[name], use_dictionary=False, write_statistics=False)
    return paths


def _movable(schema: Any) -> Any:
    """`schema` without the paths of the category files, which would be wrong once the folder is published."""
    return Schema(
        [
            replace(column, properties={k: v for k, v in column.properties.items() if k != "cat_path"})
            for column in schema
        ]
    )


def _present(columns: tuple[str, ...], excluded: tuple[str, ...]) -> Any:
    """The columns as a graph begins with them; excluded ones are emptied, whatever the rows hold."""
    return list(columns) >> Emptied(excluded) if set(columns) & set(excluded) else list(columns)


def _without_tombstones(vocabulary: NDArray[np.int64]) -> NDArray[np.int64]:
    """The vocabulary with a negative value of its own, which no raw row holds, for each id without a category.

    An id is a position, so each needs a value. They differ because NVTabular looks up by a merge: equal ones would
    multiply a row that held such a value, should one ever come past the checks.
    """
    return np.where(vocabulary == TOMBSTONE, TOMBSTONE - np.arange(len(vocabulary)), vocabulary)


def _scaling(
    moments: Moments, features: Features, *, known: Mapping[str, tuple[float, float]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What is subtracted from each numeric column and what it is divided by; 1 where all values are the same."""
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


def _boundaries(values: NDArray[np.float32], counts: NDArray[np.int64], num_buckets: int) -> NDArray[np.float32]:
    """The quantiles i / `num_buckets` of a column, from its distinct values, ascending, and how often each occurs.

    Each is a value of the column, by NumPy's method `higher`, so that it is exact in float32. One that equals another
    or the least value is left out: every bucket holds a row.
    """
    if not len(values):
        return np.zeros(0, np.float32)
    up_to = np.cumsum(counts)
    ranks = -(-np.arange(1, num_buckets) * (up_to[-1] - 1) // num_buckets)
    places = np.unique(np.searchsorted(up_to, ranks, side="right"))
    found: NDArray[np.float32] = values[places[places > 0]] + np.float32(0)
    return found
