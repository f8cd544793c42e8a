"""Which of HugeCTR's embeddings hold a model's vectors, which keys and how much GPU memory each has.

An embedding of HugeCTR has one width of vectors and one way of pooling, a table of the store
(`evergreen.networks.files`) has one width. So a table's slots are divided between two embeddings: those of lists whose
mean is taken, and all others, since the sum of one vector is that vector. Columns that share a table share its keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import Places
from evergreen.config.model import DcnConfig
from evergreen.networks.files import slot_offsets, tables_of

_MARGIN_ROWS = 1024
"""Room beyond the keys, since HugeCTR's hash table rounds its own counts."""
_FLOATS_PER_ROW = 3
"""Vectors that each row of the workspace takes: the weights and Adam's two moments."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A slot of an embedding, as HugeCTR calls what becomes one of a row's vectors."""

    vector: int
    """Which of a row's vectors it becomes."""
    columns: tuple[int, ...]
    """The columns of ids that look it up: one, or the places of a list."""
    is_list: bool
    """Whether the columns are a list's, where a place may hold nothing."""
    first_key: int
    """Key of id 0."""


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """One embedding of HugeCTR."""

    number: int
    """In the order in which embeddings are added, which is part of the names of its files."""
    combiner: str
    """`sum` or `mean`, of the vectors of a list."""
    width: int
    """Of its vectors."""
    table: int
    """Number of the model's table that has its vectors."""
    ranges: tuple[tuple[int, int], ...]
    """Rows of that table, each range without its end; keys count through them."""
    slots: tuple[Slot, ...]
    """In the order of a row's vectors."""

    @property
    def num_keys(self) -> int:
        """Keys, which are 0..num_keys-1."""
        return sum(stop - start for start, stop in self.ranges)

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the model's table that have these keys."""
        firsts = slot_offsets([stop - start for start, stop in self.ranges])
        of_range = np.searchsorted(firsts, keys, side="right") - 1
        rows: NDArray[np.int64] = keys - firsts[of_range] + np.array(self.ranges)[of_range, 0]
        return rows

    def workspace_mb(self, num_gpus: int) -> int:
        """The `workspace_size_per_gpu_in_mb` that it needs."""
        return smallest_workspace_mb(self.num_keys, self.width, num_gpus=num_gpus)


def embeddings_of(config: DcnConfig, slot_sizes: Sequence[int], places: Places) -> tuple[Embedding, ...]:
    """The embeddings of a model, by width; no slot has lists of which one is summed and of another the mean taken.

    >>> from evergreen.config.features import PooledPlaces
    >>> config = DcnConfig(num_dense=0, num_categorical=3, embedding_dim=4)
    >>> places = Places((0, 1, 1, 2, 2), (PooledPlaces(1, 3, "mean"), PooledPlaces(3, 5, "sum")))
    >>> for each in embeddings_of(config, [10, 20, 30], places):
    ...     print(each.combiner, each.ranges, [(slot.vector, slot.columns, slot.first_key) for slot in each.slots])
    sum ((0, 10), (30, 60)) [(0, (0,), 0), (2, (3, 4), 10)]
    mean ((10, 30),) [(1, (1, 2), 0)]
    """
    found: list[Embedding] = []
    for number, table in enumerate(tables_of(places, config.widths)):
        sizes, lists_at = table.sizes(slot_sizes), {each.start: each for each in table.places.lists}
        is_mean = {table.places.slots[each.start] for each in table.places.lists if each.pool == "mean"}
        starts = slot_offsets(sizes).tolist()
        for combiner in ("sum", "mean"):
            own = [slot for slot in range(len(sizes)) if (slot in is_mean) == (combiner == "mean")]
            first_keys = dict(zip(own, slot_offsets([sizes[slot] for slot in own]).tolist()))
            slots, at = [], 0
            for vector in table.vectors:
                stop = lists_at[at].stop if at in lists_at else at + 1
                if (of_table := table.places.slots[at]) in first_keys:
                    columns, first_key = table.columns[at:stop], first_keys[of_table]
                    slots.append(Slot(vector=vector, columns=columns, is_list=at in lists_at, first_key=first_key))
                at = stop
            if slots:
                embedding = Embedding(
                    number=len(found),
                    combiner=combiner,
                    width=config.table_widths[number],
                    table=number,
                    ranges=tuple((starts[slot], starts[slot] + sizes[slot]) for slot in own),
                    slots=tuple(slots),
                )
                found.append(embedding)
    assert sorted(slot.vector for slot in chain(*(each.slots for each in found))) == list(range(config.num_categorical))
    return tuple(found)


def max_vocabulary_size(workspace_mb: int, dim: int) -> int:
    """Rows that a HugeCTR workspace holds per GPU, each a vector and Adam's two.

    >>> max_vocabulary_size(267, 16)
    1458176
    """
    return (workspace_mb << 20) // (_FLOATS_PER_ROW * 4 * dim)


def smallest_workspace_mb(num_rows: int, dim: int, *, num_gpus: int) -> int:
    """`workspace_size_per_gpu_in_mb` for a table of `num_rows` vectors of width `dim` with Adam's state.

    HugeCTR stops in the middle of training when a key has no room. All keys are known before, so the size is exact; key
    k lies on GPU k modulo their number. HugeCTR allocates it when the model is built, so too small a GPU fails at once.

    >>> smallest_workspace_mb(1_457_152, 16, num_gpus=1), smallest_workspace_mb(1_457_153, 16, num_gpus=1)
    (267, 268)
    """
    rows_per_gpu = -(-num_rows // num_gpus) + _MARGIN_ROWS
    return -(-rows_per_gpu * _FLOATS_PER_ROW * 4 * dim >> 20)
