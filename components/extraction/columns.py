"""The columns of a run: which features it learns from, and how a file's columns differ from the raw schema.

A feature that the run excludes is named in `RawDataset.excluded_columns`; preprocessing treats it as missing and
validation does not judge it. It is not read from the lake, and is null in the rows, unless the champion learns from it:
the gate scores candidate and champion on the same held-out rows, and a champion without one of its features would lose
to any candidate.

Rows leave extraction in the raw schema: a feature that became text is cast where possible, and an unknown column is not
read. The next step cannot see either, so `RawDataset.schema_mismatches` reports them. A column that is absent or cannot
be cast stops this step (`readers.parquet`).
"""

from collections.abc import Collection, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from components.contracts import raw_rows
from components.contracts.features import Features
from components.contracts.manifests import Model
from components.contracts.workflow import FeatureWorkflow
from components.runtime.errors import ContractError
from components.storage.uris import local_path


def excluded_columns(columns: Sequence[str], features: Features) -> list[str]:
    """Those of `features` that `columns` does not name, in the order of files.

    Without `columns` none is left out.

    Raises:
        ContractError: a name is no feature's or there twice, or a list is named without the feature of its table.

    >>> excluded_columns(["item", "price"], Features(numeric=("price", "age"), categorical=("item",)))
    ['age']
    """
    names = list(columns or features.names)
    if unknown := [name for name in names if name not in features.names]:
        raise ContractError(f"columns name {unknown}, expected some of {', '.join(features.names)}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ContractError(f"columns name {twice} twice, expected each once")
    excluded = [name for name in features.names if name not in names]
    for name in features.lists:
        if (table := features.list_options_of(name).table) in excluded and name not in excluded:
            raise ContractError(f"columns name {name} and not its table {table}, expected both or none")
    return excluded


def unread_columns(excluded: Collection[str], champion: Model | None) -> frozenset[str]:
    """Those of the excluded features that the champion does without, too; without one, all of them.

    Raises:
        ContractError: the champion's workflow is damaged.
    """
    if not excluded or champion is None:
        return frozenset(excluded)
    workflow = FeatureWorkflow.load(local_path(champion.uri) / Model.WORKFLOW)
    return frozenset(excluded) & frozenset(workflow.excluded)


class SchemaMismatch(NamedTuple):
    """One column of one file."""

    column: str
    arrow_type: str
    """In the file."""
    expected: str | None
    """Type in the raw schema; None for a column that is not in it."""
    file: str
    """The first file that has it so."""


def find_schema_mismatches(
    schema: Any, path: Path, features: Features, *, unread: Container[str] = (), weighted: bool = False
) -> list[SchemaMismatch]:
    """The foreign columns of a file with that Arrow schema, in its order; features in `unread` are not judged.

    A weight is foreign where rows are not `weighted`.

    Numbers of another width, whole numbers among floats and label as a boolean are what was agreed on.
    """
    found = []
    weight = tuple(raw_rows.WEIGHT_TYPES) if weighted else ()
    types, known, numbers = (
        raw_rows.lake_types(features, weighted=weighted),
        raw_rows.known_columns(features).union(weight),
        (raw_rows.LABEL, *features.names, *weight),
    )
    for field in schema:
        if field.name not in known:
            found.append(SchemaMismatch(field.name, str(field.type), None, str(path)))
        elif field.name in numbers and field.name not in unread:
            of_values = field.type.value_type if field.name in features.lists and is_list(field.type) else field.type
            is_fit = _is_number(of_values) or (field.name in features.words and _is_text(of_values))
            if field.name in features.lists and not pa.types.is_null(field.type):
                is_fit = is_fit and is_list(field.type)
            if not is_fit:
                found.append(SchemaMismatch(field.name, str(field.type), types[field.name], str(path)))
    return found


def is_list(found: Any) -> bool:
    """Whether an Arrow type is one of lists."""
    return any(is_of(found) for is_of in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def _is_text(found: Any) -> bool:
    values = found.value_type if pa.types.is_dictionary(found) else found
    types = pa.types
    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_of(values) for is_of in kinds)


def _is_number(found: Any) -> bool:
    values = found.value_type if pa.types.is_dictionary(found) else found
    # A column without any value is written as null by pandas: nothing is retyped by it.
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null)
    return any(is_of(values) for is_of in kinds)
