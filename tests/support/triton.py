"""Models and servers for tests of a real Triton."""

from __future__ import annotations

from pipelines.local.triton import TritonServer

ECHO = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        dense = [pb_utils.get_input_tensor_by_name(r, "dense").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("probability", d[:, :1])]) for d in dense]
"""


class MeteredTriton(TritonServer):
    """With what the Deployment asks of its metrics."""

    def _flags(self, *arguments):
        return [*super()._flags(*arguments), "--metrics-config=summary_latencies=true"]
