"""The reference's second half, for Triton's python backend: the network on encoded rows, on one thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What the python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the graph that lies beside this file."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        graph = Path(__file__).resolve().with_name("model.onnx")
        self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """The probabilities of each request."""
        responses = []
        for request in requests:
            names = ("dense_encoded", "ids")
            rows = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names}
            scores = self._session.run(["probability"], rows)[0]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("probability", scores)]))
        return responses
