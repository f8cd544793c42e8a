"""NVTabular's engine: its graphs of a round, the first before anything is fitted, the second stated explicitly.

The second graph is built from a `FeatureWorkflow`: Categorify with a vocabulary file whose order is that of our ids,
and `Normalize` with given moments, so what NVTabular computes is, number for number, what the served graph computes
from the same description. It defines the encoding; `numpy_engine` computes the same.

NVTabular plans, executes and types the graphs, and every id comes out of `Categorify`'s look-up. What the operators
here override is a method that its operator interface names, for one of three reasons, said at each: speed (Categorify
is handed every distinct value of a column once: its merge and sort of all rows cost 10 to 20 times the rest), a case
that NVTabular 23.8 refuses, or a result that is to be the same on every machine.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import nvtabular as nvt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from merlin.dag.executors import Device, LocalExecutor
from merlin.schema import ColumnSchema, Schema
from numpy.typing import NDArray
from nvtabular import ops

from components.preprocessing.engines import Columns
from components.preprocessing.raw_partitions import distinct_values, place_columns
from evergreen.config.data import WEIGHT
from evergreen.config.features import INDICATOR, MISSING_CATEGORY, Features, NumericOptions
from evergreen.contracts.raw_rows import LABEL
from evergreen.contracts.workflow import FIRST_ID, MISSING_ID, PADDING_ID, TOMBSTONE, FeatureWorkflow


def stored_name(name: str) -> str:
    """The name by which Categorify looks a column up.

    It merges tables that have columns `order` and `labels` of their own; no feature's name has a slash.
    """
    return f"/{name}"


class DistinctCategorify(ops.Categorify):  # type: ignore[misc]
    """Categorify that looks up each distinct value of a column once, and gives the rows the ids of their values.

    It also takes a partition in which a column has no value at all, where NVTabular 23.8 raises.
    """

    def __init__(self, vocabularies: dict[str, str], features: Features, *, folder: Path) -> None:
        """Takes the file of each slot, whose category column is named by `stored_name`, what looks up, and the folder.

        The columns are `Features.id_names`; in the place of a list a missing value is padding.
        """
        super().__init__(vocabs={stored_name(slot): path for slot, path in vocabularies.items()}, out_path=str(folder))
        slots = [features.slots[number] for number in features.id_places.slots]
        self.storage_name = {name: stored_name(slot) for name, slot in zip(features.id_names, slots)}
        owners = zip(features.id_names, features.id_features)
        self._absent = {name: PADDING_ID if owner in features.lists else MISSING_ID for name, owner in owners}

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The ids of `df`, int64."""
        ids = {name: self._ids(col_selector, name, df[name]) for name in col_selector.names}
        return pd.DataFrame(ids, index=df.index)

    def _ids(self, col_selector: Any, name: str, column: Any) -> Any:
        places, distinct = distinct_values(column.to_numpy())
        ids = np.full(len(distinct) + 1, self._absent[name], dtype=np.int64)
        if len(distinct):
            stored = self.storage_name[name]
            ids[:-1] = super().transform(type(col_selector)([stored]), pd.DataFrame({stored: distinct}))[stored]
        return ids[places]


class KnownBucketize(ops.Bucketize):  # type: ignore[misc]
    """Bucketize that leaves a missing value missing, where NVTabular 23.8 takes it for one of the last bucket."""

    output_dtype = np.float64
    """As of all columns that Categorify is given."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns' buckets."""
        return super().transform(col_selector, df).where(df[col_selector.names].notna())


class RoundedLogOp(ops.LogOp):  # type: ignore[misc]
    """LogOp whose logarithm is float64's, rounded to float32, as `FeatureWorkflow.encode_dense` says why."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns' log(1 + x)."""
        shifted = df[col_selector.names].astype(np.float32) + np.float32(1)
        return np.log(shifted.astype(np.float64)).astype(np.float32)


class Emptied(ops.Operator):  # type: ignore[misc]
    """Makes columns missing in every row: a workflow that excludes them must not depend on what the rows hold there."""

    def __init__(self, names: tuple[str, ...]) -> None:
        """Takes the names of the columns; others of the selection stay as they are."""
        super().__init__()
        self._names = names

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns, each with its type."""
        empty = {name: df[name] * np.float32(np.nan) for name in col_selector.names if name in self._names}
        return df[col_selector.names].assign(**empty)


class IsMissing(ops.Operator):  # type: ignore[misc]
    """The indicators of columns: 1 where a value is missing, else 0."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """One float32 column for each, named by `features.INDICATOR`."""
        return df[col_selector.names].isna().astype(np.float32).rename(columns=_indicator)

    def column_mapping(self, col_selector: Any) -> dict[str, list[str]]:
        """Which column each comes from, as NVTabular asks."""
        return {_indicator(name): [name] for name in col_selector.names}


def _indicator(name: str) -> str:
    return INDICATOR.format(name=name)


def unscaler(features: Features, names: tuple[str, ...]) -> Callable[[Any], Columns]:
    """See `engines.EncodingEngine`."""
    plain = tuple(name for name in names if name not in features.bucketed)
    inputs = _unscaled(features, plain)
    inputs += [_clipped([name], features.options_of(name)) for name in names if name not in plain]
    workflow = nvt.Workflow(_joined(inputs) >> ops.AddMetadata()).fit_schema(_input_schema(features, weighted=False))
    return partial(_transformed, workflow, features)


def encoder(features: FeatureWorkflow, *, scratch: Path, weighted: bool = False) -> Callable[[Any], Columns]:
    """See `engines.EncodingEngine`."""
    return partial(_transformed, explicit_workflow(features, scratch, weighted=weighted), features.features)


def _transformed(workflow: Any, features: Features, rows: Any) -> Columns:
    """What the executor that NVTabular gives each partition of a Dask collection makes of the rows."""
    found = LocalExecutor(Device.CPU).transform(_frame(rows, features), workflow.graph)
    return {name: found[name].to_numpy() for name in workflow.output_schema.column_names}


def _frame(rows: Any, features: Features) -> Any:
    """The rows as NVTabular encodes them exactly: a category is float64 (exact below 2^53, null = NaN)."""
    columns = {**dict(zip(rows.schema.names, rows.columns)), **place_columns(rows, features)}
    types = read_types(features, weighted=WEIGHT in columns)
    return pd.DataFrame(
        {name: columns[name].to_numpy(zero_copy_only=False).astype(dtype) for name, dtype in types.items()}
    )


def read_types(features: Features, *, weighted: bool = False) -> dict[str, str]:
    """Types of the columns of the frame that is encoded, in their order."""
    return {
        LABEL: "float32",
        **dict.fromkeys(features.numeric, "float32"),
        **dict.fromkeys(features.place_names, "float64"),
        **({WEIGHT: "float32"} if weighted else {}),
    }


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
        dense = _joined(_unscaled(columns, plain, excluded=features.excluded)) >> normalize
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


def _unscaled(features: Features, names: tuple[str, ...], *, excluded: tuple[str, ...] = ()) -> list[Any]:
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


def _input_schema(features: Features, *, weighted: bool) -> Any:
    """Stated, because NVTabular would read a partition to find out."""
    types = read_types(features, weighted=weighted)
    return Schema([ColumnSchema(name, dtype=np.dtype(dtype)) for name, dtype in types.items()])


def _joined(parts: list[Any]) -> Any:
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


def _present(columns: tuple[str, ...], excluded: tuple[str, ...]) -> Any:
    """The columns as a graph begins with them; excluded ones are emptied, whatever the rows hold."""
    return list(columns) >> Emptied(excluded) if set(columns) & set(excluded) else list(columns)


def _without_tombstones(vocabulary: NDArray[np.int64]) -> NDArray[np.int64]:
    """The vocabulary with a negative value of its own, which no raw row holds, for each id without a category.

    An id is a position, so each needs a value. They differ because NVTabular looks up by a merge: equal ones would
    multiply a row that held such a value, should one ever come past the checks.
    """
    return np.where(vocabulary == TOMBSTONE, TOMBSTONE - np.arange(len(vocabulary)), vocabulary)
