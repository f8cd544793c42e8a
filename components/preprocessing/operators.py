"""Operators for NVTabular's graphs: its own, given less to do, or made to give the same result on every machine.

Where the line is: NVTabular plans, executes and types the graphs (`Workflow`, its executor), and every id comes out of
`Categorify`'s look-up. What is overridden is a method that its operator interface names, for one of three reasons, said
at each: speed (Categorify is handed every distinct value of a column once and not every row: its merge and sort cost 10
to 20 times the rest), a case that NVTabular 23.8 refuses, or a result that is to be the same on every machine.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from nvtabular import ops

from components.contracts.features import INDICATOR, Features
from components.contracts.workflow import MISSING_ID, PADDING_ID


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
        places, distinct = _distinct(column.to_numpy())
        ids = np.full(len(distinct) + 1, self._absent[name], dtype=np.int64)
        if len(distinct):
            stored = self.storage_name[name]
            ids[:-1] = super().transform(type(col_selector)([stored]), pd.DataFrame({stored: distinct}))[stored]
        return ids[places]


def _distinct(values: Any) -> tuple[Any, Any]:
    """Per value, its place among the distinct ones (behind the last where it is missing), and these as they come.

    By Arrow, whose hash table is three times as fast as pandas' (7 to 11 ns a value, 26 to 33 by `factorize`).
    """
    encoded = pa.array(values, from_pandas=True).dictionary_encode()
    distinct = encoded.dictionary.to_numpy(zero_copy_only=False)
    return encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False), distinct


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
