"""Which features a run learns from, and which of the others are read all the same.

A feature that the run leaves out is named in `RawDataset.excluded_columns`, and whoever reads the rows goes by that
list: preprocessing takes it as missing, validation does not judge it. It is not read from the lake, and null in the
rows, unless the champion learns from it: the gate scores candidate and champion on the same held-out rows, and a
champion without one of its features would be beaten by any candidate.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.contracts.criteo import FEATURES
from components.contracts.manifests import Model
from components.contracts.workflow import FeatureWorkflow
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.store import models as model_store


def excluded_columns(columns: str) -> list[str]:
    """The features that `columns` does not name, in the order of files.

    Args:
        columns: Names, comma-separated; empty = all.

    Raises:
        ContractError: a name is no feature's, or is there twice.

    >>> excluded_columns(""), len(excluded_columns("I1, C3"))
    ([], 37)
    """
    names = [name.strip() for name in columns.split(",")] if columns.strip() else list(FEATURES)
    if unknown := [name for name in names if name not in FEATURES]:
        raise ContractError(f"columns name {unknown}, expected some of I1 to I13 and C1 to C26")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ContractError(f"columns name {twice} twice, expected each once")
    return [name for name in FEATURES if name not in names]


def unread_columns(excluded: Collection[str], store: Path, champion: str) -> frozenset[str]:
    """Those of the excluded features that the champion (`current`, `none` or a model's id) does without, too.

    Raises:
        ContractError: the champion is unknown, or its workflow is damaged.
    """
    if not excluded:
        return frozenset()
    release = model_store.champion(store, champion)
    if release is None:
        return frozenset(excluded)
    workflow = FeatureWorkflow.load(local_path(release.model_uri) / Model.WORKFLOW)
    return frozenset(excluded) & frozenset(workflow.excluded)


def without_columns(table: Any, unread: Collection[str]) -> Any:
    """The raw table with null in those columns; for sources that cannot read around them."""
    for name in unread:
        at = table.schema.get_field_index(name)
        if table.column(at).null_count < table.num_rows:
            field = table.schema.field(at)
            table = table.set_column(at, field, pa.nulls(table.num_rows, field.type))
    return table
