"""Imports of the project's source files, by syntax and by loading them in a fresh interpreter."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = (
    "evergreen",
    "components",
    "controller",
    "monitoring",
    "inference_client",
    "pipelines",
    "cli",
    "demo",
    "tools",
)
HEAVY = (
    "kfp",
    "pyarrow",
    "torch",
    "hugectr",
    "nvtabular",
    "merlin",
    "cudf",
    "pandas",
    "dask",
    "tensorflow",
    "tensorflow_data_validation",
    "tritonclient",
    "onnx",
    "onnxruntime",
    "sklearn",
    "google",
)
"""Libraries that take seconds to import, or that an image may lack."""


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the modules in the file's import statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def value_after(code: str, expression: str, *, folder: Path, python_path: Path) -> tuple[Any, str]:
    """Run `code` in a fresh interpreter.

    Return the value of the expression `expression` after `code`, and the interpreter's output.
    """
    printing = f"finally:\n import json, sys\n print(json.dumps({expression}))"
    done = subprocess.run(
        [sys.executable, "-c", f"try:\n {code or 'pass'}\n{printing}"],
        cwd=folder,
        env={"PYTHONPATH": str(python_path), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *printed, value = done.stdout.splitlines()
    return json.loads(value), "\n".join(printed)
