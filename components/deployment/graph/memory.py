"""What serving a graph takes in memory, and whether the target has it: asked before anything is staged.

Takes a graph's files, gives a sum of named addends (`memory_needed`) and a refusal with all its numbers
(`check_fits`). The factors are measurements of ONNX Runtime's CPU provider and of Triton's processes. No GPU was there
to measure: for one, what a graph's arrays take is arithmetic, and what CUDA itself takes is called an allowance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from components.contracts.serving import CATEGORICAL_INPUT, MAX_BATCH_ROWS
from components.deployment.graph.encoding import PREFIX
from components.deployment.graph.parts import OPSET_IMPORTS
from components.runtime.errors import ContractError
from components.store.models import GRAPH_FILE, graph_bytes

MIB, GIB = 2**20, 2**30

MIG_SLICES = {
    "1g.5gb": 4.75, "2g.10gb": 9.62, "3g.20gb": 19.5, "4g.20gb": 19.5, "7g.40gb": 39.25,
    "1g.10gb": 9.5, "1g.20gb": 19.5, "2g.20gb": 19.5, "3g.40gb": 39.25, "4g.40gb": 39.25, "7g.80gb": 78.75,
    "1g.6gb": 5.81, "2g.12gb": 11.69, "4g.24gb": 23.44,
}  # fmt: skip
"""GiB of each MIG profile of A100 40 GB, of A100 and H100 80 GB, and of A30, as `nvidia-smi mig -lgip` tells them;
where cards or drivers differ, the least."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")
_UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


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
class MemoryTarget:
    """Memory to serve from."""

    name: str
    num_bytes: int
    is_gpu: bool


def parse_target(target: str) -> MemoryTarget:
    """What `target` names: a MIG slice (`mig-1g.5gb`), a GPU (`gpu-24Gi`), or a server's memory (`16Gi`).

    Raises:
        ContractError: it is none of these.

    >>> parse_target("mig-1g.5gb").num_bytes / 2**30, parse_target("512Mi").num_bytes
    (4.75, 536870912)
    """
    name = target.removeprefix("nvidia.com/")
    if (slice_gib := MIG_SLICES.get(name.removeprefix("mig-"))) is not None:
        return MemoryTarget(target, int(slice_gib * GIB), True)
    if found := _SIZE.fullmatch(name.removeprefix("gpu-")):
        return MemoryTarget(target, int(float(found[1]) * _UNITS[found[2]]), name.startswith("gpu-"))
    slices = ", ".join(f"mig-{known}" for known in MIG_SLICES)
    raise ContractError(f"target {target!r} is unknown, expected a size (16Gi), a GPU's (gpu-24Gi) or one of {slices}")


def readable(num_bytes: int) -> str:
    """The size in GiB or MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


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
            row=_row_bytes(message),
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


def _row_bytes(graph: Any) -> int:
    """Of one row: every value that the network computes, and ten columns of ids per slot."""
    from onnx import helper, shape_inference

    # Without constants: their shapes are enough, and a table is large.
    constants = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer]
    bare = helper.make_graph(graph.node, graph.name, [*graph.input, *constants], graph.output)
    model = helper.make_model(bare, opset_imports=list(OPSET_IMPORTS))
    shapes = {
        value.name: value.type.tensor_type.shape.dim for value in shape_inference.infer_shapes(model).graph.value_info
    }
    # What has no fixed first dimension has one entry per row.
    widths = [prod(d.dim_value for d in dims[1:]) for name, dims in shapes.items() if _is_per_row(name, dims)]
    return int(4 * sum(widths) + 10 * 8 * CATEGORICAL_INPUT.width)


def _is_per_row(name: str, dims: Any) -> bool:
    return name.startswith(PREFIX) and len(dims) > 0 and not dims[0].dim_value
