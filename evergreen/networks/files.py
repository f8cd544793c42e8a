"""A model's files: `weights.safetensors`, `optimizer.safetensors` and `network.onnx`, in one folder.

Joins training, which writes them, to evaluation, deployment and the next incremental round, which read them. The
weights file holds the embedding table of all slots as `embeddings` and the dense parameters under their `state_dict`
names; where slots have vectors of different widths, there is a table of each width, such as `embeddings/8`. The
optimizer file holds Adam's two moments of each tensor as `<name>.exp_avg` and `<name>.exp_avg_sq`, and the number of
steps in its metadata. A table's rows are `offset[slot] + id`, `offset` the running sum of its slots' sizes.

Both files are mapped, for reading and for writing: a table that is larger than the memory can be copied piece by piece,
and no table is held twice. They are written here and not by the library, which takes whole tensors only; the library
checks what is read. `network.onnx` is `network.export_onnx`'s.
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

from evergreen.config.features import Places, PooledPlaces
from evergreen.runtime.errors import ContractError, PermanentError

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
NETWORK_FILE = "network.onnx"
TABLE = "embeddings"
MOMENTS = ("exp_avg", "exp_avg_sq")
ROWS_PER_CHUNK = 1 << 16
"""Rows that are copied at a time: 4 MB of vectors of width 16."""
_HEADER_ALIGNMENT = 64

FloatArray = NDArray[np.float32]
Columns = NDArray[np.int64] | slice


@dataclass(frozen=True, eq=False)
class Tensors:
    """One number for each parameter of a model: its weights, or one of Adam's moments."""

    tables: tuple[FloatArray, ...]
    """One for each width of vectors, ascending; [sum of its slots' sizes, width]."""
    dense: dict[str, FloatArray]
    """By `state_dict` name."""

    @property
    def table(self) -> FloatArray:
        """The only table, where all vectors have one width."""
        (table,) = self.tables
        return table

    def slots(self, slot_sizes: Sequence[int], tables: "Sequence[Table]") -> list[FloatArray]:
        """The vectors of each slot [size, width], as parts of the tables.

        Raises:
            ContractError: the tables have other numbers of rows.
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
    """The contents of a folder, mapped from its files."""

    weights: Tensors
    moments: tuple[Tensors, Tensors] | None
    """Adam's m and v; None where no optimizer state was kept."""
    step: int
    """Optimizer steps taken, over all rounds; 0 without optimizer state."""

    @property
    def parts(self) -> tuple[Tensors, ...]:
        """Weights, then moments where they were kept."""
        return (self.weights, *(self.moments or ()))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the weights file, those of the tables first."""
        tables = table_shapes([each.shape for each in self.weights.tables])
        return {**tables, **{name: each.shape for name, each in self.weights.dense.items()}}


def open_model(folder: Path, slot_sizes: Sequence[int]) -> StoredModel:
    """The model in `folder`, after checking that its files are whole and belong together.

    The arrays are mapped privately: writing to them changes no file.

    Raises:
        ContractError: a file is absent or damaged, the table has not one row per id, or the optimizer's tensors are not
            the weights'.
    """
    tensors, _ = _open_tensors(folder / WEIGHTS_FILE)
    shapes = {name: each.shape for name, each in tensors.items() if _is_table(name)}
    if not shapes:
        raise ContractError(f"model file {folder / WEIGHTS_FILE} has no tensor {TABLE!r}")
    if any(len(each) != 2 for each in shapes.values()) or sum(each[0] for each in shapes.values()) != sum(slot_sizes):
        found = ", ".join(map(str, shapes.values()))
        raise ContractError(f"table of {folder / WEIGHTS_FILE} has shape {found}, expected {sum(slot_sizes)} rows")
    path = folder / OPTIMIZER_FILE
    if not path.exists():
        return StoredModel(weights=_split(tensors), moments=None, step=0)
    state, metadata = _open_tensors(path)
    expected = {f"{name}.{moment}": each.shape for name, each in tensors.items() for moment in MOMENTS}
    if wrong := {name: each.shape for name, each in state.items()}.items() ^ expected.items():
        raise ContractError(f"model file {path} has other tensors than its weights: {sorted(wrong)[:4]}")
    first, second = (_split({name: state[f"{name}.{moment}"] for name in tensors}) for moment in MOMENTS)
    if not metadata.get("step", "").isdigit():
        raise ContractError(f"model file {path} has step {metadata.get('step')!r}, expected a whole number")
    return StoredModel(weights=_split(tensors), moments=(first, second), step=int(metadata["step"]))


@contextmanager
def new_model(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], *, step: int = 0, with_moments: bool = True
) -> Iterator[StoredModel]:
    """Yields a model of zeros whose mapped arrays the caller fills; the files are complete after the body.

    A folder that must not be seen half is written inside `durable.whole_directory`, which also flushes it to disk.

    `shapes` has the shape of each tensor, among them the `table_shapes`. An absent folder is created.

    Raises:
        PermanentError: the disk has no room for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = _create_tensors(folder / WEIGHTS_FILE, shapes, {})
    if not with_moments:
        yield StoredModel(weights=_split(weights), moments=None, step=0)
        return
    of_state = {f"{name}.{moment}": shape for moment in MOMENTS for name, shape in shapes.items()}
    state = _create_tensors(folder / OPTIMIZER_FILE, of_state, {"step": str(step)})
    first, second = (_split({name: state[f"{name}.{moment}"] for name in shapes}) for moment in MOMENTS)
    yield StoredModel(weights=_split(weights), moments=(first, second), step=step)


def add_to_bias(folder: Path, amount: float) -> None:
    """Adds `amount` to the logit's bias in the weights of `folder`.

    In float64: what a round adds a later one takes off, so that only the two roundings to float32 are left.

    Raises:
        ContractError: the weights file is absent or damaged.
    """
    tensors, _ = _open_tensors(folder / WEIGHTS_FILE, mode="r+")
    tensors["bias"][:] = tensors["bias"].astype(np.float64) + amount


def chunks(start: int, stop: int) -> Iterator[slice]:
    """Slices of at most `ROWS_PER_CHUNK` rows that cover `start` to `stop`."""
    for at in range(start, stop, ROWS_PER_CHUNK):
        yield slice(at, min(at + ROWS_PER_CHUNK, stop))


def slot_offsets(slot_sizes: Sequence[int]) -> NDArray[np.int64]:
    """The table's row of each slot's id 0: the sizes before it, summed.

    >>> slot_offsets([3, 5, 2])
    array([0, 3, 8])
    """
    return np.cumsum([0, *slot_sizes])[:-1]


def table_shapes(shapes: Sequence[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tables' shapes, which have different widths, by the names of their tensors.

    >>> table_shapes([(12, 4)]), table_shapes([(9, 4), (3, 8)])
    ({'embeddings': (12, 4)}, {'embeddings/4': (9, 4), 'embeddings/8': (3, 8)})
    """
    return {TABLE if len(shapes) == 1 else f"{TABLE}/{each[1]}": tuple(each) for each in shapes}


class Table(NamedTuple):
    """What lies in one table, the vectors of one width, and who looks them up."""

    slots: tuple[int, ...]
    """The slots whose vectors it holds, one after another."""
    columns: tuple[int, ...]
    """The columns of ids that look up here."""
    places: Places
    """These columns' places alone; their slots are positions in `slots`."""
    vectors: tuple[int, ...]
    """Which of a row's vectors they become."""

    def sizes(self, slot_sizes: Sequence[int]) -> list[int]:
        """Of `slots`, from the sizes of all."""
        return [slot_sizes[slot] for slot in self.slots]

    def offsets(self, slot_sizes: Sequence[int]) -> NDArray[np.int64]:
        """The table's row of id 0 of the slot of each of `columns`."""
        return slot_offsets(self.sizes(slot_sizes))[list(self.places.slots)]


def one_each(slot_sizes: Sequence[int]) -> Places:
    """The places of rows that look every slot up once."""
    return Places(tuple(range(len(slot_sizes))), ())


def spans_of(places: Places) -> list[tuple[int, int, str | None]]:
    """First place, end and pooling of each of a row's vectors; one that is looked up once has no pooling.

    >>> spans_of(Places(slots=(0, 1, 1), lists=(PooledPlaces(1, 3, "sum"),)))
    [(0, 1, None), PooledPlaces(start=1, stop=3, pool='sum')]
    """
    lists_at = {each.start: each for each in places.lists}
    spans: list[tuple[int, int, str | None]] = []
    while (start := spans[-1][1] if spans else 0) < len(places.slots):
        spans.append(lists_at.get(start, (start, start + 1, None)))
    return spans


def tables_of(places: Places, widths: Sequence[int] = ()) -> tuple[Table, ...]:
    """The tables by width, ascending; `widths` are those of a row's vectors, without them there is one table.

    >>> places = Places(slots=(0, 1, 1, 1), lists=(PooledPlaces(2, 4, "sum"),))  # user, item, the last two items
    >>> for table in tables_of(places, [8, 4, 4]):
    ...     print(table.slots, table.columns, table.places.slots, table.vectors)
    (1,) (1, 2, 3) (0, 0, 0) (1, 2)
    (0,) (0,) (0,) (0,)
    """
    spans = spans_of(places)
    widths = widths or [0] * len(spans)
    tables = []
    for width in sorted(set(widths)) or [0]:
        vectors = tuple(i for i, each in enumerate(widths) if each == width)
        columns = tuple(place for i in vectors for place in range(*spans[i][:2]))
        slots = tuple(sorted({places.slots[place] for place in columns}))
        lists, at = [], 0
        for start, stop, pool in (spans[i] for i in vectors):
            if pool is not None:
                lists.append(PooledPlaces(at, at + stop - start, pool))
            at += stop - start
        own = Places(tuple(slots.index(places.slots[place]) for place in columns), tuple(lists))
        tables.append(Table(slots, columns, own, vectors))
    return tuple(tables)


def num_rows(tables: Sequence[Table], slot_sizes: Sequence[int]) -> list[int]:
    """Rows of each table."""
    return [sum(table.sizes(slot_sizes)) for table in tables]


def require_rows(values: Sequence[Sized], tables: Sequence[Table], slot_sizes: Sequence[int]) -> None:
    """Returns if the `values` have the tables' numbers of rows.

    Raises:
        ContractError: they have others.
    """
    if (found := [len(each) for each in values]) != (expected := num_rows(tables, slot_sizes)):
        said = (" and ".join(map(str, each)) for each in (found, expected))
        raise ContractError("embeddings have {} rows, expected {} from the vocabularies".format(*said))


def columns_of(tables: Sequence[Table]) -> list[Columns]:
    """What takes each table's columns from those of all; the only table's without a copy."""
    return [slice(None)] if len(tables) == 1 else [np.array(table.columns) for table in tables]


def _is_table(name: str) -> bool:
    return name.partition("/")[0] == TABLE


def _split(tensors: dict[str, FloatArray]) -> Tensors:
    tables = sorted((each for name, each in tensors.items() if _is_table(name)), key=lambda each: each.shape[1])
    return Tensors(tuple(tables), {name: each for name, each in tensors.items() if not _is_table(name)})


def _open_tensors(path: Path, mode: Literal["c", "r+"] = "c") -> tuple[dict[str, FloatArray], dict[str, str]]:
    """The file's tensors, mapped, and its metadata."""
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
            raise ContractError(f"tensor {name} of {path} is of type {entry['dtype']}, expected F32")
    return _mapped(path, header, 8 + header_bytes, mode=mode), metadata


def _create_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], metadata: dict[str, str]
) -> dict[str, FloatArray]:
    """A new file of zeros, mapped. All its room is taken here: a mapped page without room would kill the process."""
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
        raise PermanentError(f"model file {path} cannot have {start + end} bytes: {error.strerror}") from error
    return _mapped(path, header, start, mode="r+")


def _mapped(path: Path, header: Mapping[str, Any], start: int, *, mode: Literal["c", "r+"]) -> dict[str, FloatArray]:
    """The tensors of a header, which lie from byte `start` on; the file is mapped once."""
    whole = np.memmap(path, np.uint8, mode).view(np.ndarray)[start:]
    found: dict[str, FloatArray] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = whole[begin:end].view("<f4").reshape(entry["shape"])
    return found
