"""What serving a graph takes in memory, and whether the target has it: asked before anything is staged.

Takes a graph's files, gives a sum of named addends (`memory_needed`) and a refusal with all its numbers
(`check_fits`). The factors are measurements of ONNX Runtime's CPU provider (`benchmarks/graph_limits.py`, which also
compares the sum with the memory that a process really holds) and of Triton's processes. No GPU was there to measure:
for one, what a graph's arrays take is arithmetic, and what CUDA itself takes is an allowance, named as such.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contracts.criteo import NUM_CATEGORICAL
from components.contracts.serving import MAX_BATCH_ROWS
from components.deployment.graph.files import GRAPH_FILE, graph_bytes
from components.deployment.graph.memory_targets import MIB, parse_target, readable
from components.runtime.errors import ContractError

_HASH_MAP_SLOT = 17
"""Bytes of one place in ONNX Runtime's hash map: key, value and a byte of control; places are a power of two, at most
seven eighths of them taken."""
_ATTRIBUTE_BYTES = 32
"""Per entry: key and value once in the node's attributes, once in the session's copy of them."""
_PROCESS_BYTES = 78 * MIB
"""A python-backend process (Python, NumPy, ONNX Runtime: 63 to 74 MiB) and its 4 MiB of shared memory, one per
instance. The onnxruntime backend has no such processes, and needs less."""
_SERVER_BYTES = 41 * MIB
"""tritonserver itself after an hour of load."""
_SESSION_BYTES = 4 * MIB
"""A session of an empty graph: 2 MiB measured."""
_CUDA_CONTEXT, _CUDA_SESSION = 512 * MIB, 64 * MIB
"""Allowances, not measured: the context with its kernels once, a workspace of the libraries per session."""


@dataclass(frozen=True)
class Addend:
    """One part of the memory that serving takes."""

    name: str
    num_bytes: int
    basis: str
    """What the number rests on."""


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """Sizes of one graph, in bytes but for the entries."""

    tables_in_message: int
    tables_beside: int
    dense: int
    """All other constants: the network's weights."""
    label_encoder_entries: int
    row: int
    """Activations that live at once, of one row."""
    files: int

    @classmethod
    def of(cls, graph: Path) -> GraphSizes:
        """The sizes of the `model.onnx` at `graph`.

        Raises:
            ContractError: there is none, or it cannot be read.
        """
        import onnx

        try:
            message = onnx.load(str(graph), load_external_data=False).graph
        except Exception as error:  # Protobuf's error for a damaged message has no public class.
            raise ContractError(f"graph {graph} cannot be read: {error}") from error
        constants = {tensor.name: tensor for tensor in message.initializer}
        if "embeddings" not in constants:
            raise ContractError(f"graph {graph} has no embedding table, expected a graph that `graph` wrote")
        tables = [constants[name] for name in ("embeddings", "cell_keys", "cell_values") if name in constants]
        beside = sum(_beside_bytes(table) for table in tables)
        entries = sum(_entries(node) for node in message.node if node.op_type == "LabelEncoder")
        in_message = sum(table.ByteSize() for table in tables)
        return cls(
            tables_in_message=in_message,
            tables_beside=beside,
            dense=sum(tensor.ByteSize() for tensor in constants.values()) - in_message,
            label_encoder_entries=entries,
            row=_row_bytes(constants),
            files=graph_bytes(graph.parent),
        )


def memory_needed(sizes: GraphSizes, *, instances: int, versions: int = 2, on_gpu: bool = False) -> list[Addend]:
    """What serving `versions` graphs of these sizes at once takes, addend by addend.

    Args:
        sizes: Of one graph.
        instances: Instances of each version.
        versions: Loaded at once; during a release the new one beside the old.
        on_gpu: Count the GPU's memory; else the host's.
    """
    sessions = versions * instances
    activations = sizes.row * MAX_BATCH_ROWS * sessions
    tables = sizes.tables_in_message + sizes.tables_beside
    if on_gpu:
        return [
            Addend("tables", tables * sessions, "a copy on the GPU per session"),
            Addend("dense weights", sizes.dense * sessions, "a copy on the GPU per session"),
            Addend("activations", 2 * activations, f"{MAX_BATCH_ROWS} rows per session; the arena may double itself"),
            Addend("CUDA", _CUDA_CONTEXT + _CUDA_SESSION * sessions, "allowance, not measured"),
        ]
    return [
        Addend("tables in the message", sizes.tables_in_message * sessions, "a copy per session"),
        Addend("tables beside it", sizes.tables_beside * versions, "mapped, once per version"),
        Addend(
            "vocabularies", hash_map_bytes(sizes.label_encoder_entries) * sessions, "LabelEncoder's map per session"
        ),
        Addend("dense weights", 2 * sizes.dense * sessions, "as stored and as packed for the processor, per session"),
        Addend("activations", activations, f"{MAX_BATCH_ROWS} rows per session"),
        Addend("opening", sizes.files - sizes.tables_beside, "the message, while one session parses it"),
        Addend("processes", _SERVER_BYTES + (_PROCESS_BYTES + _SESSION_BYTES) * sessions, "Triton's python backend"),
    ]


def hash_map_bytes(entries: int) -> int:
    """Bytes of a LabelEncoder of `entries`; 0 of none.

    >>> hash_map_bytes(1_000_000)
    67651584
    """
    if not entries:
        return 0
    places = 1 << (entries * 8 // 7).bit_length()
    return places * _HASH_MAP_SLOT + entries * _ATTRIBUTE_BYTES


def check_fits(graph: Path, target: str, *, instances: int, versions: int = 2) -> None:
    """Refuses a graph that the target's memory cannot hold.

    Args:
        graph: A `model.onnx`, or the folder it lies in.
        target: As `parse_target` reads it; empty = nothing is checked.
        instances: Instances of each version.
        versions: Loaded at once; during a release the new one beside the old, which is taken to be as large.

    Raises:
        ContractError: it does not fit, with every addend; or the target or the graph cannot be read.
    """
    if not target:
        return
    memory = parse_target(target)
    sizes = GraphSizes.of(graph / GRAPH_FILE if graph.is_dir() else graph)
    addends = memory_needed(sizes, instances=instances, versions=versions, on_gpu=memory.is_gpu)
    needed = sum(addend.num_bytes for addend in addends)
    if needed > memory.num_bytes:
        parts = "; ".join(f"{a.name} {readable(a.num_bytes)} ({a.basis})" for a in addends if a.num_bytes)
        raise ContractError(
            f"graph {graph} would take about {readable(needed)} in {versions} versions of {instances} instances, "
            f"expected at most the {readable(memory.num_bytes)} of {target}: {parts}"
        )


def _beside_bytes(tensor: Any) -> int:
    return sum(int(entry.value) for entry in tensor.external_data if entry.key == "length")


def _entries(node: Any) -> int:
    return sum(int(attribute.t.dims[0]) for attribute in node.attribute if attribute.name == "keys_tensor")


def _row_bytes(constants: dict[str, Any]) -> int:
    """Of one row: vectors and x0, the tower's layers, DCN v2's layer at work, and ten columns of ids per slot."""
    vectors = NUM_CATEGORICAL * constants["embeddings"].dims[1]
    widths = [tensor.dims[1] for name, tensor in constants.items() if re.fullmatch(r"tower\.\d+\.weight", name)]
    cross = 3 * vectors if "cross.0.u" in constants else 0
    return int(4 * (2 * vectors + sum(widths) + cross) + 10 * 8 * NUM_CATEGORICAL)
