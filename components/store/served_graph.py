"""The files that are a served graph, and the hash that names them together.

Joins deployment, which writes them, to evaluation, which scores the champion with them. `model.onnx` alone, or with
`model.data` beside it where tables are too large for one protobuf message.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from components.runtime.durable import sha256_file

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.data"


def graph_sha256(folder: Path) -> str:
    """The hash of the graph in `folder`: of `model.onnx` where that is all, else of both files and their names."""
    if not (folder / DATA_FILE).exists():
        return sha256_file(folder / GRAPH_FILE)
    names = f"{GRAPH_FILE} {sha256_file(folder / GRAPH_FILE)}\n{DATA_FILE} {sha256_file(folder / DATA_FILE)}\n"
    return hashlib.sha256(names.encode()).hexdigest()


def graph_bytes(folder: Path) -> int:
    """Size of the graph's files in `folder`."""
    return sum((folder / name).stat().st_size for name in (GRAPH_FILE, DATA_FILE) if (folder / name).exists())
