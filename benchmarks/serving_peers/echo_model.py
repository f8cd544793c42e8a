"""Serve a model that computes nothing, to measure the overhead of Triton's python backend."""

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Class that Triton's python backend calls. The model computes nothing."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return the first dense column of each request."""
        responses = []
        for request in requests:
            dense = pb_utils.get_input_tensor_by_name(request, "dense").as_numpy()
            pb_utils.get_input_tensor_by_name(request, "categorical").as_numpy()
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("probability", dense[:, :1].copy())])
            )
        return responses
