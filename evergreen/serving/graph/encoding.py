"""Write the feature workflow as ONNX nodes, from raw values to normalized values and table rows.

The module adds the network's dense inputs [n, `Features.dense_inputs`] and `table_rows` [n, slots]
to `evergreen.serving.graph.parts.Parts`. These outputs are bitwise equal to the result of
`FeatureWorkflow`, except in unused positions of lists. Categories are looked up in a hash table
that is stored in the graph's own arrays. `evergreen.serving.graph.export` adds the nodes that read
the lookup's result.

One hash table serves all columns. The key of a category is its value plus the first key of its
slot's range. The value stored for a key is the distance from the slot's out-of-vocabulary row to
the category's row. The value 0 of an absent key therefore selects the out-of-vocabulary row in
every slot. The slot of an excluded column has no entries, and in this slot the value 0 selects the
row for missing values. All values of an excluded column are therefore treated as missing.

The table uses cuckoo hashing with `CHOICES` cells per key (Pagh & Rodler, ESA 2001; Fotakis et al.,
STACS 2003). A key is stored in one of `CHOICES` possible cells. The possible cells are `starts[d] +
key mod primes[d]`, for `d` from 0 to `CHOICES` - 1. The cells of different `d` do not overlap. A
lookup reads `CHOICES` cells, even if the table is large. ONNX Runtime maps the arrays from
`model.data`. A server therefore builds nothing when it opens a graph, and its instances share the
arrays, which take 15 bytes per entry. ONNX Runtime's LabelEncoder builds a hash map of 60 to 75
bytes per entry in each instance. LabelEncoder made the graph 8 to 20 % faster with up to 2.6
million entries, but not faster with more entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from evergreen.contracts.workflow import FIRST_ID, MISSING_ID, OOV_ID, TOMBSTONE, FeatureWorkflow
from evergreen.networks.files import Table
from evergreen.runtime.errors import ContractError
from evergreen.serving.graph.parts import Parts

PREFIX = "network/"
"""Prefix of the names of the network's tensors and nodes. The encoding finds the network's tensors
by this prefix."""
DENSE = f"{PREFIX}dense"
"""Name of the network's dense input [n, d]."""
BUCKETS = "buckets"
"""Name of the tensor of bucket numbers [n, `Features.bucketed`]. In the lookup, the bucket numbers
follow the categories."""
CHOICES = 3
"""Number of possible cells of a key in the hash table."""
LOAD = 0.8
"""Share of cells that contain a key. With three choices of a cell per key, up to 92 % of the cells
can be filled. With this smaller share, the table is built quickly."""
EMPTY = -1
"""Key of an empty cell in `HashTable.keys`. Real keys are not negative."""
MAX_KEYS = 2**30
_MAX_ROUNDS = 1000


class KeyRange(NamedTuple):
    """Ranges of the hash table's keys.

    The key of a category is `slot * spread + first + category`.

    Raw values are clipped to `lowest` and `highest`, and no vocabulary contains a category beyond
    these bounds. ONNX Runtime 1.31 clips int64 wrongly if a value and the bound agree in their
    upper 32 bits, because it compares the lower 32 bits as signed numbers. For example, it does not
    clip 2^33 - 1 to the bound 2^32. The lower 32 bits of both bounds here are 2^31, which is the
    smallest number as signed bits. With these bounds, the bug of ONNX Runtime does no harm. A wrong
    result would matter only if a value moved into another slot's range. An unclipped value is at
    most 2^32 beyond a bound, and the ranges of two slots are further apart.
    """

    highest: int
    spread: int
    first: int = 2**32
    """Offset that makes every key non-negative."""
    lowest: int = -(2**31)

    @property
    def max_slots(self) -> int:
        """Maximum number of slots whose keys fit in an int64."""
        return (2**63 - self.first) // self.spread


_NARROW = KeyRange(highest=2**32 + 2**31, spread=2**34)
"""Key ranges if all categories are below 2^32."""
_WIDE = KeyRange(highest=2**52 + 2**31, spread=2**53)


def encode_dense(parts: Parts, workflow: FeatureWorkflow) -> str:
    """Add the network's dense inputs, and return their tensor's name.

    The operators are the same as in `FeatureWorkflow.encode_dense`.
    """
    numeric = workflow.features.numeric
    if not numeric:
        return parts.node(
            "Cast", [_no_columns(parts, CATEGORICAL_INPUT)], DENSE, to=TensorProto.FLOAT
        )
    missing = parts.node("IsNaN", [DENSE_INPUT], "dense_missing")
    if workflow.excluded_dense:
        excluded = parts.constant("dense_excluded", np.isin(numeric, workflow.excluded))
        missing = parts.node("Or", [missing, excluded], "dense_left_out")
    options = [workflow.features.options_of(name) for name in numeric]
    least, largest = np.array([each.bounds for each in options], np.float32).T
    fill = _column_constant(parts, "fill", [each.fill for each in options])
    values = parts.node("Where", [missing, fill, DENSE_INPUT], "dense_filled")
    if (least > -np.inf).any():
        values = parts.node(
            "Max", [values, _column_constant(parts, "clip_min", least)], "dense_clipped"
        )
    if (largest < np.inf).any():
        values = parts.node(
            "Min", [values, _column_constant(parts, "clip_max", largest)], "dense_bounded"
        )
    if workflow.features.bucketed:
        _bucket(parts, workflow, values=values, missing=missing)
    is_logged = np.array([each.is_logged for each in options])
    if is_logged.any():
        shifted = parts.node(
            "Add", [values, parts.constant("one", np.array(1, np.float32))], "dense_shifted"
        )
        # ONNX Runtime's float32 logarithm differs from NumPy's, and depends on a value's position
        # in the batch.
        wide = parts.node("Cast", [shifted], "dense_wide", to=TensorProto.DOUBLE)
        logged = parts.node(
            "Cast", [parts.node("Log", [wide], "dense_log")], "dense_logged", to=TensorProto.FLOAT
        )
        if is_logged.all():
            values = logged
        else:  # the logarithm is NaN in columns that are not log-transformed
            chosen = parts.constant("is_logged", is_logged)
            values = parts.node("Where", [chosen, logged, values], "dense_transformed")
    centred = parts.node(
        "Sub", [values, parts.constant("means", workflow.means.astype(np.float32))], "dense_centred"
    )
    stds, indicated = (
        parts.constant("stds", workflow.stds.astype(np.float32)),
        workflow.features.indicated,
    )
    bucketed = workflow.features.bucketed
    if not indicated and not bucketed:
        return parts.node("Div", [centred, stds], DENSE)
    scaled = parts.node("Div", [centred, stds], "dense_scaled")
    if bucketed:
        plain = parts.constant("plain_dense", np.array(workflow.features.plain_numeric, np.int64))
        scaled = parts.node(
            "Gather", [scaled, plain], "dense_plain" if indicated else DENSE, axis=1
        )
    if not indicated:
        return scaled
    indexes = parts.constant("indicated", np.array([numeric.index(name) for name in indicated]))
    flags = parts.node("Gather", [missing, indexes], "dense_flags", axis=1)
    indicators = parts.node("Cast", [flags], "dense_indicators", to=TensorProto.FLOAT)
    return parts.node("Concat", [scaled, indicators], DENSE, axis=1)


def _bucket(parts: Parts, workflow: FeatureWorkflow, *, values: str, missing: str) -> None:
    """Add the nodes that convert numbers to buckets, and return their output's name.

    The output `buckets` [n, bucketed columns] is the number of boundaries that the clipped value
    reaches. The bucket of a missing value is `MISSING_CATEGORY`. All columns get the same number of
    boundaries. Additional boundaries are NaN, which no value reaches.
    """
    numeric, bucketed = workflow.features.numeric, workflow.features.bucketed
    boundaries = np.full(
        (len(bucketed), max(1, *map(len, workflow.boundaries.values()))), np.nan, np.float32
    )
    for row, name in zip(boundaries, bucketed):
        row[: len(workflow.boundaries[name])] = workflow.boundaries[name]
    indexes = parts.constant("bucketed", np.array([numeric.index(name) for name in bucketed]))
    last = parts.constant("boundary_axis", np.array([2]))
    each = parts.node(
        "Unsqueeze",
        [parts.node("Gather", [values, indexes], "bucketed_values", axis=1), last],
        "bucketed_columns",
    )
    reached = parts.node(
        "GreaterOrEqual", [each, parts.constant("boundaries", boundaries)], "is_reached"
    )
    numbers = parts.node("Cast", [reached], "reached", to=TensorProto.INT64)
    found = parts.node("ReduceSum", [numbers, last], "buckets_of_all", keepdims=0)
    absent = parts.node("Gather", [missing, indexes], "bucketed_missing", axis=1)
    parts.node(
        "Where", [absent, parts.constant("no_bucket", np.array(MISSING_CATEGORY)), found], BUCKETS
    )


def _column_constant(parts: Parts, name: str, values: Sequence[float]) -> str:
    """Add a constant with one value per column, and return its name.

    If all values are equal, the constant is a scalar.
    """
    array = np.array(values, np.float32)
    return parts.constant(name, array[0] if (array == array[0]).all() else array)


def encode_categorical(parts: Parts, workflow: FeatureWorkflow, tables: Sequence[Table]) -> str:
    """Add the nodes that convert categories to table rows, and return their output's name.

    The output `table_rows` [n, `Features.id_positions`] is the slot's offset plus the id of each
    value. The rows of unused positions of lists are arbitrary, and `evergreen.serving.graph.export`
    ignores them.

    Raises:
        ContractError: there are too many vocabulary entries (`build_table`), or more columns than
            key ranges.
    """
    slots, names = (
        np.array(workflow.features.id_positions.slots, np.int64),
        workflow.features.id_names,
    )
    largest = max((int(v.max(initial=0)) for v in workflow.vocabularies), default=0)
    keys_of = _NARROW if largest < 2**32 else _WIDE
    if (num_slots := len(workflow.features.slots)) > keys_of.max_slots:
        raise ContractError(
            f"{num_slots} categorical columns are too many for one graph, expected at most "
            f"{keys_of.max_slots}, because the largest category is {largest}"
        )
    if not names:
        return parts.node(
            "Cast", [_no_columns(parts, DENSE_INPUT)], "table_rows", to=TensorProto.INT64
        )
    bounds = [
        parts.constant(f"category_{n}", np.array(b))
        for n, b in (("lowest", keys_of.lowest), ("highest", keys_of.highest))
    ]
    raw = CATEGORICAL_INPUT
    if bucketed := workflow.features.bucketed:
        is_alone = len(bucketed) == len(names)
        raw = (
            BUCKETS if is_alone else parts.node("Concat", [raw, BUCKETS], "all_categories", axis=1)
        )
    if served_as := workflow.features.served_as:
        values = np.array(
            [served_as.get(position, MISSING_CATEGORY) for position in range(len(names))]
        )
        is_fixed = parts.constant("is_fixed", np.isin(np.arange(len(names)), list(served_as)))
        raw = parts.node(
            "Where", [is_fixed, parts.constant("served_as", values), raw], "served_categories"
        )
    clipped = parts.node("Clip", [raw, *bounds], "categories")
    starts = parts.constant("slot_keys", slots * keys_of.spread + keys_of.first)
    keys = parts.node("Add", [clipped, starts], "keys")
    distances = _look_up(parts, keys, build_table(*_entries(workflow, keys_of)), width=len(names))
    offsets = np.zeros(len(names), np.int64)
    for table in tables:
        offsets[list(table.columns)] = table.offsets(workflow.slot_sizes)
    unknown = np.where(np.isin(names, workflow.excluded), MISSING_ID, OOV_ID)
    return parts.node(
        "Add", [distances, parts.constant("oov_rows", offsets + unknown)], "table_rows"
    )


def _no_columns(parts: Parts, source: str) -> str:
    """Add an empty tensor [n, 0] with as many rows as `source`.

    The empty tensor is used for a kind of feature that has no columns.
    """
    first, last, axis = (
        parts.constant(f"no_columns_{n}", np.array([v]))
        for n, v in (("first", 0), ("end", 0), ("axis", 1))
    )
    return parts.node("Slice", [source, first, last, axis], "no_columns")


def _entries(
    workflow: FeatureWorkflow, keys_of: KeyRange
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the keys and their distances.

    The distance of a key is its row minus the out-of-vocabulary row of its slot.
    """
    keys, distances = (
        [np.zeros(0, np.int64)],
        [np.zeros(0, np.int64)],
    )  # `keys` is empty if all columns are excluded
    for slot, (name, vocabulary) in enumerate(zip(workflow.features.slots, workflow.vocabularies)):
        if name in workflow.excluded:
            continue
        # A tombstone marks an id without a category, which gets no entry. A request that sends the
        # tombstone as a raw value therefore gets the out-of-vocabulary row.
        real = np.flatnonzero(vocabulary != TOMBSTONE)
        keys.append(
            np.concatenate([[MISSING_CATEGORY], vocabulary[real]])
            + (slot * keys_of.spread + keys_of.first)
        )
        distances.append(np.concatenate([[MISSING_ID], FIRST_ID + real]) - OOV_ID)
    return np.concatenate(keys), np.concatenate(distances).astype(np.int32)


def _look_up(parts: Parts, wanted: str, table: "HashTable", *, width: int) -> str:
    """Add the nodes that look up keys, and return the name of their output `distances`, [n, width].

    The output is the value that the table stores for each key. If the table lacks a key, the output
    is the value of cell 0.

    The nodes use GatherElements instead of Gather. For look-ups of single numbers, GatherElements
    takes only a seventh of the time. GatherElements needs flat indices.
    """
    cell_keys, cell_values = (
        parts.table("cell_keys", table.keys),
        parts.table("cell_values", table.values),
    )
    flat = parts.node("Reshape", [wanted, parts.constant("flat", np.array([-1]))], "keys_flat")
    found = parts.constant("nowhere", np.array(0))
    for i in range(CHOICES):
        prime, start = (
            parts.constant(f"{n}_{i}", np.array(v[i]))
            for n, v in (("prime", table.primes), ("start", table.starts))
        )
        cells = parts.node(
            "Add", [parts.node("Mod", [flat, prime], f"hash_{i}"), start], f"cells_{i}"
        )
        held = parts.node("GatherElements", [cell_keys, cells], f"held_{i}")
        found = parts.node(
            "Where", [parts.node("Equal", [held, flat], f"hit_{i}"), cells, found], f"found_{i}"
        )
    distances = parts.node("GatherElements", [cell_values, found], "distances_flat")
    wide = parts.node("Cast", [distances], "distances_wide", to=TensorProto.INT64)
    shape = parts.constant("distances_shape", np.array([-1, width]))
    return parts.node("Reshape", [wide, shape], "distances")


class HashTable(NamedTuple):
    """Arrays of the hash table.

    Cell 0 is always empty, and a key that is not in the table gets the value of cell 0.
    """

    keys: NDArray[np.int64]
    """[cells], `EMPTY` in a cell without a key."""
    values: NDArray[np.int32]
    """[cells], 0 in a cell without a key."""
    primes: tuple[int, ...]
    """`primes[d]` is the number of cells that are available for choice `d` of a key. A key has
    `CHOICES` choices."""
    starts: tuple[int, ...]
    """`starts[d]` is the first cell that is available for choice `d` of a key."""


def build_table(keys: NDArray[np.int64], values: NDArray[np.int32]) -> HashTable:
    """Build the hash table of distinct non-negative `keys` [n] and their `values` [n].

    The result is deterministic.

    Raises:
        ContractError: there are more than `MAX_KEYS` keys.
    """
    if len(keys) > MAX_KEYS:
        raise ContractError(
            f"vocabularies have {len(keys)} entries, expected at most {MAX_KEYS} in one graph"
        )
    cells = int(len(keys) / LOAD)
    while True:
        primes = _primes_from(max(3, cells // CHOICES), CHOICES)
        starts = np.cumsum([1, *primes[:-1]])
        owners = _assign_cells(keys, np.array(primes), starts)
        if owners is not None:
            break
        cells += cells // 8 + CHOICES  # regular patterns in the keys may need more cells
    taken = owners >= 0
    cell_keys, cell_values = np.full(len(owners), EMPTY, np.int64), np.zeros(len(owners), np.int32)
    cell_keys[taken], cell_values[taken] = keys[owners[taken]], values[owners[taken]]
    return HashTable(cell_keys, cell_values, primes, tuple(starts.tolist()))


def _assign_cells(
    keys: NDArray[np.int64], primes: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Assign each key to a cell.

    Returns, for each cell, the position of its key, or -1 if the cell is empty. Returns None if a
    key found no free cell. A key may be stored in one of `CHOICES` cells. In each round, every key
    without a cell is moved to its current choice, and replaces the key in that cell. If several
    keys have the same choice, the last key is stored. In the next round, all keys without a cell
    try their next choice.
    """
    owners = np.full(1 + int(primes.sum()), -1, np.int64)
    choices = np.zeros(len(keys), np.int8)
    waiting = np.arange(len(keys))
    for _ in range(_MAX_ROUNDS):
        choice = choices[waiting]
        cells = starts[choice] + keys[waiting] % primes[choice]
        before = owners[cells]
        owners[cells] = waiting
        lost, put_out = waiting[owners[cells] != waiting], np.unique(before[before >= 0])
        waiting = np.concatenate([lost, put_out])
        if not len(waiting):
            return owners
        choices[waiting] = (choices[waiting] + 1) % len(primes)
    return None


def _primes_from(least: int, count: int) -> tuple[int, ...]:
    """Return the smallest `count` primes that are not below `least`. `least` must be at least 3.

    >>> _primes_from(90, 3)
    (97, 101, 103)
    """
    primes: list[int] = []
    candidate = least | 1
    while len(primes) < count:
        divisors = np.arange(3, int(candidate**0.5) + 1, 2)
        if (candidate % divisors).all():
            primes.append(candidate)
        candidate += 2
    return tuple(primes)
