"""The NVTabular workflow: fitted on the training rows, then stated explicitly, then applied.

Two graphs of the same operators. The first is fitted (category counts, moments). The second is built from a
`FeatureWorkflow`: `Categorify(vocabs=)` with ids in our order and `Normalize` with given moments, so what NVTabular
writes is, number for number, what the served graph computes from the same description. Reading rows is left to
`raw_partitions`, which categories have an id to `vocabularies`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import nvtabular as nvt
import pandas as pd
from merlin.schema import Schema
from numpy.typing import NDArray
from nvtabular import ops

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL, MISSING_CATEGORY
from components.contracts.workflow import FIRST_ID, MISSING_ID, TOMBSTONE, FeatureWorkflow
from components.preprocessing.parent import Parent
from components.preprocessing.vocabularies import AdmissionRules, Column, next_column, unseen_column

FILL = 0.0
CLIP_MIN = 0.0
CONSTANT_STD = 1e-6
"""A standard deviation below this share of the values' size is the rounding error of a constant column."""

OUTPUT_TYPES = {
    LABEL: np.dtype("float32"),
    **dict.fromkeys(DENSE, np.dtype("float32")),
    **dict.fromkeys(CATEGORICAL, np.dtype("int64")),
}
"""Columns of the training set in file order, which is HugeCTR's slot order."""


class CategoryCounter(ops.Categorify):  # type: ignore[misc]
    """Categorify of the fitted graph: its counts are all that is wanted of it."""

    def fit_finalize(self, categories: Any) -> None:
        """Keeps the counts; a column without any value, for which NVTabular 23.8 writes no file, gets a stand-in."""
        super().fit_finalize(categories)
        for name, path in categories.items():
            if name in CATEGORICAL and not Path(path).exists():
                frame = pd.DataFrame({name: [float(MISSING_CATEGORY)], f"{name}_size": [0]}, index=[FIRST_ID])
                frame.to_parquet(path)

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns as they are: Workflow.fit encodes a partition to learn types that nobody asks for."""
        return df[col_selector.names]


class NullSafeCategorify(ops.Categorify):  # type: ignore[misc]
    """Categorify that also takes partitions in which a column has no value at all (NVTabular 23.8 raises there)."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The ids of `df`; a column without any value is all `MISSING_ID`."""
        empty = [name for name in col_selector.names if not df[name].notna().any()]
        if not empty:
            return super().transform(col_selector, df)
        # One value for the first row satisfies NVTabular; the whole column is then put right.
        filled = df.assign(**{name: df[name].where(np.arange(len(df)) > 0, 0.0) for name in empty})
        encoded = super().transform(col_selector, filled)
        return encoded.assign(**{name: np.int64(MISSING_ID) for name in empty})


class RoundedLogOp(ops.LogOp):  # type: ignore[misc]
    """LogOp whose logarithm is float64's, rounded to float32, as `FeatureWorkflow.encode_dense` says why."""

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The columns' log(1 + x)."""
        shifted = df[col_selector.names].astype(np.float32) + np.float32(1)
        return np.log(shifted.astype(np.float64)).astype(np.float32)


def fit(
    dataset: Any, *, parent: Parent | None, now: int, rules: AdmissionRules, scratch: Path
) -> tuple[FeatureWorkflow, list[Column]]:
    """The workflow of this round, and what the next one should know of its categories.

    Args:
        dataset: The training rows.
        parent: Whose workflow to carry on; None = fitted on `dataset` alone. The arithmetic on dense columns stays
            the parent's, because its weights were trained on it.
        now: Newest row of the window, microseconds of UTC since 1970.
        rules: When a category enters and leaves.
        scratch: Folder for NVTabular's counts.
    """
    counter = CategoryCounter(out_path=str(scratch))
    graph = list(CATEGORICAL) >> counter
    normalize = ops.Normalize()
    if parent is None:
        graph = graph + (_logged() >> ops.LambdaOp(_to_float64, dtype="float64") >> normalize)
    nvt.Workflow(graph).fit(dataset)
    before = parent.columns if parent else [unseen_column(np.zeros(0, np.int64))] * len(CATEGORICAL)
    after = [
        next_column(column, *_counted(counter.categories, name), now=now, rules=rules)
        for name, column in zip(CATEGORICAL, before)
    ]
    means, stds = (parent.features.means, parent.features.stds) if parent else _moments(normalize)
    features = FeatureWorkflow(
        vocabularies=tuple(column.vocabulary for column in after),
        fill=parent.features.fill if parent else FILL,
        clip_min=parent.features.clip_min if parent else CLIP_MIN,
        means=means,
        stds=stds,
        frequency_threshold=rules.frequency_threshold,
    )
    return features, after


def explicit_workflow(features: FeatureWorkflow, schema: Any, storage: Path) -> Any:
    """The NVTabular workflow that computes what `features` says; its category files lie below `storage`."""
    vocabularies = {
        # NVTabular cannot encode with an empty vocabulary; this value, which no raw row holds, stands in for it.
        name: pd.Series(_without_tombstones(values) if len(values) else [MISSING_CATEGORY], dtype="float64")
        for name, values in zip(CATEGORICAL, features.vocabularies)
    }
    categorify = NullSafeCategorify(vocabs=vocabularies, out_path=str(storage))
    normalize = ops.Normalize(out_dtype=np.float32)
    # A float32 scalar written as a Python float keeps the arithmetic in float32.
    normalize.means = dict(zip(DENSE, map(float, features.means)))
    normalize.stds = dict(zip(DENSE, map(float, features.stds)))
    categorify.fitted = normalize.fitted = True
    dense = _logged(features.fill, features.clip_min) >> normalize
    label = [LABEL] >> ops.AddMetadata(tags=["target"])
    workflow = nvt.Workflow(label + dense + (list(CATEGORICAL) >> categorify))
    return workflow.fit_schema(schema)


def write_encoded(workflow: Any, dataset: Any, folder: Path) -> None:
    """Writes the encoded rows of `dataset` to `folder` in HugeCTR's Parquet form, one file per partition, in order."""
    encoded = workflow.transform(dataset)
    encoded.schema = _movable(encoded.schema)
    names = [f"part-{i:05d}.parquet" for i in range(encoded.npartitions)]
    encoded.to_parquet(
        str(folder),
        output_files=names,
        cats=list(CATEGORICAL),
        conts=list(DENSE),
        labels=[LABEL],
        dtypes=OUTPUT_TYPES,
    )


def _movable(schema: Any) -> Any:
    """`schema` without the paths of the category files, which would be wrong once the folder is published."""
    return Schema(
        [
            replace(column, properties={k: v for k, v in column.properties.items() if k != "cat_path"})
            for column in schema
        ]
    )


def _logged(fill: float = FILL, clip_min: float = CLIP_MIN) -> Any:
    return list(DENSE) >> ops.FillMissing(fill_val=fill) >> ops.Clip(min_value=clip_min) >> RoundedLogOp()


def _to_float64(column: Any) -> Any:
    """Makes Normalize sum in float64: in float32 a constant column shows a spread that it does not have."""
    return column.astype("float64")


def _without_tombstones(vocabulary: NDArray[np.int64]) -> NDArray[np.int64]:
    """The vocabulary with a negative value of its own, which no raw row holds, for each id without a category.

    An id is a position, so each needs a value. They differ because NVTabular looks up by a merge: equal ones would
    multiply a row that held such a value, should one ever come past the checks.
    """
    return np.where(vocabulary == TOMBSTONE, TOMBSTONE - np.arange(len(vocabulary)), vocabulary)


def _counted(categories: dict[str, str], name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Categories of a column and their counts, as Categorify left them."""
    frame = pd.read_parquet(categories[name]).dropna()
    frame = frame[frame[f"{name}_size"] > 0]  # without CategoryCounter's stand-in
    return frame[name].to_numpy().astype(np.int64), frame[f"{name}_size"].to_numpy().astype(np.int64)


def _moments(normalize: Any) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Means and standard deviations; 1 in place of the standard deviation of a constant or one-row column."""
    means = np.array([normalize.means[name] for name in DENSE])
    stds = np.nan_to_num([normalize.stds[name] for name in DENSE])
    constant = stds <= CONSTANT_STD * np.maximum(np.abs(means), 1.0)
    return means.astype(np.float32), np.where(constant, 1.0, stds).astype(np.float32)
