"""Write rows as Parquet folders for HugeCTR.

One folder is written while HugeCTR reads the previous folder.

HugeCTR reads files, not arrays. HugeCTR has one worker for each GPU. Each worker reads its own file
and cuts the file into batches. The workers take turns. Therefore each file has complete batches,
and batch b is in file b modulo the number of files. The batches are then read in the given order.
HugeCTR checks neither types nor ranges, but `rows` has already checked these rows. A slot has one
column, which contains either one key or a list of keys for each row. The names of columns are
numbers.
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

_METADATA = "_metadata.json"
_ROW_GROUP = 65_536
"""Maximum rows of a row group, which HugeCTR decodes as a whole on the GPU."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One folder of staged rows."""

    file_list: Path
    num_batches: int
    group_rows: int
    """Rows of the largest row group."""
    num_files: int

    def has_room_for(self, other: "Stage") -> bool:
        """Return whether the readers of this stage can also read the other stage.

        The other stage must not need more files or larger row groups than this stage.
        """
        return other.group_rows <= self.group_rows and other.num_files <= self.num_files


def full_batches(order: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """Return `order`, with rows from its start appended to complete the last batch.

    HugeCTR trains only on complete batches. At most one batch of rows is used twice. Dropping the
    incomplete batch would leave out the last rows of the pass.

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
    num_zeros: int = 0,
) -> Iterator[Stage]:
    """Write the rows in stages and yield each stage while the next stage is written.

    Args:
        rows: All rows.
        order: Row numbers of complete batches.
        embeddings: Layout of the embeddings.
        batch_size: Rows of a batch.
        num_files: Files of a stage, one for each GPU.
        stage_rows: Approximate rows of a stage.
        folder: Parent folder of the stages.
        num_zeros: Number of dense columns to append. Appended columns contain zeros.

    Raises:
        PermanentError: the disk is full or fails.
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
            num_zeros=num_zeros,
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
    group_rows: int = _ROW_GROUP,
    num_zeros: int = 0,
) -> Stage:
    """Write one folder with `_file_list.txt` and `_metadata.json`.

    Args:
        rows: All rows.
        order: Row numbers of complete batches.
        embeddings: Layout of the embeddings.
        batch_size: Rows of a batch.
        num_files: Number of files, one for each GPU. There are fewer files if there are fewer
            batches.
        folder: Folder to create.
        group_rows: Maximum rows of a row group.
        num_zeros: Number of dense columns to append. Appended columns contain zeros.

    Raises:
        PermanentError: the disk is full or fails.
    """
    assert len(order) % batch_size == 0, "stages hold whole batches"
    batches = order.reshape(-1, batch_size)
    num_files = min(num_files, len(batches))
    names = [f"{number:03d}.parquet" for number in range(num_files)]
    slots = [slot for each in embeddings for slot in each.slots]
    num_dense = rows.dense.shape[1] + num_zeros
    try:
        folder.mkdir(parents=True)
        for number, name in enumerate(names):
            of_file = batches[number::num_files].reshape(-1)
            _write_file(
                folder / name,
                rows,
                order=of_file,
                slots=slots,
                group_rows=group_rows,
                num_dense=num_dense,
            )
        counts = [batch_size * len(batches[number::num_files]) for number in range(num_files)]
        write_whole(
            folder / _METADATA,
            json.dumps(_metadata(num_dense, slots, dict(zip(names, counts)))) + "\n",
        )
        write_file_list(folder, names, final=folder.absolute())
    except (OSError, pa.ArrowException) as error:
        raise PermanentError(f"rows for HugeCTR cannot be written to {folder}: {error}") from error
    return Stage(
        file_list=folder.absolute() / FILE_LIST,
        num_batches=len(batches),
        group_rows=min(group_rows, max(counts)),
        num_files=num_files,
    )


def _write_file(
    path: Path,
    rows: Rows,
    *,
    order: NDArray[np.int64],
    slots: Sequence[Slot],
    group_rows: int,
    num_dense: int,
) -> None:
    numeric, keys = _names(num_dense, slots)
    a_list = pa.list_(pa.field("element", pa.int64(), nullable=False))
    types = [pa.float32()] * (1 + len(numeric)) + [
        a_list if slot.is_list else pa.int64() for slot in slots
    ]
    fields = [
        pa.field(name, kind, nullable=False) for name, kind in zip((LABEL, *numeric, *keys), types)
    ]
    schema = pa.schema(fields)
    # The file is read only once, on this machine, so encoding and compression would cost time
    # without a benefit.
    with pq.ParquetWriter(
        path, schema, use_dictionary=False, compression="none", write_statistics=False
    ) as writer:
        for at in range(0, len(order), group_rows):
            group = order[at : at + group_rows]
            floats = [
                np.ascontiguousarray(each) for each in (rows.labels[group], *rows.dense[group].T)
            ]
            floats += [np.zeros(len(group), np.float32)] * (1 + num_dense - len(floats))
            ids = rows.ids[group]
            arrays = [
                *(pa.array(each, pa.float32()) for each in floats),
                *(_keys(ids, slot) for slot in slots),
            ]
            arrays = [array.cast(kind) for array, kind in zip(arrays, types)]
            writer.write_table(pa.table(arrays, schema=schema), row_group_size=group_rows)


def _keys(ids: NDArray[np.int32], slot: Slot) -> Any:
    """Return the keys of a slot as an Arrow array: one for each row, or a list without padding."""
    of_slot = ids[:, list(slot.columns)]
    keys = of_slot.astype(np.int64) + slot.first_key
    if not slot.is_list:
        return pa.array(keys[:, 0])
    in_use = of_slot != PADDING_ID
    offsets = np.concatenate([[0], np.cumsum(in_use.sum(axis=1))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(keys[in_use]))


def _names(num_dense: int, slots: Sequence[Slot]) -> tuple[list[str], list[str]]:
    """Return the names of the dense columns and of the key columns."""
    return [f"dense_{i}" for i in range(num_dense)], [f"keys_{i}" for i in range(len(slots))]


def _metadata(num_dense: int, slots: Sequence[Slot], counts: dict[str, int]) -> dict[str, object]:
    """Return HugeCTR's metadata of files with these numbers of rows.

    HugeCTR assigns columns to slots by position, over all embeddings.
    """
    numeric, keys = _names(num_dense, slots)
    positions = {name: i for i, name in enumerate((LABEL, *numeric, *keys))}

    def columns(wanted: list[str]) -> list[dict[str, object]]:
        return [{"col_name": name, "index": positions[name]} for name in wanted]

    return {
        "file_stats": [{"file_name": name, "num_rows": count} for name, count in counts.items()],
        "cats": columns(keys),
        "conts": columns(numeric),
        "labels": columns([LABEL]),
    }
