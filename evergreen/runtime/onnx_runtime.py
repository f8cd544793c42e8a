"""Import of ONNX Runtime with its telemetry disabled.

The wheels of ONNX Runtime send telemetry by default.

The import of ONNX Runtime reads the environment variable that disables the telemetry. Every
module of this project therefore imports ONNX Runtime through this module. Code in Triton's model
file cannot set the variable. A program that starts Triton therefore passes the variable in `SILENT`
to it.
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
