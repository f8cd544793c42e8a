"""Rows written as the Parquet folders that HugeCTR reads, one while the one before is trained.

HugeCTR reads files, not arrays. Each of its workers, one per GPU, has a file of its own and cuts batches inside it;
they are taken in turns. So each file holds whole batches and batch b goes to file b modulo their number: the batches
come out in the order given. HugeCTR checks neither types nor ranges; rows that reach this point were checked by `rows`.
A slot has a column of keys, one a row, or of lists of keys; columns are named by numbers here.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.training.hugectr.embeddings import Embedding, Slot
from components.training.rows import Rows
from evergreen.contracts.hugectr_folder import FILE_LIST, write_file_list
from evergreen.contracts.raw_rows import LABEL
from evergreen.contracts.workflow import PADDING_ID
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import PermanentError

METADATA = "_metadata.json"
ROW_GROUP = 65_536
"""Most rows per row group, which HugeCTR decodes as a whole on the GPU."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One folder of staged rows."""

    file_list: Path
    num_batches: int
    group_rows: int
    """Rows of its largest row group."""
    num_files: int

    def has_room_for(self, other: "Stage") -> bool:
        """Whether readers that were made for this stage read the other: with as many workers, and buffers as large."""
        return other.group_rows <= self.group_rows and other.num_files <= self.num_files


def full_batches(order: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """`order`, its last batch filled up with rows from its beginning.

    HugeCTR learns whole batches only. Filling up learns at most one batch's rows twice; leaving the rest out would not
    learn the pass's last rows at all.

    >>> full_batches(np.arange(5), 3).tolist(), full_batches(np.arange(2), 5).tolist()
    ([0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 0])
    """
    return np.resize(order, -(-len(order) // batch_size) * batch_size)


def staged(
    rows: Rows,
    order: NDArray[np.int64],
    *,
    embeddings: Sequence[Embedding],
    batch_size: int,
    num_files: int,
    stage_rows: int,
    folder: Path,
) -> Iterator[Stage]:
    """Writes the rows `order`, whole batches, in stages below `folder`; each next one while the caller uses its own.

    Raises:
        PermanentError: the disk refuses.
    """
    per_stage = max(1, stage_rows // batch_size) * batch_size
    parts = [order[at : at + per_stage] for at in range(0, len(order), per_stage)]

    def write(number: int) -> Stage:
        return write_stage(
            rows,
            parts[number],
            embeddings=embeddings,
            batch_size=batch_size,
            num_files=num_files,
            folder=folder / f"{number:06d}",
        )

    with ThreadPoolExecutor(1, thread_name_prefix="stage") as writer:
        ready = writer.submit(write, 0)
        for number in range(len(parts)):
            stage = ready.result()
            if number + 1 < len(parts):
                ready = writer.submit(write, number + 1)
            yield stage


def write_stage(
    rows: Rows,
    order: NDArray[np.int64],
    *,
    embeddings: Sequence[Embedding],
    batch_size: int,
    num_files: int,
    folder: Path,
    group_rows: int = ROW_GROUP,
) -> Stage:
    """Writes one folder with `_file_list.txt` and `_metadata.json`.

    `order` makes whole batches, which go to `num_files` files, one per GPU; fewer where there are fewer batches.

    Raises:
        PermanentError: the disk refuses.
    """
    assert len(order) % batch_size == 0, "stages hold whole batches"
    batches = order.reshape(-1, batch_size)
    num_files = min(num_files, len(batches))
    names = [f"{number:03d}.parquet" for number in range(num_files)]
    slots = [slot for each in embeddings for slot in each.slots]
    try:
        folder.mkdir(parents=True)
        for number, name in enumerate(names):
            of_file = batches[number::num_files].reshape(-1)
            _write_file(folder / name, rows, order=of_file, slots=slots, group_rows=group_rows)
        counts = [batch_size * len(batches[number::num_files]) for number in range(num_files)]
        write_whole(folder / METADATA, json.dumps(_metadata(rows, slots, dict(zip(names, counts)))) + "\n")
        write_file_list(folder, names, final=folder.absolute())
    except (OSError, pa.ArrowException) as error:
        raise PermanentError(f"rows for HugeCTR cannot be written to {folder}: {error}") from error
    return Stage(
        file_list=folder.absolute() / FILE_LIST,
        num_batches=len(batches),
        group_rows=min(group_rows, max(counts)),
        num_files=num_files,
    )


def _write_file(path: Path, rows: Rows, *, order: NDArray[np.int64], slots: Sequence[Slot], group_rows: int) -> None:
    numeric, keys = _names(rows, slots)
    a_list = pa.list_(pa.field("element", pa.int64(), nullable=False))
    types = [pa.float32()] * (1 + len(numeric)) + [a_list if slot.is_list else pa.int64() for slot in slots]
    fields = [pa.field(name, kind, nullable=False) for name, kind in zip((LABEL, *numeric, *keys), types)]
    schema = pa.schema(fields)
    # Written to be read once, on this machine: encoding and compression would only cost time.
    with pq.ParquetWriter(path, schema, use_dictionary=False, compression="none", write_statistics=False) as writer:
        for at in range(0, len(order), group_rows):
            group = order[at : at + group_rows]
            floats = [np.ascontiguousarray(each) for each in (rows.labels[group], *rows.dense[group].T)]
            ids = rows.ids[group]
            arrays = [*(pa.array(each, pa.float32()) for each in floats), *(_keys(ids, slot) for slot in slots)]
            arrays = [array.cast(kind) for array, kind in zip(arrays, types)]
            writer.write_table(pa.table(arrays, schema=schema), row_group_size=group_rows)


def _keys(ids: NDArray[np.int32], slot: Slot) -> Any:
    """The keys by which rows look a slot up, as an Arrow array: one each, or in a list those of the places in use."""
    of_slot = ids[:, list(slot.columns)]
    keys = of_slot.astype(np.int64) + slot.first_key
    if not slot.is_list:
        return pa.array(keys[:, 0])
    in_use = of_slot != PADDING_ID
    offsets = np.concatenate([[0], np.cumsum(in_use.sum(axis=1))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(keys[in_use]))


def _names(rows: Rows, slots: Sequence[Slot]) -> tuple[list[str], list[str]]:
    """Of the dense columns and of those with keys."""
    return [f"dense_{i}" for i in range(rows.dense.shape[1])], [f"keys_{i}" for i in range(len(slots))]


def _metadata(rows: Rows, slots: Sequence[Slot], counts: dict[str, int]) -> dict[str, object]:
    """Of files with these numbers of rows. HugeCTR gives slots their columns by position, through all embeddings."""
    numeric, keys = _names(rows, slots)
    places = {name: i for i, name in enumerate((LABEL, *numeric, *keys))}

    def columns(wanted: list[str]) -> list[dict[str, object]]:
        return [{"col_name": name, "index": places[name]} for name in wanted]

    return {
        "file_stats": [{"file_name": name, "num_rows": count} for name, count in counts.items()],
        "cats": columns(keys),
        "conts": columns(numeric),
        "labels": columns([LABEL]),
    }
