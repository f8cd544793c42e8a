"""The files that are a served graph, as `store.served_graph` has them, and what can be wrong between them.

`model.data` must lie beside `model.onnx` as a file or a hard link: ONNX Runtime refuses a symbolic link that leads out
of the folder. Making them is `graph`'s, placing them `repository`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.store.served_graph import DATA_FILE, GRAPH_FILE, graph_bytes, graph_sha256

__all__ = ["DATA_FILE", "GRAPH_FILE", "data_fault", "graph_bytes", "graph_sha256"]


def data_fault(graph: Path) -> str | None:
    """What is wrong with the `model.data` beside the message `graph`; None if nothing, or if there is no message.

    Sizes are compared, no contents.
    """
    import onnx

    try:
        message = onnx.load(str(graph), load_external_data=False)
    except Exception:  # Protobuf's error for a damaged message has no public class; whoever opens it names the fault.
        return None
    ends = [_end(tensor) for tensor in message.graph.initializer if tensor.external_data]
    if not ends:
        return None
    data = graph.with_name(DATA_FILE)
    if not data.is_file():
        return f"its tables' file {data} is absent, or no file"
    if (found := data.stat().st_size) < max(ends):
        return f"its tables' file {data} has {found} bytes, expected {max(ends)}: it is not whole"
    return None


def _end(tensor: Any) -> int:
    places = {entry.key: entry.value for entry in tensor.external_data}
    return int(places["offset"]) + int(places["length"])
