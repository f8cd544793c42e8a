"""The rows of a part encoded, proven to be what HugeCTR and the served graph expect, and put together in one folder.

NVTabular encodes and writes (`feature_graph`); each share of the rows may be another process's (`runtime.forked`).
What was written is read again before anybody else does. HugeCTR checks neither types (the bits of an int32 label are
read as a float) nor ranges (an id at or above its slot's size lands in the next slot), so every file is checked here;
and the first rows of every file are compared with `contracts.workflow`, from which alone the served graph is built.
NVTabular writes beside its Parquet files what HugeCTR asks about them (`_metadata.json`, `_file_list.txt`); those of
the shares are merged into those of all rows.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from components.contracts.features import MISSING_CATEGORY, Features
from components.contracts.hugectr_folder import write_file_list
from components.contracts.raw_rows import LABEL, WEIGHT
from components.contracts.workflow import FeatureWorkflow
from components.preprocessing import feature_graph
from components.preprocessing.raw_partitions import Partition, read_partition
from components.runtime import forked
from components.runtime.durable import write_whole
from components.runtime.errors import PermanentError

COMPARED_ROWS = 1024
"""Of each file."""
TOLERANCE = 1e-6
"""Of dense values. On one machine they are equal bit by bit, which the tests hold."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Consecutive partitions of a part, and the folder that their rows are written to."""

    part: str
    folder: Path
    partitions: list[Partition]
    names: list[str]
    """Of the files, one per partition."""


def encode_parts(
    workflow: Any,
    features: FeatureWorkflow,
    plans: Mapping[str, list[Partition]],
    *,
    aside: Path,
    final: Path,
    processes: int,
) -> dict[str, int]:
    """Writes each part's folder into `aside`; gives each part's number of rows.

    Args:
        workflow: NVTabular's, which encodes.
        features: What it must compute.
        plans: Partitions of each part, in row order.
        aside: Where the folders are written.
        final: Where they will lie.
        processes: How many encode at a time; the result does not depend on it.

    Raises:
        ContractError: the raw rows are not what they should be.
        PermanentError: what was written is not what HugeCTR or the served graph expects.
        TemporaryError: a process was killed.
    """
    tasks = _tasks(plans, aside, processes)
    encode = partial(_encode_share, workflow, features)
    num_rows = forked.run_all(lambda shares: [encode(share) for share in shares], tasks, processes=processes)
    rows = dict.fromkeys(plans, 0)
    folders: dict[str, list[Path]] = {part: [] for part in plans}
    for share, number in zip(chain(*tasks), chain(*num_rows)):
        rows[share.part] += number
        folders[share.part].append(share.folder)
    for part, of_part in folders.items():
        _merge_shares(of_part, aside / part, final=final / part)
    return rows


def _tasks(plans: Mapping[str, list[Partition]], aside: Path, processes: int) -> list[list[Share]]:
    """What each process encodes: consecutive partitions of as many rows as the others', divided by part."""
    named = [
        (part, partition, f"part-{i:05d}.parquet") for part, plan in plans.items() for i, partition in enumerate(plan)
    ]
    tasks = forked.shares(named, processes, weight=lambda each: each[1].num_rows)
    return [
        [_share(aside / f".{part}.{k}", list(of_part)) for part, of_part in groupby(task, key=itemgetter(0))]
        for k, task in enumerate(tasks)
    ]


def _share(folder: Path, named: list[tuple[str, Partition, str]]) -> Share:
    parts, partitions, names = zip(*named)
    return Share(part=parts[0], folder=folder, partitions=list(partitions), names=list(names))


def _encode_share(workflow: Any, features: FeatureWorkflow, share: Share) -> int:
    """Writes a share and proves it; gives its number of rows."""
    feature_graph.write_encoded(workflow, share.partitions, folder=share.folder, names=share.names)
    num_rows = 0
    for partition, name in zip(share.partitions, share.names):
        path, weighted = share.folder / name, partition.weighted
        num_rows += verify_file(path, features.features, features.slot_sizes, weighted=weighted)
        compare(features, partition, share.folder / name)
    return num_rows


def verify_file(path: Path, columns: Features, slot_sizes: list[int], *, weighted: bool = False) -> int:
    """Proves that one file is in HugeCTR's form, but for a weight of `weighted` rows; gives its number of rows.

    Raises:
        PermanentError: a wrong column or type, a null, a value that is not finite, or an id outside its slot; padding
            (0) stands in places of lists alone.
    """
    file = pq.ParquetFile(path)
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
    """Refuses an encoding by NVTabular that differs from `features`, on the first rows of a partition and its file.

    Raises:
        PermanentError: an id differs, or a dense value by more than `TOLERANCE`.
    """
    raw = read_partition(partition, first_rows=COMPARED_ROWS)
    written = next(pq.ParquetFile(path).iter_batches(batch_size=len(raw))).to_pandas()
    columns = features.features
    numbers = raw[list(columns.numeric)].to_numpy().astype(np.float32)
    categories = raw[list(columns.place_names)].fillna(MISSING_CATEGORY).to_numpy().astype(np.int64)
    ids = features.encode_categorical(features.with_buckets(numbers, categories))
    wrong_ids = np.count_nonzero(ids != written[list(columns.id_names)].to_numpy())
    dense = features.encode_dense(numbers)
    by_nvtabular = written[list(columns.dense_inputs)].to_numpy().astype(np.float32)
    relative = np.abs(dense - by_nvtabular) / np.maximum(np.abs(dense), 1.0)
    difference = float(relative.max(initial=0.0))
    if wrong_ids or not difference <= TOLERANCE:  # not a number is a difference, too
        raise PermanentError(
            f"NVTabular and the feature workflow differ in {wrong_ids} ids and by {difference} in dense values "
            f"over {len(raw)} rows of {path.parent.name}/{path.name}, expected none and at most {TOLERANCE}"
        )


METADATA, FOOTERS = "_metadata.json", "_metadata"


def _merge_shares(parts: Sequence[Path], folder: Path, *, final: Path) -> None:
    """Moves the files of `parts`, folders of consecutive rows, into the new folder `folder`.

    Args:
        parts: At least one; file names differ between them. They are gone then.
        folder: Must not be there.
        final: Where the folder will lie, as the file list says it.
    """
    documents = [json.loads((part / METADATA).read_text()) for part in parts]
    stats = [stat for document in documents for stat in document["file_stats"]]
    names = [stat["file_name"] for stat in stats]
    os.rename(parts[0], folder)
    for part, document in zip(parts[1:], documents[1:]):
        for stat in document["file_stats"]:
            os.rename(part / stat["file_name"], folder / stat["file_name"])
        shutil.rmtree(part)
    write_whole(folder / METADATA, json.dumps({**documents[0], "file_stats": stats}))
    (folder / FOOTERS).unlink(missing_ok=True)  # of the first share's files alone, and nobody reads it
    write_file_list(folder, names, final=final)  # NVTabular's own names the folder that it wrote to
