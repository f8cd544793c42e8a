"""The model as Triton's python backend runs it; a copy of this file lies in every version folder as `model.py`.

Runs inside tritonserver's own Python, so it imports nothing of this repository: tensor names and widths come from the
model's configuration. Each request is checked by itself, because one that makes ONNX Runtime raise would take every
other request of its dynamic batch with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

# With numpy 2 this server reads inputs wrong and sends empty outputs, without any error.
assert int(np.__version__.split(".")[0]) < 2, f"numpy is {np.__version__}, expected < 2"


class TritonPythonModel:
    """What the python backend calls: one instance per model version."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the graph that lies beside this file, on one thread: instances, not threads, use the cores."""
        config = json.loads(args["model_config"])
        self._inputs = [tensor["name"] for tensor in config["input"]]
        self._output = config["output"][0]["name"]
        self._floats = [tensor["name"] for tensor in config["input"] if tensor["data_type"] == "TYPE_FP32"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        graph = Path(__file__).resolve().with_name("model.onnx")
        self._session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order: probabilities, or that request's own error."""
        responses: list[Any] = [None] * len(requests)
        good: list[tuple[int, dict[str, np.ndarray[Any, Any]]]] = []
        for at, request in enumerate(requests):
            tensors = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
            fault = self._fault(tensors)
            if fault is None:
                good.append((at, tensors))
            else:
                responses[at] = _refusal(fault, pb_utils.TritonError.INVALID_ARG)
        if good:
            self._answer(good, responses)
        return responses

    def _fault(self, tensors: dict[str, np.ndarray[Any, Any]]) -> str | None:
        for name in self._floats:
            infinite = np.isinf(tensors[name])
            if infinite.any():
                row, column = np.argwhere(infinite)[0]
                value = tensors[name][row, column]
                return f"{name}[{row}, {column}] is {value}, expected a finite value, or NaN for missing"
        return None

    def _answer(self, good: list[tuple[int, dict[str, np.ndarray[Any, Any]]]], responses: list[Any]) -> None:
        first = good[0][1]
        batch = first
        if len(good) > 1:
            batch = {name: np.concatenate([tensors[name] for _, tensors in good]) for name in first}
        try:
            scores = self._session.run([self._output], batch)[0]
        except Exception as error:
            # The traceback names paths of this machine: it goes to the server's log, not to clients.
            pb_utils.Logger.log_error(f"graph failed on a batch of {len(good)} requests: {error}")
            for at, _ in good:
                responses[at] = _refusal("the model failed on this batch", pb_utils.TritonError.INTERNAL)
            return
        start = 0
        for at, tensors in good:
            end = start + len(tensors[self._inputs[0]])
            responses[at] = pb_utils.InferenceResponse([pb_utils.Tensor(self._output, scores[start:end])])
            start = end


def _refusal(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))
