"""Encode all parts of a dataset, verify the files and describe them for HugeCTR.

An engine encodes the rows, and other processes may encode some of the partitions. HugeCTR checks
neither types nor ranges. HugeCTR reads the bits of an int32 label as a float. HugeCTR treats an id
that is too large for its slot as an id of the next slot. Every written file is therefore read back
and checked here. The first rows of each file are also compared with `evergreen.contracts.workflow`,
because the served graph is built from this workflow alone. HugeCTR needs `_metadata.json` and
`_file_list.txt` beside the Parquet files.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from components.preprocessing import numpy_engine
from components.preprocessing.engines import Columns
from components.preprocessing.raw_partitions import Partition, read_partition
from evergreen.config.data import WEIGHT
from evergreen.config.features import Features
from evergreen.contracts.hugectr_folder import write_file_list
from evergreen.contracts.raw_rows import LABEL
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.rows.archived_rows import parquet_file, write_parquet
from evergreen.runtime.durable import whole_file, write_whole
from evergreen.runtime.errors import PermanentError
from evergreen.runtime.workers import Workers

_METADATA = "_metadata.json"
_ROW_GROUP_BYTES = 128_000_000
"""Approximate size of a row group in the written files."""
_COMPARED_ROWS = 1024
"""Number of rows compared at the start of each file."""
_TOLERANCE = 1e-6
"""Maximum relative difference of dense values. Engines on one machine give equal bits, and tests
check this."""


class _Task(NamedTuple):
    """A partition and the output file of its rows."""

    partition: Partition
    path: Path


def encode_parts(
    encoder: Callable[[Any], Columns],
    features: FeatureWorkflow,
    plans: Mapping[str, list[Partition]],
    *,
    aside: Path,
    final: Path,
    workers: Workers,
) -> dict[str, int]:
    """Write the folder of each part into `aside` and return the number of rows of each part.

    The result does not depend on `workers`.

    Args:
        encoder: Function that encodes a record batch.
        features: The fitted workflow.
        plans: Partitions of each part, in row order.
        aside: Temporary folder to write into.
        final: Folder to which the caller moves `aside` later. HugeCTR's file lists contain paths in
            `final`.
        workers: Processes that share the partitions.

    Raises:
        ContractError: the raw rows do not match their manifest.
        PermanentError: the written files do not match what HugeCTR or the served graph expects.
        TemporaryError: a process was killed.
    """
    tasks = [
        _Task(p, aside / part / f"part-{i:05d}.parquet")
        for part, plan in plans.items()
        for i, p in enumerate(plan)
    ]
    for part in plans:
        (aside / part).mkdir()
    found = iter(workers.run_all(partial(_encode_task, encoder, features), tasks))
    num_rows = {part: [next(found) for _ in plan] for part, plan in plans.items()}
    for part, of_files in num_rows.items():
        for torn in (aside / part).glob(".*"):  # left by workers that were killed
            torn.unlink()
        _describe_files(aside / part, of_files, features.features, final=final / part)
    return {part: sum(of_files) for part, of_files in num_rows.items()}


def _encode_task(encoder: Callable[[Any], Columns], features: FeatureWorkflow, task: _Task) -> int:
    """Write one file, verify it and return its number of rows."""
    partition, path = task
    table = pa.table(encoder(read_partition(partition)))
    row_group_size = -(-_ROW_GROUP_BYTES * table.num_rows // table.nbytes)
    with whole_file(
        path
    ) as file:  # a worker that is reported as lost may still write the same rows
        write_parquet(table, file, compression="NONE", row_group_size=row_group_size)
    num_rows = verify_file(
        path, features.features, features.slot_sizes, weighted=partition.weighted
    )
    compare(features, partition, path)
    return num_rows


def verify_file(
    path: Path, columns: Features, slot_sizes: list[int], *, weighted: bool = False
) -> int:
    """Check that one file has HugeCTR's form and return its number of rows.

    Args:
        path: The Parquet file.
        columns: The recommender's features.
        slot_sizes: Number of ids of each slot.
        weighted: Whether the file has a weight column, which HugeCTR does not read.

    Raises:
        PermanentError: a wrong column or type, a null, a value that is not finite, or an id outside
            its slot. Only list features may contain the padding id 0.
    """
    file = parquet_file(path)
    found = {field.name: str(field.type) for field in file.schema_arrow}
    types = {
        **dict.fromkeys((LABEL, *columns.dense_inputs), "float"),
        **dict.fromkeys(columns.id_names, "int64"),
    }
    types |= {WEIGHT: "float"} if weighted else {}
    if list(found.items()) != list(types.items()):
        raise PermanentError(f"columns of {path} are {found}, expected {types} in this order")
    sizes = dict(zip(columns.id_names, (slot_sizes[slot] for slot in columns.id_positions.slots)))
    for batch in file.iter_batches():
        for name, column in zip(types, batch.columns):
            if column.null_count:
                raise PermanentError(
                    f"column {name} of {path} has {column.null_count} nulls, expected none"
                )
            least = 1 if name in columns.categorical + columns.bucketed else 0
            _verify_values(path, name, column.to_numpy(), slot_size=sizes.get(name), least=least)
    return int(file.metadata.num_rows)


def _verify_values(
    path: Path, name: str, values: Any, *, slot_size: int | None, least: int
) -> None:
    if slot_size is None:
        if wrong := int(np.count_nonzero(~np.isfinite(values))):
            raise PermanentError(
                f"column {name} of {path} has {wrong} values that are not finite, expected none"
            )
    elif values.min() < least or values.max() >= slot_size:
        raise PermanentError(
            f"column {name} of {path} has ids from {values.min()} to {values.max()}, "
            f"expected {least} to {slot_size - 1}"
        )


def compare(features: FeatureWorkflow, partition: Partition, path: Path) -> None:
    """Compare the first encoded rows of a file with the encoding that `features` computes.

    Args:
        features: The fitted workflow.
        partition: Raw rows of the file.
        path: The encoded file.

    Raises:
        PermanentError: an id differs, or a dense value differs by more than `_TOLERANCE`.
    """
    rows = read_partition(partition, first_rows=_COMPARED_ROWS)
    written = next(parquet_file(path).iter_batches(batch_size=rows.num_rows))
    wrong_ids, difference = 0, 0.0
    for name, expected in numpy_engine.encoder(features, scratch=path.parent)(rows).items():
        found = written.column(written.schema.get_field_index(name)).to_numpy()
        if name in features.features.id_names:
            wrong_ids += int(np.count_nonzero(found != expected))
        else:
            relative = np.abs(found - expected) / np.maximum(np.abs(expected), 1.0)
            # np.maximum propagates NaN, so a NaN counts as a difference.
            difference = float(np.maximum(difference, relative.max()))
    if wrong_ids or not difference <= _TOLERANCE:
        raise PermanentError(
            f"{path.parent.name}/{path.name} differs from the feature workflow in the first "
            f"{rows.num_rows} rows: {wrong_ids} ids differ, expected 0, and dense values "
            f"differ by {difference}, expected at most {_TOLERANCE}"
        )


def _describe_files(folder: Path, num_rows: list[int], features: Features, *, final: Path) -> None:
    """Write `_metadata.json` and the file list of `folder`, which is moved to `final` later."""
    names = sorted(path.name for path in folder.glob("*.parquet"))
    ids, dense = list(features.id_names), list(features.dense_inputs)
    positions = {name: i for i, name in enumerate([LABEL, *dense, *ids])}
    document = {
        "file_stats": [{"file_name": name, "num_rows": rows} for name, rows in zip(names, num_rows)]
    }
    for kind, columns in {"cats": ids, "conts": dense, "labels": [LABEL]}.items():
        document[kind] = [{"col_name": name, "index": positions[name]} for name in columns]
    write_whole(folder / _METADATA, json.dumps(document))
    write_file_list(folder, names, final=final)
