"""A model's files: `weights.safetensors`, `optimizer.safetensors` and `network.onnx` in one folder.

Training writes these files. Evaluation, deployment and the next incremental run read these files.
The weights file has the embedding table of all slots as `embeddings`, and the dense parameters
under their `state_dict` names. If vectors have different widths, there is one table for each width,
such as `embeddings/8`. The optimizer file has Adam's two moments of each tensor as `<name>.exp_avg`
and `<name>.exp_avg_sq`, and the number of steps in its metadata. The row of an id in its table is
`offset[slot] + id`, where `offset` is the running sum of the sizes of the table's slots.

The weights file and the optimizer file are memory-mapped for reading and for writing. A table that
is larger than memory can therefore be copied in chunks, and no table is in memory twice. This
module writes the files itself, because the safetensors library can only write complete tensors. The
safetensors library checks each file when it is read. `network.export_onnx` creates `network.onnx`.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import FeaturePositions, PooledPositions
from evergreen.runtime.errors import ContractError, PermanentError

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
NETWORK_FILE = "network.onnx"
TABLE = "embeddings"
_MOMENTS = ("exp_avg", "exp_avg_sq")
ROWS_PER_CHUNK = 1 << 16
"""Number of rows that are copied at a time. For vectors of width 16, these rows have 4 MB."""
_HEADER_ALIGNMENT = 64

FloatArray = NDArray[np.float32]
Columns = NDArray[np.int64] | slice


@dataclass(frozen=True, eq=False)
class Tensors:
    """Tensors with one number per parameter of a model: the weights, or one of Adam's moments."""

    tables: tuple[FloatArray, ...]
    """Embedding tables, one for each width of vectors, in ascending order of width. A table has the
    shape [sum of its slots' sizes, width]."""
    dense: dict[str, FloatArray]
    """Dense parameters by `state_dict` name."""

    @property
    def table(self) -> FloatArray:
        """Return the only table. All vectors of the model must have the same width."""
        (table,) = self.tables
        return table

    def slots(self, slot_sizes: Sequence[int], tables: "Sequence[Table]") -> list[FloatArray]:
        """Return the vectors of each slot, [size, width], without copying them from the tables.

        Args:
            slot_sizes: Number of ids of each slot.
            tables: Layout of the tables.

        Raises:
            ContractError: the number of rows of a table is not the number of ids.
        """
        require_rows(self.tables, tables, slot_sizes)
        found: dict[int, FloatArray] = {}
        for values, table in zip(self.tables, tables):
            sizes = table.sizes(slot_sizes)
            parts = zip(table.slots, slot_offsets(sizes).tolist(), sizes)
            found |= {slot: values[offset : offset + size] for slot, offset, size in parts}
        return [found[slot] for slot in sorted(found)]


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredModel:
    """Contents of a model's folder, mapped from its files."""

    weights: Tensors
    moments: tuple[Tensors, Tensors] | None
    """Adam's two moments, or None if no optimizer state was saved."""
    step: int
    """Number of optimizer steps taken over all runs. `step` is 0 if there is no optimizer state."""

    @property
    def parts(self) -> tuple[Tensors, ...]:
        """The weights, followed by the moments if they were saved."""
        return (self.weights, *(self.moments or ()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the weights file, tables first."""
        tables = table_shapes([each.shape for each in self.weights.tables])
        return {**tables, **{name: each.shape for name, each in self.weights.dense.items()}}


def open_model(folder: Path, slot_sizes: Sequence[int]) -> StoredModel:
    """Return the model in `folder`, after checking that its files are complete and belong together.

    The arrays are mapped privately, so writing to them changes no file.

    Args:
        folder: Folder of the model.
        slot_sizes: Number of ids of each slot.

    Raises:
        ContractError: a file is absent or corrupt, the tables do not have one row for each id, or
            the optimizer file does not have the tensors of the weights file.
    """
    tensors, _ = _open_tensors(folder / WEIGHTS_FILE)
    shapes = {name: each.shape for name, each in tensors.items() if _is_table(name)}
    if not shapes:
        raise ContractError(f"model file {folder / WEIGHTS_FILE} has no tensor {TABLE!r}")
    if any(len(each) != 2 for each in shapes.values()) or sum(
        each[0] for each in shapes.values()
    ) != sum(slot_sizes):
        found = ", ".join(map(str, shapes.values()))
        raise ContractError(
            f"table of {folder / WEIGHTS_FILE} has shape {found}, expected {sum(slot_sizes)} rows"
        )
    path = folder / OPTIMIZER_FILE
    if not path.exists():
        return StoredModel(weights=_split(tensors), moments=None, step=0)
    state, metadata = _open_tensors(path)
    expected = {
        f"{name}.{moment}": each.shape for name, each in tensors.items() for moment in _MOMENTS
    }
    if wrong := {name: each.shape for name, each in state.items()}.items() ^ expected.items():
        raise ContractError(
            f"model file {path} does not have the tensors of its weights file: {sorted(wrong)[:4]}"
        )
    first, second = (
        _split({name: state[f"{name}.{moment}"] for name in tensors}) for moment in _MOMENTS
    )
    if not metadata.get("step", "").isdigit():
        raise ContractError(
            f"model file {path} has step {metadata.get('step')!r}, expected a whole number"
        )
    return StoredModel(weights=_split(tensors), moments=(first, second), step=int(metadata["step"]))


@contextmanager
def new_model(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], *, step: int = 0, with_moments: bool = True
) -> Iterator[StoredModel]:
    """Yield a new model of zeros, whose memory-mapped arrays the caller fills.

    The files are complete when the `with` block ends. Call this inside `durable.whole_directory` to
    publish the folder atomically and flush it to disk.

    Args:
        folder: Folder to write, created if it is absent.
        shapes: Shape of each tensor, including the `table_shapes`.
        step: Number of optimizer steps taken.
        with_moments: Whether to write an optimizer file.

    Raises:
        PermanentError: the disk has too little free space.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = _create_tensors(folder / WEIGHTS_FILE, shapes, {})
    if not with_moments:
        yield StoredModel(weights=_split(weights), moments=None, step=0)
        return
    of_state = {f"{name}.{moment}": shape for moment in _MOMENTS for name, shape in shapes.items()}
    state = _create_tensors(folder / OPTIMIZER_FILE, of_state, {"step": str(step)})
    first, second = (
        _split({name: state[f"{name}.{moment}"] for name in shapes}) for moment in _MOMENTS
    )
    yield StoredModel(weights=_split(weights), moments=(first, second), step=step)


def add_to_bias(folder: Path, amount: float) -> None:
    """Add `amount` to the logit's bias in the weights of `folder`.

    The sum is computed in float64. A later run subtracts `amount` again. After both runs, the bias
    differs from its first value only by two roundings to float32.

    Raises:
        ContractError: the weights file is absent or corrupt.
    """
    tensors, _ = _open_tensors(folder / WEIGHTS_FILE, mode="r+")
    tensors["bias"][:] = tensors["bias"].astype(np.float64) + amount


def chunks(start: int, stop: int) -> Iterator[slice]:
    """Yield slices of at most `ROWS_PER_CHUNK` rows that cover `start` to `stop`."""
    for at in range(start, stop, ROWS_PER_CHUNK):
        yield slice(at, min(at + ROWS_PER_CHUNK, stop))


def slot_offsets(slot_sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return the table row of each slot's first id.

    The number of this row is the sum of the sizes of all earlier slots.

    >>> slot_offsets([3, 5, 2])
    array([0, 3, 8])
    """
    return np.cumsum([0, *slot_sizes])[:-1]


def table_shapes(shapes: Sequence[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tables by the names of their tensors. All widths must differ.

    >>> table_shapes([(12, 4)]), table_shapes([(9, 4), (3, 8)])
    ({'embeddings': (12, 4)}, {'embeddings/4': (9, 4), 'embeddings/8': (3, 8)})
    """
    return {TABLE if len(shapes) == 1 else f"{TABLE}/{each[1]}": tuple(each) for each in shapes}


class Table(NamedTuple):
    """Layout of one table: the slots it contains, and the id columns whose vectors it provides."""

    slots: tuple[int, ...]
    """Slots whose vectors are in the table, in row order."""
    columns: tuple[int, ...]
    """Id columns whose vectors come from this table."""
    positions: FeaturePositions
    """Slot of each of the `columns`, and which columns form a list. A slot is given by its position
    in `slots`."""
    vectors: tuple[int, ...]
    """Positions of this table's vectors among all vectors of a row."""

    def sizes(self, slot_sizes: Sequence[int]) -> list[int]:
        """Return the number of ids of each slot in this table."""
        return [slot_sizes[slot] for slot in self.slots]

    def offsets(self, slot_sizes: Sequence[int]) -> NDArray[np.int64]:
        """Return, for each id column, the first table row of its slot."""
        return slot_offsets(self.sizes(slot_sizes))[list(self.positions.slots)]


def one_id_per_slot(slot_sizes: Sequence[int]) -> FeaturePositions:
    """Return the layout of a row that has exactly one id for every slot."""
    return FeaturePositions(tuple(range(len(slot_sizes))), ())


def spans_of(positions: FeaturePositions) -> list[tuple[int, int, str | None]]:
    """Return the start and the end position of each vector of a row, and how the vector is pooled.

    If a vector comes from a single position, its pooling is None.

    >>> spans_of(FeaturePositions(slots=(0, 1, 1), lists=(PooledPositions(1, 3, "sum"),)))
    [(0, 1, None), PooledPositions(start=1, stop=3, pool='sum')]
    """
    lists_at = {each.start: each for each in positions.lists}
    spans: list[tuple[int, int, str | None]] = []
    while (start := spans[-1][1] if spans else 0) < len(positions.slots):
        spans.append(lists_at.get(start, (start, start + 1, None)))
    return spans


def tables_of(positions: FeaturePositions, widths: Sequence[int] = ()) -> tuple[Table, ...]:
    """Return the layout of the tables, ascending by width.

    Args:
        positions: Slots that a row looks up, and the lists of the row.
        widths: Width of each of the row's vectors. An empty sequence means that all vectors have
            the same width.

    >>> # A user, an item, and a list of the last two items.
    >>> positions = FeaturePositions(slots=(0, 1, 1, 1), lists=(PooledPositions(2, 4, "sum"),))
    >>> for table in tables_of(positions, [8, 4, 4]):
    ...     print(table.slots, table.columns, table.positions.slots, table.vectors)
    (1,) (1, 2, 3) (0, 0, 0) (1, 2)
    (0,) (0,) (0,) (0,)
    """
    spans = spans_of(positions)
    widths = widths or [0] * len(spans)
    tables = []
    for width in sorted(set(widths)) or [0]:
        vectors = tuple(i for i, each in enumerate(widths) if each == width)
        columns = tuple(position for i in vectors for position in range(*spans[i][:2]))
        slots = tuple(sorted({positions.slots[position] for position in columns}))
        lists, at = [], 0
        for start, stop, pool in (spans[i] for i in vectors):
            if pool is not None:
                lists.append(PooledPositions(at, at + stop - start, pool))
            at += stop - start
        own = FeaturePositions(
            tuple(slots.index(positions.slots[position]) for position in columns), tuple(lists)
        )
        tables.append(Table(slots, columns, own, vectors))
    return tuple(tables)


def num_rows(tables: Sequence[Table], slot_sizes: Sequence[int]) -> list[int]:
    """Return the number of rows of each table."""
    return [sum(table.sizes(slot_sizes)) for table in tables]


def require_rows(
    values: Sequence[Sized], tables: Sequence[Table], slot_sizes: Sequence[int]
) -> None:
    """Check that `values` has the number of rows that `tables` describes.

    Args:
        values: Table contents.
        tables: Layout of the tables.
        slot_sizes: Number of ids of each slot.

    Raises:
        ContractError: the numbers of rows differ.
    """
    if (found := [len(each) for each in values]) != (expected := num_rows(tables, slot_sizes)):
        numbers = (" and ".join(map(str, each)) for each in (found, expected))
        raise ContractError(
            "embeddings have {} rows, expected {} from the vocabularies".format(*numbers)
        )


def columns_of(tables: Sequence[Table]) -> list[Columns]:
    """Return one index per table, which selects the id columns of that table.

    The index of a single table is a slice, which selects columns without a copy.
    """
    return [slice(None)] if len(tables) == 1 else [np.array(table.columns) for table in tables]


def _is_table(name: str) -> bool:
    return name.partition("/")[0] == TABLE


def _split(tensors: dict[str, FloatArray]) -> Tensors:
    tables = sorted(
        (each for name, each in tensors.items() if _is_table(name)), key=lambda each: each.shape[1]
    )
    return Tensors(
        tuple(tables), {name: each for name, each in tensors.items() if not _is_table(name)}
    )


def _open_tensors(
    path: Path, mode: Literal["c", "r+"] = "c"
) -> tuple[dict[str, FloatArray], dict[str, str]]:
    """Map the file's tensors and read its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "numpy") as checked:
            metadata = checked.metadata() or {}
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
    except (OSError, SafetensorError) as error:
        raise ContractError(f"model file {path} cannot be read: {error}") from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] != "F32":
            raise ContractError(
                f"tensor {name} of {path} is of type {entry['dtype']}, expected F32"
            )
    return _mapped(path, header, 8 + header_bytes, mode=mode), metadata


def _create_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: dict[str, str]
) -> dict[str, FloatArray]:
    """Create a file of zeros and map it.

    All disk space is allocated here, because a write to a mapped page without space would kill the
    process.
    """
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": metadata, **header} if metadata else header).encode()
    text += b" " * (-(8 + len(text)) % _HEADER_ALIGNMENT)
    start = 8 + len(text)
    try:
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, start + end)
    except OSError as error:
        raise PermanentError(
            f"model file {path} cannot be allocated with {start + end} bytes: {error.strerror}"
        ) from error
    return _mapped(path, header, start, mode="r+")


def _mapped(
    path: Path, header: Mapping[str, Any], start: int, *, mode: Literal["c", "r+"]
) -> dict[str, FloatArray]:
    """Map the tensors that a file's header describes. The tensor data begins at byte `start`.

    The file is memory-mapped only once.
    """
    whole = np.memmap(path, np.uint8, mode).view(np.ndarray)[start:]
    found: dict[str, FloatArray] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = whole[begin:end].view("<f4").reshape(entry["shape"])
    return found
