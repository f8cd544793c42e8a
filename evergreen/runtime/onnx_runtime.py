"""Import of ONNX Runtime without telemetry, which its wheels send unless a variable forbids it.

The package reads the variable at import, so every module of this project imports the package
through this module. Triton's model file cannot do that. A program that starts Triton therefore
passes `SILENT` to it.
"""

import os
from typing import Any

SILENT = {"ORT_DISABLE_TELEMETRY": "1"}
"""Environment variables that disable telemetry. No collector is looked up, and no device id is
stored in the home folder."""


def silent_onnxruntime() -> Any:
    """Return the package `onnxruntime`, imported with telemetry disabled."""
    os.environ.update(SILENT)
    import onnxruntime

    return onnxruntime
