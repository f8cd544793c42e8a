"""ONNX Runtime's Python package, silent: its wheels send telemetry to their maker unless a variable forbids it.

The package reads the variable when it is imported, so every module of ours imports it here. Triton's model file cannot;
whoever starts a process that runs it hands it `SILENT`.
"""

import os
from typing import Any

SILENT = {"ORT_DISABLE_TELEMETRY": "1"}
"""Variables of a process that uses ONNX Runtime: no lookup of a collector, no device id in the home folder."""


def silent_onnxruntime() -> Any:
    """The package `onnxruntime`."""
    os.environ.update(SILENT)
    import onnxruntime

    return onnxruntime
