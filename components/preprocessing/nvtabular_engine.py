"""NVTabular's engine: one graph computes the input of the fit, and another applies the workflow.

The second graph is built from a `FeatureWorkflow`. In the second graph, Categorify reads vocabulary
files in the order of our ids, and `Normalize` uses given moments. NVTabular therefore computes
exactly the numbers of the served graph. `numpy_engine` computes the same encoding.

NVTabular plans, executes and types the graphs, and Categorify looks up every id. The operators in
this module override methods of NVTabular's operator interface. Each operator exists for one of
three reasons, and its docstring states the reason:

- The operator is faster than NVTabular's own operator. Categorify gets each distinct value of a
  column once. Its merge and sort of all rows would take 10 to 20 times as long as everything else.
- NVTabular 23.8 raises an error in a case that the docstring names.
- The result must be equal on every machine.
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
from components.preprocessing.raw_partitions import distinct_values, position_columns
from evergreen.config.data import WEIGHT
from evergreen.config.features import INDICATOR, MISSING_CATEGORY, Features, NumericOptions
from evergreen.contracts.raw_rows import LABEL
from evergreen.contracts.workflow import (
    FIRST_ID,
    MISSING_ID,
    PADDING_ID,
    TOMBSTONE,
    FeatureWorkflow,
)


def _stored_name(name: str) -> str:
    """Return the name under which Categorify looks up a column.

    Categorify's own tables have the columns `order` and `labels`. A slash in the name avoids a
    clash with these columns, because no feature name contains a slash.
    """
    return f"/{name}"


class DistinctCategorify(ops.Categorify):  # type: ignore[misc]
    """Variant of Categorify that looks up each distinct value of a column once.

    The operator also accepts a partition in which a column has no value at all. NVTabular 23.8
    raises an error for a partition without values.
    """

    def __init__(self, vocabularies: dict[str, str], features: Features, *, folder: Path) -> None:
        """Create the operator for the columns `Features.id_names`.

        In a list feature, a missing value becomes padding. Elsewhere, a missing value becomes the
        id of missing values.

        Args:
            vocabularies: Vocabulary file of each slot. The category column of each file is named by
                `_stored_name`.
            features: The recommender's features.
            folder: Categorify's output folder.
        """
        super().__init__(
            vocabs={_stored_name(slot): path for slot, path in vocabularies.items()},
            out_path=str(folder),
        )
        slots = [features.slots[number] for number in features.id_positions.slots]
        self.storage_name = {
            name: _stored_name(slot) for name, slot in zip(features.id_names, slots)
        }
        owners = zip(features.id_names, features.id_features)
        self._absent = {
            name: PADDING_ID if owner in features.lists else MISSING_ID for name, owner in owners
        }

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Return the ids of `df` as int64."""
        ids = {name: self._ids(col_selector, name, df[name]) for name in col_selector.names}
        return pd.DataFrame(ids, index=df.index)

    def _ids(self, col_selector: Any, name: str, column: Any) -> Any:
        positions, distinct = distinct_values(column.to_numpy())
        ids = np.full(len(distinct) + 1, self._absent[name], dtype=np.int64)
        if len(distinct):
            stored = self.storage_name[name]
            ids[:-1] = super().transform(
                type(col_selector)([stored]), pd.DataFrame({stored: distinct})
            )[stored]
        return ids[positions]


class KnownBucketize(ops.Bucketize):  # type: ignore[misc]
    """Variant of Bucketize that keeps missing values missing.

    NVTabular 23.8 puts missing values into the last bucket.
    """

    output_dtype = np.float64
    """Type of all columns that Categorify receives."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Return the bucket numbers of the columns."""
        return super().transform(col_selector, df).where(df[col_selector.names].notna())


class RoundedLogOp(ops.LogOp):  # type: ignore[misc]
    """Variant of LogOp that computes in float64 and rounds to float32.

    The docstring of `FeatureWorkflow.encode_dense` gives the reason.
    """

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Return log(1 + x) of the columns."""
        shifted = df[col_selector.names].astype(np.float32) + np.float32(1)
        return np.log(shifted.astype(np.float64)).astype(np.float32)


class Emptied(ops.Operator):  # type: ignore[misc]
    """Operator that makes columns missing in every row.

    The values of an excluded column must not affect the result of the workflow.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        """Store the names of the columns whose values become missing.

        Other columns of the selection are unchanged.
        """
        super().__init__()
        self._names = names

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Return the selected columns with their types unchanged."""
        empty = {
            name: df[name] * np.float32(np.nan)
            for name in col_selector.names
            if name in self._names
        }
        return df[col_selector.names].assign(**empty)


class IsMissing(ops.Operator):  # type: ignore[misc]
    """Operator that computes indicators: 1 if a value is missing, else 0."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Return one float32 column for each input column, named by `features.INDICATOR`."""
        return df[col_selector.names].isna().astype(np.float32).rename(columns=_indicator)

    def column_mapping(self, col_selector: Any) -> dict[str, list[str]]:
        """Return the input column of each output column, as NVTabular requires."""
        return {_indicator(name): [name] for name in col_selector.names}


def _indicator(name: str) -> str:
    return INDICATOR.format(name=name)


def unscaler(features: Features, names: tuple[str, ...]) -> Callable[[Any], Columns]:
    """Return the function that `engines.EncodingEngine.unscaler` describes."""
    plain = tuple(name for name in names if name not in features.bucketed)
    inputs = _unscaled(features, plain)
    inputs += [_clipped([name], features.options_of(name)) for name in names if name not in plain]
    workflow = nvt.Workflow(_joined(inputs) >> ops.AddMetadata()).fit_schema(
        _input_schema(features, weighted=False)
    )
    return partial(_transformed, workflow, features)


def encoder(
    features: FeatureWorkflow, *, scratch: Path, weighted: bool = False
) -> Callable[[Any], Columns]:
    """Return the function that `engines.EncodingEngine.encoder` describes."""
    return partial(
        _transformed, explicit_workflow(features, scratch, weighted=weighted), features.features
    )


def _transformed(workflow: Any, features: Features, rows: Any) -> Columns:
    """Run the workflow's graph on the rows.

    The function uses the executor that NVTabular uses for a partition of a Dask collection.
    """
    found = LocalExecutor(Device.CPU).transform(_frame(rows, features), workflow.graph)
    return {name: found[name].to_numpy() for name in workflow.output_schema.column_names}


def _frame(rows: Any, features: Features) -> Any:
    """Return the rows as a pandas frame that NVTabular encodes exactly.

    Categories are float64, which is exact below 2^53, and null becomes NaN.
    """
    columns = {**dict(zip(rows.schema.names, rows.columns)), **position_columns(rows, features)}
    types = _read_types(features, weighted=WEIGHT in columns)
    return pd.DataFrame(
        {
            name: columns[name].to_numpy(zero_copy_only=False).astype(dtype)
            for name, dtype in types.items()
        }
    )


def _read_types(features: Features, *, weighted: bool = False) -> dict[str, str]:
    """Return the column types of the frame to encode, in column order."""
    return {
        LABEL: "float32",
        **dict.fromkeys(features.numeric, "float32"),
        **dict.fromkeys(features.position_names, "float64"),
        **({WEIGHT: "float32"} if weighted else {}),
    }


def explicit_workflow(features: FeatureWorkflow, storage: Path, *, weighted: bool = False) -> Any:
    """Return the NVTabular workflow that computes the encoding of `features`.

    Args:
        features: The fitted workflow.
        storage: Folder for the category files.
        weighted: Whether the rows have weights. The weight is copied unchanged into the last
            column.
    """
    columns = features.features
    categorify = DistinctCategorify(_write_vocabularies(features, storage), columns, folder=storage)
    normalize = ops.Normalize(out_dtype=np.float32)
    # A float32 value that is passed as a Python float keeps the arithmetic in float32.
    normalize.means = dict(zip(columns.numeric, map(float, features.means)))
    normalize.stds = dict(zip(columns.numeric, map(float, features.stds)))
    categorify.fitted = normalize.fitted = True
    outputs = [[LABEL] >> ops.AddMetadata(tags=["target"])]
    if plain := tuple(columns.numeric[position] for position in columns.plain_numeric):
        dense = _joined(_unscaled(columns, plain, excluded=features.excluded)) >> normalize
        if columns.indicated:
            dense += _present(columns.indicated, features.excluded) >> IsMissing()
        outputs.append(dense[list(columns.dense_inputs)])
    if columns.id_names:
        positions = zip(columns.position_names, columns.position_features)
        left_out = tuple(position for position, name in positions if name in features.excluded)
        inputs = [_present(columns.position_names, left_out)] * bool(columns.position_names)
        bucketize = KnownBucketize(
            {name: values.tolist() for name, values in features.boundaries.items()}
        )
        for name in columns.bucketed:
            inputs.append(
                _clipped(_present((name,), features.excluded), columns.options_of(name))
                >> bucketize
            )
        outputs.append(_joined(inputs) >> categorify)
    if weighted:
        outputs.append([WEIGHT] >> ops.AddMetadata(tags=["sample_weight"]))
    return nvt.Workflow(_joined(outputs)).fit_schema(_input_schema(columns, weighted=weighted))


def _unscaled(
    features: Features, names: tuple[str, ...], *, excluded: tuple[str, ...] = ()
) -> list[Any]:
    """Return parts of the graph that compute numeric columns before they are scaled.

    Columns with equal options are computed together, in one part.
    """
    groups: dict[tuple[float, tuple[float, float], bool], list[str]] = {}
    for name in names:
        options = features.options_of(name)
        groups.setdefault((options.fill, options.bounds, options.is_logged), []).append(name)
    parts = []
    for (fill, _, is_logged), columns in groups.items():
        part = _clipped(
            _present(tuple(columns), excluded) >> ops.FillMissing(fill_val=fill),
            features.options_of(columns[0]),
        )
        parts.append(part >> RoundedLogOp() if is_logged else part)
    return parts


def _clipped(part: Any, options: NumericOptions) -> Any:
    least, largest = options.bounds
    if least == -np.inf:
        return part
    return part >> ops.Clip(min_value=least, max_value=largest if largest < np.inf else None)


def _input_schema(features: Features, *, weighted: bool) -> Any:
    """Return the input schema.

    Without a schema, NVTabular would read a partition to infer the schema.
    """
    types = _read_types(features, weighted=weighted)
    return Schema([ColumnSchema(name, dtype=np.dtype(dtype)) for name, dtype in types.items()])


def _joined(parts: list[Any]) -> Any:
    return sum(parts[1:], start=parts[0])


def _write_vocabularies(features: FeatureWorkflow, storage: Path) -> dict[str, str]:
    """Write the vocabulary file of each slot in Categorify's layout, and return the paths by slot.

    The index is the id and the column is the category. Categorify's table of counts is not needed.
    Categories are integers, because pandas merges floats as objects, which is five times slower.
    """
    folder = storage / "categories"
    folder.mkdir(parents=True)
    paths = {}
    for i, (name, values) in enumerate(zip(features.features.slots, features.vocabularies)):
        # NVTabular fails with an empty vocabulary. The placeholder is a value that does not occur
        # in raw rows.
        listed = _without_tombstones(values) if len(values) else np.array([MISSING_CATEGORY])
        frame = pd.DataFrame(
            {_stored_name(name): listed}, index=pd.RangeIndex(FIRST_ID, FIRST_ID + len(listed))
        )
        paths[name] = str(folder / f"unique.{i}.parquet")
        pq.write_table(
            pa.Table.from_pandas(frame), paths[name], use_dictionary=False, write_statistics=False
        )
    return paths


def _present(columns: tuple[str, ...], excluded: tuple[str, ...]) -> Any:
    """Return the columns as the start of a graph. The excluded columns are emptied."""
    return list(columns) >> Emptied(excluded) if set(columns) & set(excluded) else list(columns)


def _without_tombstones(vocabulary: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replace each tombstone of the vocabulary by a different negative value.

    A tombstone still needs a value, because an id is a position in the vocabulary. Negative values
    do not occur in raw rows. The values must be different, because NVTabular joins the rows with
    the vocabulary. If a vocabulary contained a value twice, the join would duplicate a row with
    this value.
    """
    return np.where(vocabulary == TOMBSTONE, TOMBSTONE - np.arange(len(vocabulary)), vocabulary)
