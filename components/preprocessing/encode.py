"""The rows of a part encoded, proven to be what HugeCTR and the served graph expect, and put together in one folder.

NVTabular encodes and writes (`feature_graph`); each share of the rows may be another process's (`runtime.forked`).
What was written is read again before anybody else does: types and ranges by `hugectr_parquet`, and the first rows of
every file against `contracts.workflow`, from which alone the served graph is built. NVTabular writes beside its Parquet
files what HugeCTR and others ask about them (`_metadata.json`, `_file_list.txt`, `_metadata`, the schema); those of the
shares are merged into those of all rows.
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

from components.contracts.criteo import CATEGORICAL, DENSE, MISSING_CATEGORY
from components.contracts.hugectr_folder import write_file_list
from components.contracts.workflow import FeatureWorkflow
from components.preprocessing import feature_graph, hugectr_parquet
from components.preprocessing.raw_partitions import Partition, read_head
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
    encode = partial(_encode, workflow, features)
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


def _encode(workflow: Any, features: FeatureWorkflow, share: Share) -> int:
    """Writes a share and proves it; gives its number of rows."""
    feature_graph.write_encoded(workflow, share.partitions, share.folder, share.names)
    num_rows = 0
    for partition, name in zip(share.partitions, share.names):
        num_rows += hugectr_parquet.verify_file(share.folder / name, features.slot_sizes)
        compare(features, partition, share.folder / name)
    return num_rows


def compare(features: FeatureWorkflow, partition: Partition, path: Path) -> None:
    """Refuses an encoding by NVTabular that differs from `features`, on the first rows of a partition and its file.

    Raises:
        PermanentError: an id differs, or a dense value by more than `TOLERANCE`.
    """
    raw = read_head(partition, COMPARED_ROWS)
    written = next(pq.ParquetFile(path).iter_batches(batch_size=len(raw))).to_pandas()
    categories = raw[list(CATEGORICAL)].fillna(MISSING_CATEGORY).to_numpy().astype(np.int64)
    wrong_ids = np.count_nonzero(features.encode_categorical(categories) != written[list(CATEGORICAL)].to_numpy())
    dense = features.encode_dense(raw[list(DENSE)].to_numpy())
    difference = float((np.abs(dense - written[list(DENSE)].to_numpy()) / np.maximum(np.abs(dense), 1.0)).max())
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
    if len(parts) > 1:
        write_whole(folder / METADATA, json.dumps({**documents[0], "file_stats": stats}))
        _write_footers(folder, names)
    write_file_list(folder, names, final=final)  # NVTabular's own names the folder that it wrote to


def _write_footers(folder: Path, names: Sequence[str]) -> None:
    footers = [pq.read_metadata(folder / name) for name in names]
    for footer, name in zip(footers, names):
        footer.set_file_path(name)
    for footer in footers[1:]:
        footers[0].append_row_groups(footer)
    footers[0].write_metadata_file(str(folder / FOOTERS))
