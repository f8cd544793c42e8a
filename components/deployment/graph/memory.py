"""What serving a graph takes in memory, and whether the target has it: checked before anything is staged.

Takes a graph's files, gives a sum of named addends (`memory_needed`) and a refusal with all its numbers
(`check_fits`). The factors are measurements of ONNX Runtime's CPU provider and of Triton's processes. No GPU was there
to measure: for one, what a graph's arrays take is arithmetic, and what CUDA itself takes is called an allowance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, MAX_BATCH_ROWS
from components.runtime.errors import ContractError
from components.store.models import GRAPH_FILE, graph_bytes

MIB, GIB = 2**20, 2**30

MIG_SLICES = {
    "1g.5gb": 4.75, "2g.10gb": 9.62, "3g.20gb": 19.5, "4g.20gb": 19.5, "7g.40gb": 39.25,
    "1g.10gb": 9.5, "1g.20gb": 19.5, "2g.20gb": 19.5, "3g.40gb": 39.25, "4g.40gb": 39.25, "7g.80gb": 78.75,
    "1g.6gb": 5.81, "2g.12gb": 11.69, "4g.24gb": 23.44,
}  # fmt: skip
"""GiB of each MIG profile of A100 40 GB, of A100 and H100 80 GB, and of A30, as `nvidia-smi mig -lgip` lists them;
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
        return MemoryTarget(int(slice_gib * GIB), True)
    if found := _SIZE.fullmatch(name.removeprefix("gpu-")):
        return MemoryTarget(int(float(found[1]) * _UNITS[found[2]]), name.startswith("gpu-"))
    slices = ", ".join(f"mig-{known}" for known in MIG_SLICES)
    raise ContractError(f"target {target!r} is unknown, expected a size (16Gi), a GPU's (gpu-24Gi) or one of {slices}")


def _readable(num_bytes: float) -> str:
    """The size in GiB or MiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


@dataclass(frozen=True, kw_only=True)
class GraphSizes:
    """Sizes of one graph, in bytes but for the entries."""

    tables_in_message: int
    tables_beside: int
    dense: int
    """All other constants: the network's weights."""
    label_encoder_entries: int
    row: int
    """Activations of one row: its ids and vectors, and what goes into and comes out of each matrix of weights."""
    files: int

    @classmethod
    def of(cls, folder: Path) -> GraphSizes:
        """The sizes of the graph in `folder`.

        Raises:
            ContractError: there is none, or it cannot be read.
        """
        import onnx

        graph = folder / GRAPH_FILE
        try:
            message = onnx.load(str(graph), load_external_data=False).graph
        except Exception as error:  # Protobuf's error for a damaged message has no public class.
            raise ContractError(f"graph {graph} cannot be read: {error}") from error
        constants = {tensor.name: tensor for tensor in message.initializer}
        if "embeddings" not in constants:
            raise ContractError(f"graph {graph} has no embedding table, expected a graph that `graph` wrote")
        tables = [constants.pop(name) for name in ("embeddings", "cell_keys", "cell_values") if name in constants]
        keys = [each.t for node in message.node for each in node.attribute if each.name == "keys_tensor"]
        matrices = sum(sum(tensor.dims) for tensor in constants.values() if len(tensor.dims) == 2)
        vectors = 2 * CATEGORICAL_INPUT.width * tables[0].dims[1]
        lengths = [int(e.value) for table in tables for e in table.external_data if e.key == "length"]
        return cls(
            tables_in_message=sum(table.ByteSize() for table in tables),
            tables_beside=sum(lengths),
            dense=sum(tensor.ByteSize() for tensor in constants.values()),
            label_encoder_entries=sum(int(tensor.dims[0]) for tensor in keys),
            row=4 * (DENSE_INPUT.width + vectors + matrices) + 10 * 8 * CATEGORICAL_INPUT.width,
            files=graph_bytes(folder),
        )


def memory_needed(sizes: GraphSizes, *, instances: int, versions: int = 2, on_gpu: bool = False) -> dict[str, int]:
    """Bytes that serving `versions` graphs of these sizes at once takes, addend by addend.

    Args:
        sizes: Of one graph.
        instances: Instances of each version.
        versions: Loaded at once; during a release the new one beside the old.
        on_gpu: Count the GPU's memory; else the host's.
    """
    sessions = versions * instances
    activations = sizes.row * MAX_BATCH_ROWS * sessions
    if on_gpu:
        # Every session has its own copy of all constants, and the arena of the activations may double itself.
        return {
            "tables": (sizes.tables_in_message + sizes.tables_beside) * sessions,
            "dense weights": sizes.dense * sessions,
            "activations": 2 * activations,
            "CUDA (allowance, not measured)": _CUDA_CONTEXT + _CUDA_SESSION * sessions,
        }
    return {
        "tables in the message": sizes.tables_in_message * sessions,
        # Mapped, once per version.
        "tables beside it": sizes.tables_beside * versions,
        "vocabularies": hash_map_bytes(sizes.label_encoder_entries) * sessions,
        # As stored, and as packed for the processor.
        "dense weights": 2 * sizes.dense * sessions,
        "activations": activations,
        # The message, while one session parses it.
        "opening": sizes.files - sizes.tables_beside,
        "processes": _SERVER_BYTES + (_PROCESS_BYTES + _SESSION_BYTES) * sessions,
    }


def hash_map_bytes(entries: int) -> int:
    """Bytes of a LabelEncoder of `entries`; 0 of none.

    >>> hash_map_bytes(1_000_000)
    67651584
    """
    if not entries:
        return 0
    places = 1 << (entries * 8 // 7).bit_length()
    return places * _HASH_MAP_SLOT + entries * _ATTRIBUTE_BYTES


def check_fits(folder: Path, target: str, *, instances: int, versions: int = 2) -> None:
    """Refuses a graph that the target's memory cannot hold.

    Args:
        folder: Where the graph lies.
        target: As `parse_target` reads it; empty = nothing is checked.
        instances: Instances of each version.
        versions: Loaded at once; during a release the new one beside the old, which is taken to be as large.

    Raises:
        ContractError: it does not fit, with every addend; or the target or the graph cannot be read.
    """
    if not target:
        return
    memory = parse_target(target)
    addends = memory_needed(GraphSizes.of(folder), instances=instances, versions=versions, on_gpu=memory.is_gpu)
    if (needed := sum(addends.values())) > memory.num_bytes:
        parts = "; ".join(f"{name} {_readable(number)}" for name, number in addends.items() if number)
        raise ContractError(
            f"graph {folder} would take about {_readable(needed)} in {versions} versions of {instances} instances, "
            f"expected at most the {_readable(memory.num_bytes)} of {target}: {parts}"
        )
