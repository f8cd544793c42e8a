"""Serve a model in Triton's python backend.

A copy of this file is in every version folder as `model.py`.

The code runs in the Python of tritonserver, so it must not import other modules of this repository.
The model's configuration contains the tensor names and widths. The model validates each request of
a batch separately. Otherwise, one request for which ONNX Runtime raises an error would fail all
requests of its dynamic batch.

ONNX Runtime takes almost all of the time: 83 us for one row and 343 us for 64 rows. Reading the
tensors takes 8 us, the check takes 10 us, and the response takes 16 us. ONNX Runtime's memory
arena, memory pattern and optimization level made no difference in measurements. An IO binding of
ONNX Runtime could only make the response faster, so it could save at most 16 us.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# With numpy 2, this server reads inputs wrongly and sends empty outputs, without an error.
assert int(np.__version__.split(".")[0]) < 2, f"numpy is {np.__version__}, expected < 2"

LOADING_NICENESS = 10
WARM_BATCHES = (1, 64, 4096)
"""Sizes of the batches that warm up the session: one row, the rows of a usual request, and the rows
of the largest batch."""

Tensors = dict[str, "np.ndarray[Any, Any]"]


class TritonPythonModel:
    """Model class of the python backend, one instance per model version."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph in this file's folder.

        The graph runs on one thread, because several instances share the cores.

        The cores may be busy with the live version, so a separate thread of low priority opens the
        graph and scores golden rows in batches of all sizes. After the warm-up, the session has
        allocated the memory for its largest batch. Without the warm-up, the first batch of 1,024
        rows caused 870 page faults. Linux sets the priority per thread, and a lowered priority
        cannot be raised again. The thread of low priority therefore ends after the load.
        """
        config = json.loads(args["model_config"])
        self._inputs = [tensor["name"] for tensor in config["input"]]
        self._output = config["output"][0]["name"]
        self._floats = [
            tensor["name"] for tensor in config["input"] if tensor["data_type"] == "TYPE_FP32"
        ]
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(LOADING_NICENESS,)) as loader:
            self._session = loader.submit(_open_graph).result()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return one response per request, in order: probabilities or that request's error."""
        tensors = [self._tensors(request) for request in requests]
        batch = self._joined(tensors)
        # Checking all rows at once costs 10 us. Requests are checked one by one only after a fault.
        if self._fault(batch) is None:
            return self._answers(tensors, batch)
        faults = [self._fault(each) for each in tensors]
        good = [each for each, fault in zip(tensors, faults) if fault is None]
        answers = iter(self._answers(good, self._joined(good)) if good else [])
        return [
            _refusal(f, pb_utils.TritonError.INVALID_ARG) if f is not None else next(answers)
            for f in faults
        ]

    def _tensors(self, request: Any) -> Tensors:
        return {
            name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            for name in self._inputs
        }

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
                return (
                    f"{name}[{row}, {column}] is {value}, expected a finite value, or NaN for "
                    "missing"
                )
        return None

    def _answers(self, tensors: list[Tensors], batch: Tensors) -> list[Any]:
        """Score `batch`, and return a response for each request.

        `batch` contains the rows of all requests.
        """
        try:
            scores = self._session.run([self._output], batch)[0]
        except Exception as error:
            # The error contains paths of this machine, so it goes to the server's log and not to
            # clients.
            pb_utils.Logger.log_error(
                f"graph failed on a batch of {len(tensors)} requests: {error}"
            )
            return [
                _refusal("the model failed on this batch", pb_utils.TritonError.INTERNAL)
                for _ in tensors
            ]
        responses, start = [], 0
        for each in tensors:
            end = start + len(each[self._inputs[0]])
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor(self._output, scores[start:end])])
            )
            start = end
        return responses


def _open_graph() -> Any:
    # The import takes half of the loading time, so it runs in the low-priority thread.
    import onnxruntime

    _check_hashes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    graph = Path(__file__).resolve().with_name("model.onnx")
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    _warm(session, graph.with_name("golden.npz"))
    return session


def _warm(session: Any, golden: Path) -> None:
    """Score golden rows in batches of all sizes.

    This function ignores wrong scores, because the probes detect them.
    """
    names = [each.name for each in session.get_inputs()]
    with np.load(golden, allow_pickle=False) as arrays:
        rows = {name: arrays[name] for name in names}
    for size in WARM_BATCHES:
        session.run(
            None, {name: np.resize(rows[name], (size, rows[name].shape[1])) for name in names}
        )


def _check_hashes() -> None:
    """Check the graph's files against the hashes of the release.

    The hashes are needed because golden rows do not detect most flipped bits.
    """
    record = Path(__file__).resolve().with_name("version.json")
    for file in json.loads(record.read_bytes())["files"]:
        if file["name"] in ("model.onnx", "model.data"):
            digest = hashlib.sha256()  # the Python 3.10 of Triton's images has no `file_digest`
            with open(record.with_name(file["name"]), "rb") as content:
                while chunk := content.read(1 << 20):
                    digest.update(chunk)
            if (found := digest.hexdigest()) != file["sha256"]:
                raise ValueError(
                    f"{file['name']} has sha256 {found}, expected {file['sha256']} as released"
                )


def _refusal(message: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, code))
