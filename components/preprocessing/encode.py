"""The rows of a part encoded, proven to be what HugeCTR and the served graph expect, and put together in one folder.

An engine encodes, and each share of the rows may be another process's. What was written is read again before anybody
else does. HugeCTR checks neither types (the bits of an int32 label are read as a float) nor ranges (an id at or above
its slot's size lands in the next slot), so every file is checked here; and the first rows of every file are compared
with `contracts.workflow`, from which alone the served graph is built. Beside the Parquet files lies what HugeCTR asks
about them (`_metadata.json`, `_file_list.txt`).
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

METADATA = "_metadata.json"
ROW_GROUP_BYTES = 128_000_000
"""Of written files, about."""
COMPARED_ROWS = 1024
"""Of each file."""
TOLERANCE = 1e-6
"""Of dense values. On one machine they are equal bit by bit, which the tests hold."""


class Task(NamedTuple):
    """A partition, and the file that its rows are written to."""

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
    """Writes each part's folder into `aside`; gives each part's number of rows.

    `plans` are the partitions of each part, in row order; the folders are written in `aside` and will lie in `final`.
    The result does not depend on `workers`.

    Raises:
        ContractError: the raw rows are not what they should be.
        PermanentError: what was written is not what HugeCTR or the served graph expects.
        TemporaryError: a process was killed.
    """
    tasks = [
        Task(p, aside / part / f"part-{i:05d}.parquet") for part, plan in plans.items() for i, p in enumerate(plan)
    ]
    for part in plans:
        (aside / part).mkdir()
    found = iter(workers.run_all(partial(_encode_task, encoder, features), tasks))
    num_rows = {part: [next(found) for _ in plan] for part, plan in plans.items()}
    for part, of_files in num_rows.items():
        for torn in (aside / part).glob(".*"):  # of workers that were killed
            torn.unlink()
        _describe_files(aside / part, of_files, features.features, final=final / part)
    return {part: sum(of_files) for part, of_files in num_rows.items()}


def _encode_task(encoder: Callable[[Any], Columns], features: FeatureWorkflow, task: Task) -> int:
    """Writes one file and proves it; gives its number of rows."""
    partition, path = task
    table = pa.table(encoder(read_partition(partition)))
    row_group_size = -(-ROW_GROUP_BYTES * table.num_rows // table.nbytes)
    with whole_file(path) as file:  # a worker that was given up for lost may still write the same rows
        write_parquet(table, file, compression="NONE", row_group_size=row_group_size)
    num_rows = verify_file(path, features.features, features.slot_sizes, weighted=partition.weighted)
    compare(features, partition, path)
    return num_rows


def verify_file(path: Path, columns: Features, slot_sizes: list[int], *, weighted: bool = False) -> int:
    """Proves that one file is in HugeCTR's form, but for a weight of `weighted` rows; gives its number of rows.

    Raises:
        PermanentError: a wrong column or type, a null, a value that is not finite, or an id outside its slot; padding
            (0) stands in places of lists alone.
    """
    file = parquet_file(path)
    found = {field.name: str(field.type) for field in file.schema_arrow}
    types = {**dict.fromkeys((LABEL, *columns.dense_inputs), "float"), **dict.fromkeys(columns.id_names, "int64")}
    types |= {WEIGHT: "float"} if weighted else {}
    if list(found.items()) != list(types.items()):
        raise PermanentError(f"columns of {path} are {found}, expected {types} in this order")
    sizes = dict(zip(columns.id_names, (slot_sizes[slot] for slot in columns.id_places.slots)))
    for batch in file.iter_batches():
        for name, column in zip(types, batch.columns):
            if column.null_count:
                raise PermanentError(f"column {name} of {path} has {column.null_count} nulls, expected none")
            least = 1 if name in columns.categorical + columns.bucketed else 0
            _verify_values(path, name, column.to_numpy(), slot_size=sizes.get(name), least=least)
    return int(file.metadata.num_rows)


def _verify_values(path: Path, name: str, values: Any, *, slot_size: int | None, least: int) -> None:
    if slot_size is None:
        if wrong := int(np.count_nonzero(~np.isfinite(values))):
            raise PermanentError(f"column {name} of {path} has {wrong} values that are not finite, expected none")
    elif values.min() < least or values.max() >= slot_size:
        raise PermanentError(
            f"column {name} of {path} has ids from {values.min()} to {values.max()}, expected {least} to "
            f"{slot_size - 1}"
        )


def compare(features: FeatureWorkflow, partition: Partition, path: Path) -> None:
    """Refuses an encoding that differs from `features`, on the first rows of a partition and its file.

    Raises:
        PermanentError: an id differs, or a dense value by more than `TOLERANCE`.
    """
    rows = read_partition(partition, first_rows=COMPARED_ROWS)
    written = next(parquet_file(path).iter_batches(batch_size=rows.num_rows))
    wrong_ids, difference = 0, 0.0
    for name, expected in numpy_engine.encoder(features, scratch=path.parent)(rows).items():
        found = written.column(written.schema.get_field_index(name)).to_numpy()
        if name in features.features.id_names:
            wrong_ids += int(np.count_nonzero(found != expected))
        else:
            relative = np.abs(found - expected) / np.maximum(np.abs(expected), 1.0)
            difference = float(np.maximum(difference, relative.max()))  # not a number is a difference, too
    if wrong_ids or not difference <= TOLERANCE:
        raise PermanentError(
            f"{path.parent.name}/{path.name} and the feature workflow differ in {wrong_ids} ids and by {difference} in "
            f"dense values over {rows.num_rows} rows, expected none and at most {TOLERANCE}"
        )


def _describe_files(folder: Path, num_rows: list[int], features: Features, *, final: Path) -> None:
    """Writes what HugeCTR asks about the files of `folder`, which will lie at `final`."""
    names = sorted(path.name for path in folder.glob("*.parquet"))
    ids, dense = list(features.id_names), list(features.dense_inputs)
    places = {name: i for i, name in enumerate([LABEL, *dense, *ids])}
    document = {"file_stats": [{"file_name": name, "num_rows": rows} for name, rows in zip(names, num_rows)]}
    for kind, columns in {"cats": ids, "conts": dense, "labels": [LABEL]}.items():
        document[kind] = [{"col_name": name, "index": places[name]} for name in columns]
    write_whole(folder / METADATA, json.dumps(document))
    write_file_list(folder, names, final=final)
