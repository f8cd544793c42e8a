"""The feature workflow as nodes: raw values in, normalised values and rows of the fused table out.

Adds the network's dense input [n, 13] and `table_rows` [n, 26] to `graph.parts.Parts`, equal bit by bit to what
`FeatureWorkflow` says. Two ways to look categories up, the same to whoever asks: ONNX Runtime's LabelEncoder, a hash
map that it builds in memory while it opens the graph, and `graph.hash_table`'s table in the graph's own arrays, which
is slower per row and costs nothing to open. What is done with rows and
values is `graph.network`'s.

All 26 columns are looked up at once: a category's key is the value plus its slot's own range of keys, so that one
LabelEncoder has the work of 26. What is looked up is the row's distance from the slot's out-of-vocabulary row, so that
0, the default, is right in every slot. An excluded column's slot has no entry, and its distances count from its row for
missing: whatever is asked of it is missing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from components.contracts.criteo import CATEGORICAL, MISSING_CATEGORY, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from components.contracts.workflow import FIRST_ID, MISSING_ID, OOV_ID, TOMBSTONE, FeatureWorkflow
from components.deployment.graph.hash_table import CHOICES, build_table
from components.deployment.graph.network import DENSE
from components.deployment.graph.parts import Parts

_LOWEST, _HIGHEST = -(2**31), 2**32 + 2**31
"""Raw values are clipped to these two, beyond which there are no categories. ONNX Runtime 1.31 clips int64 wrongly
where a value and the bound agree in the upper 32 bits: it compares the lower 32 as signed numbers, and so leaves
2^33 - 1 above 2^32. With these two the mistake is harmless: they are the least of their lower halves, so that what is
wrongly left alone lies in [-2^32, 2^33), and slots' keys are further apart than that."""
_SLOT_KEYS = 2**34
"""Distance of the keys of one slot from the next one's."""
_FIRST_KEY = 2**32
"""Key of category 0 in slot 0, so that no key is negative."""


def encode_dense(parts: Parts, workflow: FeatureWorkflow) -> str:
    """Adds the network's dense input [n, 13], operator by operator as `FeatureWorkflow.encode_dense`; its name."""
    missing = parts.node("IsNaN", [DENSE_INPUT.name], "dense_missing")
    if workflow.excluded_dense:
        excluded = parts.constant("dense_excluded", np.isin(np.arange(NUM_DENSE), workflow.excluded_dense))
        missing = parts.node("Or", [missing, excluded], "dense_left_out")
    fill = parts.constant("fill", np.array(workflow.fill, np.float32))
    filled = parts.node("Where", [missing, fill, DENSE_INPUT.name], "dense_filled")
    clip = parts.constant("clip_min", np.array(workflow.clip_min, np.float32))
    clipped = parts.node("Max", [filled, clip], "dense_clipped")
    shifted = parts.node("Add", [clipped, parts.constant("one", np.array(1, np.float32))], "dense_shifted")
    # A float32 logarithm of ONNX Runtime differs from NumPy's, and from itself by a value's place in the batch.
    wide = parts.node("Cast", [shifted], "dense_wide", to=TensorProto.DOUBLE)
    logged = parts.node("Cast", [parts.node("Log", [wide], "dense_log")], "dense_logged", to=TensorProto.FLOAT)
    centred = parts.node("Sub", [logged, parts.constant("means", workflow.means.astype(np.float32))], "dense_centred")
    return parts.node("Div", [centred, parts.constant("stds", workflow.stds.astype(np.float32))], DENSE)


def encode_categorical(parts: Parts, workflow: FeatureWorkflow, *, label_encoder_entries: int) -> str:
    """Adds `table_rows` [n, 26]: per slot, the row of the fused table (slot offset + id) of each raw category.

    Args:
        parts: The graph.
        workflow: Whose vocabularies to write.
        label_encoder_entries: Most entries of all vocabularies together that a LabelEncoder gets.

    Raises:
        ContractError: as `graph.hash_table.build_table`.
    """
    bounds = [parts.constant(f"category_{n}", np.array(b)) for n, b in (("lowest", _LOWEST), ("highest", _HIGHEST))]
    clipped = parts.node("Clip", [CATEGORICAL_INPUT.name, *bounds], "categories")
    starts = parts.constant("slot_keys", np.arange(NUM_CATEGORICAL) * _SLOT_KEYS + _FIRST_KEY)
    keys = parts.node("Add", [clipped, starts], "keys")
    entries = _entries(workflow)
    look_up = _by_label_encoder if len(entries[0]) <= label_encoder_entries else _by_hash_table
    distances = look_up(parts, keys, *entries)
    offsets = np.cumsum([0, *workflow.slot_sizes[:-1]])
    unknown = np.where(np.isin(CATEGORICAL, workflow.excluded), MISSING_ID, OOV_ID)
    return parts.node("Add", [distances, parts.constant("oov_rows", offsets + unknown)], "table_rows")


def num_entries(workflow: FeatureWorkflow) -> int:
    """Entries to look up in: every category that has an id, and each slot's missing value; none of excluded columns."""
    num_slots = len(set(CATEGORICAL) - set(workflow.excluded))
    return num_slots + sum(map(len, workflow.vocabularies)) - sum(workflow.tombstones)


def _entries(workflow: FeatureWorkflow) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Keys, and the distance of each one's row from its slot's out-of-vocabulary row."""
    keys, distances = [], []
    for slot, (name, vocabulary) in enumerate(zip(CATEGORICAL, workflow.vocabularies)):
        if name in workflow.excluded:
            continue
        # An id without a category is no entry: its mark, sent as a raw value, is out of vocabulary like any other.
        real = np.flatnonzero(vocabulary != TOMBSTONE)
        keys.append(np.concatenate([[MISSING_CATEGORY], vocabulary[real]]) + (slot * _SLOT_KEYS + _FIRST_KEY))
        distances.append(np.concatenate([[MISSING_ID], FIRST_ID + real]) - OOV_ID)
    if not keys:  # all are excluded; neither look-up takes an empty table, and no raw value becomes this key
        return np.array([0]), np.array([0])
    return np.concatenate(keys), np.concatenate(distances)


def _by_label_encoder(parts: Parts, wanted: str, keys: NDArray[np.int64], values: NDArray[np.int64]) -> str:
    return parts.node(
        "LabelEncoder",
        [wanted],
        "distances",
        domain="ai.onnx.ml",
        keys_tensor=numpy_helper.from_array(keys, "entry_keys"),
        values_tensor=numpy_helper.from_array(values, "entry_values"),
        default_tensor=numpy_helper.from_array(np.zeros(1, np.int64), "unknown"),
    )


def _by_hash_table(parts: Parts, wanted: str, keys: NDArray[np.int64], values: NDArray[np.int64]) -> str:
    """Reads each key's cells one after another; where none holds it, cell 0 answers.

    GatherElements, which wants flat indices, takes a seventh of Gather's time for single numbers.
    """
    table = build_table(keys, values.astype(np.int32))
    cell_keys, cell_values = parts.table("cell_keys", table.keys), parts.table("cell_values", table.values)
    flat = parts.node("Reshape", [wanted, parts.constant("flat", np.array([-1]))], "keys_flat")
    found = parts.constant("nowhere", np.array(0))
    for i in range(CHOICES):
        prime, start = (
            parts.constant(f"{n}_{i}", np.array(v[i])) for n, v in (("prime", table.primes), ("start", table.starts))
        )
        cells = parts.node("Add", [parts.node("Mod", [flat, prime], f"hash_{i}"), start], f"cells_{i}")
        held = parts.node("GatherElements", [cell_keys, cells], f"held_{i}")
        found = parts.node("Where", [parts.node("Equal", [held, flat], f"hit_{i}"), cells, found], f"found_{i}")
    distances = parts.node("GatherElements", [cell_values, found], "distances_flat")
    wide = parts.node("Cast", [distances], "distances_wide", to=TensorProto.INT64)
    shape = parts.constant("distances_shape", np.array([-1, NUM_CATEGORICAL]))
    return parts.node("Reshape", [wide, shape], "distances")
