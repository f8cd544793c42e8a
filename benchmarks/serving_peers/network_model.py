"""Run the network on encoded rows in Triton's python backend.

The peer `reference` runs this model after `nvtabular_model`. The model runs on one thread. This
module looks up the embeddings. The network is the ONNX file that training exported. The code is
independent of deployment's graph, so equal scores show that both are correct.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The class that the python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the network and the tables in the folder of this file."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        folder = Path(__file__).resolve().parent
        self._session = onnxruntime.InferenceSession(
            str(folder / "network.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._table, self._offsets = np.load(folder / "table.npy"), np.load(folder / "offsets.npy")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return the probabilities of each request."""
        responses = []
        for request in requests:
            dense = pb_utils.get_input_tensor_by_name(request, "dense_encoded").as_numpy()
            ids = pb_utils.get_input_tensor_by_name(request, "ids").as_numpy()
            rows = {"dense": dense, "embeddings": self._table[ids + self._offsets]}
            logits = self._session.run(["logit"], rows)[0].reshape(-1, 1)
            scores = (1 / (1 + np.exp(-logits))).astype(np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("probability", scores)]))
        return responses
