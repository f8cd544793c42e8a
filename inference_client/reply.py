"""What is sent to Triton and what comes back: checked rows to tensors, a reply to checked probabilities.

Where a server refuses rows that follow the contracts, its model follows others: `schema_fault` says where.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT, Tensor
from inference_client.errors import BadReply, BadRequest
from inference_client.scorer import Scored

OUTPUTS = [InferRequestedOutput(PROBABILITY_OUTPUT.name)]


def check_rows(dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> None:
    """Returns if these are rows as `contracts.serving` describes them.

    Raises:
        BadRequest: a dtype or a shape differs, or there are no rows.
    """
    wanted = (("dense", dense, np.float32, NUM_DENSE), ("categorical", categorical, np.int64, NUM_CATEGORICAL))
    for name, array, dtype, width in wanted:
        if array.dtype != dtype or array.ndim != 2 or array.shape[1] != width or not len(array):
            raise BadRequest(
                f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} [n, {width}] with n >= 1"
            )
    if len(dense) != len(categorical):
        raise BadRequest(f"dense has {len(dense)} rows and categorical {len(categorical)}, expected the same number")


def tensors(dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> list[Any]:
    """The inputs of one request."""
    return [_tensor(DENSE_INPUT, dense), _tensor(CATEGORICAL_INPUT, categorical)]


def read_reply(reply: Any, num_rows: int, server: str) -> Scored:
    """The checked content of one reply.

    Raises:
        BadReply: see `errors.BadReply`.
    """
    version = reply.get_response().model_version
    try:
        scores = reply.as_numpy(PROBABILITY_OUTPUT.name)
    except ValueError as error:
        raise BadReply(f"server {server} sent a reply whose bytes do not fill its shape: {error}") from error
    if scores is None:
        raise BadReply(f"server {server} sent no output {PROBABILITY_OUTPUT.name}")
    if scores.dtype != np.float32 or scores.shape != (num_rows, PROBABILITY_OUTPUT.width):
        raise BadReply(
            f"server {server} sent {scores.dtype} {list(scores.shape)}, "
            f"expected float32 {[num_rows, PROBABILITY_OUTPUT.width]}"
        )
    flat = scores[:, 0]
    # NaN fails both comparisons.
    if not ((flat >= 0) & (flat <= 1)).all():
        bad = flat[~((flat >= 0) & (flat <= 1))]
        raise BadReply(f"server {server} sent {len(bad)} scores outside [0, 1], the first is {bad[0]}")
    if not version.isdigit():
        raise BadReply(f"server {server} names its version {version!r}, expected a number")
    return Scored(flat, int(version))


def schema_fault(metadata: Any) -> str | None:
    """Where a served model's tensors (Triton's ModelMetadataResponse) differ from the contracts; None = nowhere."""
    for role, told, wanted in (
        ("input", metadata.inputs, (DENSE_INPUT, CATEGORICAL_INPUT)),
        ("output", metadata.outputs, (PROBABILITY_OUTPUT,)),
    ):
        found = {tensor.name: f"{tensor.datatype} {list(tensor.shape)}" for tensor in told}
        for tensor in wanted:
            expected = f"{tensor.datatype} {[-1, tensor.width]}"
            if (served := found.pop(tensor.name, None)) != expected:
                return f"{role} {tensor.name} is {served or 'absent'}, expected {expected}"
        if role == "input" and found:
            return f"input {next(iter(found))} is asked for as well, expected only the agreed ones"
    return None


def _tensor(tensor: Tensor, rows: NDArray[Any]) -> Any:
    return InferInput(tensor.name, list(rows.shape), tensor.datatype).set_data_from_numpy(rows)
