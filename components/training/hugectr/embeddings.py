"""Layout of a model's vectors in HugeCTR's embeddings: their keys and their GPU memory.

An embedding of HugeCTR has one width and one way of pooling. A table of the registry
(`evergreen.networks.files`) has one width. The slots of a table are therefore divided between two
embeddings. The first embedding averages vectors, and contains the slots of lists with mean pooling.
The second embedding sums vectors, and contains all other slots of the table. The sum of a single
vector is the vector itself. Columns that share a table share its keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import FeaturePositions
from evergreen.config.model import DcnConfig
from evergreen.networks.files import slot_offsets, tables_of

_MARGIN_ROWS = 1024
"""Additional rows beyond the keys, because HugeCTR's hash table rounds its sizes."""
_FLOATS_PER_ROW = 3
"""Number of floats in a workspace for each weight: the weight and Adam's two moments."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One slot of a HugeCTR embedding.

    For each row, the vectors of the slot's ids are combined into one vector.
    """

    vector: int
    """Position of the slot's vector in a row."""
    columns: tuple[int, ...]
    """Id columns of this slot: one column, or all columns of a list."""
    is_list: bool
    """Whether the columns belong to a list, whose elements may be padding."""
    first_key: int
    """Key of id 0."""


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """One embedding of HugeCTR."""

    number: int
    """Position in the order in which embeddings are added. The position is part of the names of the
    embedding's files."""
    combiner: str
    """Pooling of a list's vectors: `sum` or `mean`."""
    width: int
    """Width of the vectors in this embedding."""
    table: int
    """Index of the model's table that contains the vectors of this embedding."""
    ranges: tuple[tuple[int, int], ...]
    """Half-open ranges of rows in the registry's table. Keys are numbered consecutively over all
    ranges."""
    slots: tuple[Slot, ...]
    """Slots in the order of a row's vectors."""

    @property
    def num_keys(self) -> int:
        """Number of keys. The keys are 0 to num_keys - 1."""
        return sum(stop - start for start, stop in self.ranges)

    def rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row number of each of these keys in the model's table."""
        firsts = slot_offsets([stop - start for start, stop in self.ranges])
        of_range = np.searchsorted(firsts, keys, side="right") - 1
        rows: NDArray[np.int64] = keys - firsts[of_range] + np.array(self.ranges)[of_range, 0]
        return rows

    def workspace_mb(self, num_gpus: int) -> int:
        """Return the required `workspace_size_per_gpu_in_mb`."""
        return smallest_workspace_mb(self.num_keys, self.width, num_gpus=num_gpus)


def embeddings_of(
    config: DcnConfig, slot_sizes: Sequence[int], positions: FeaturePositions
) -> tuple[Embedding, ...]:
    """Return the embeddings of a model, ordered by width.

    All lists with the vectors of one slot must be pooled in the same way, by sum or by mean.

    >>> from evergreen.config.features import PooledPositions
    >>> config = DcnConfig(num_dense=0, num_categorical=3, embedding_dim=4)
    >>> lists = PooledPositions(1, 3, "mean"), PooledPositions(3, 5, "sum")
    >>> positions = FeaturePositions((0, 1, 1, 2, 2), lists)
    >>> for each in embeddings_of(config, [10, 20, 30], positions):
    ...     slots = [(slot.vector, slot.columns, slot.first_key) for slot in each.slots]
    ...     print(each.combiner, each.ranges, slots)
    sum ((0, 10), (30, 60)) [(0, (0,), 0), (2, (3, 4), 10)]
    mean ((10, 30),) [(1, (1, 2), 0)]
    """
    found: list[Embedding] = []
    for number, table in enumerate(tables_of(positions, config.widths)):
        sizes, lists_at = (
            table.sizes(slot_sizes),
            {each.start: each for each in table.positions.lists},
        )
        is_mean = {
            table.positions.slots[each.start]
            for each in table.positions.lists
            if each.pool == "mean"
        }
        starts = slot_offsets(sizes).tolist()
        for combiner in ("sum", "mean"):
            own = [slot for slot in range(len(sizes)) if (slot in is_mean) == (combiner == "mean")]
            first_keys = dict(zip(own, slot_offsets([sizes[slot] for slot in own]).tolist()))
            slots, at = [], 0
            for vector in table.vectors:
                stop = lists_at[at].stop if at in lists_at else at + 1
                if (of_table := table.positions.slots[at]) in first_keys:
                    columns, first_key = table.columns[at:stop], first_keys[of_table]
                    slots.append(
                        Slot(
                            vector=vector,
                            columns=columns,
                            is_list=at in lists_at,
                            first_key=first_key,
                        )
                    )
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
    assert sorted(slot.vector for slot in chain(*(each.slots for each in found))) == list(
        range(config.num_categorical)
    )
    return tuple(found)


def max_vocabulary_size(workspace_mb: int, dim: int) -> int:
    """Return the number of rows that fit into a HugeCTR workspace on one GPU.

    Each row has Adam's two moments.

    >>> max_vocabulary_size(267, 16)
    1458176
    """
    return (workspace_mb << 20) // (_FLOATS_PER_ROW * 4 * dim)


def smallest_workspace_mb(num_rows: int, dim: int, *, num_gpus: int) -> int:
    """Return the smallest `workspace_size_per_gpu_in_mb` for a table with Adam's state.

    HugeCTR fails during training when there is no room for a key. All keys are known in advance, so
    the size is exact. Key k is on GPU k modulo the number of GPUs. HugeCTR allocates the workspace
    when the model is built, so a GPU that is too small fails at once.

    Args:
        num_rows: Rows of the table.
        dim: Width of its vectors.
        num_gpus: GPUs that share the table.

    >>> [smallest_workspace_mb(rows, 16, num_gpus=1) for rows in (1_457_152, 1_457_153)]
    [267, 268]
    """
    rows_per_gpu = -(-num_rows // num_gpus) + _MARGIN_ROWS
    return -(-rows_per_gpu * _FLOATS_PER_ROW * 4 * dim >> 20)
