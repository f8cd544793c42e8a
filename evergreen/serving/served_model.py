"""The model as Triton's python backend runs it; a copy of this file lies in every version folder as `model.py`.

Runs inside tritonserver's own Python, so it imports nothing of this repository: tensor names and widths come from the
model's configuration. Each request is answered for itself, because one that makes ONNX Runtime raise would take every
other request of its dynamic batch with it.

Almost all of a request's time here is ONNX Runtime's: for one row 83 us, for 64 rows 343 us, beside 8 us for reading
the tensors, 10 for the check and 16 for the answer. Its memory arena, memory pattern and optimization level were
measured to make no difference, and what an IO binding could save is within those 16 us.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# With numpy 2 this server reads inputs wrong and sends empty outputs, without any error.
assert int(np.__version__.split(".")[0]) < 2, f"numpy is {np.__version__}, expected < 2"

LOADING_NICENESS = 10

Tensors = dict[str, "np.ndarray[Any, Any]"]


class TritonPythonModel:
    """What the python backend calls: one instance per model version."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the graph that lies beside this file, on one thread: instances, not threads, use the cores.

        The cores may be busy with the version that serves meanwhile, so this is done by a thread of low priority.
        Linux keeps priorities by thread, and what was given away cannot be taken back; this thread ends.
        """
        config = json.loads(args["model_config"])
        self._inputs = [tensor["name"] for tensor in config["input"]]
        self._output = config["output"][0]["name"]
        self._floats = [tensor["name"] for tensor in config["input"] if tensor["data_type"] == "TYPE_FP32"]
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(LOADING_NICENESS,)) as loader:
            self._session = loader.submit(_open_graph).result()

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order: probabilities, or that request's own error."""
        tensors = [self._tensors(request) for request in requests]
        batch = self._joined(tensors)
        # Looking at all rows at once costs 10 us; only where something is wrong is it worth asking who sent it.
        if self._fault(batch) is None:
            return self._answers(tensors, batch)
        faults = [self._fault(each) for each in tensors]
        good = [each for each, fault in zip(tensors, faults) if fault is None]
        answers = iter(self._answers(good, self._joined(good)) if good else [])
        return [_refusal(f, pb_utils.TritonError.INVALID_ARG) if f is not None else next(answers) for f in faults]

    def _tensors(self, request: Any) -> Tensors:
        return {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}

    def _joined(self, tensors: list[Tensors]) -> Tensors:
        if len(tensors) == 1:
            return tensors[0]
        return {name: np.concatenate([each[name] for each in tensors]) for name in self._inputs}

    def _fault(self, tensors: Tensors) -> str | None:
        for name in self._floats:
            infinite = np.isinf(tensors[name])
            if infinite.any():
                row, column = np.argwhere(infinite)[0]
                value = tensors[name][row, column]
                return f"{name}[{row}, {column}] is {value}, expected a finite value, or NaN for missing"
        return None

    def _answers(self, tensors: list[Tensors], batch: Tensors) -> list[Any]:
        """The responses to requests whose rows, one behind the other, are `batch`."""
        try:
            scores = self._session.run([self._output], batch)[0]
        except Exception as error:
            # The traceback names paths of this machine: it goes to the server's log, not to clients.
            pb_utils.Logger.log_error(f"graph failed on a batch of {len(tensors)} requests: {error}")
            return [_refusal("the model failed on this batch", pb_utils.TritonError.INTERNAL) for _ in tensors]
        responses, start = [], 0
        for each in tensors:
            end = start + len(each[self._inputs[0]])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(self._output, scores[start:end])]))
            start = end
        return responses


def _open_graph() -> Any:
    # Importing it is half of the work of loading.
    import onnxruntime

    _check_hashes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    graph = Path(__file__).resolve().with_name("model.onnx")
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def _check_hashes() -> None:
    """Refuse to serve a graph whose bytes are not those that were released: few flipped bits show in golden rows."""
    record = Path(__file__).resolve().with_name("version.json")
    for file in json.loads(record.read_bytes())["files"]:
        if file["name"] in ("model.onnx", "model.data"):
            digest = hashlib.sha256()  # `file_digest` is not in the Python 3.10 of Triton's images
            with open(record.with_name(file["name"]), "rb") as content:
                while chunk := content.read(1 << 20):
                    digest.update(chunk)
            if (found := digest.hexdigest()) != file["sha256"]:
                raise ValueError(f"{file['name']} has sha256 {found}, expected {file['sha256']} as released")


def _refusal(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))
