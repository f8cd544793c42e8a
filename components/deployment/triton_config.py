"""`config.pbtxt`: what Triton is told of the served model, generated from the contracts.

One text for both servers: `python` (a laptop's tritonserver: its python backend runs `served_model.py` with ONNX
Runtime) and `onnxruntime` (Triton's images: their ONNX Runtime backend reads `model.onnx` itself; the server wheel that
runs on a laptop does not hold that backend, so this text is checked against the format but not by running it here).

Clients are given generous deadlines (a cancelled gRPC call can kill Triton 2.51), so the server bounds its queue
instead: beyond `MAX_QUEUED_REQUESTS`, or after `QUEUE_TIMEOUT_MICROSECONDS`, a request is refused UNAVAILABLE.
"""

from __future__ import annotations

from components.contracts.errors import ContractError
from components.contracts.serving import (
    CATEGORICAL_INPUT,
    DENSE_INPUT,
    MAX_BATCH_ROWS,
    PROBABILITY_OUTPUT,
    Tensor,
)

PYTHON = "python"
ONNXRUNTIME = "onnxruntime"
SERVERS = (PYTHON, ONNXRUNTIME)

MAX_QUEUED_REQUESTS = 512
QUEUE_TIMEOUT_MICROSECONDS = 5_000_000


def triton_config(name: str, server: str, versions: list[int], *, instances: int = 1) -> str:
    """The text of `config.pbtxt` for the model `name`, serving exactly `versions`.

    Args:
        name: Triton's name of the model.
        server: `python` or `onnxruntime`.
        versions: Versions to load; the highest answers requests that name none.
        instances: Copies of the model that work side by side.

    Raises:
        ContractError: unknown `server`, or no versions.
    """
    if server not in SERVERS:
        raise ContractError(f"server is {server!r}, expected one of {', '.join(SERVERS)}")
    if not versions or min(versions) < 1:
        raise ContractError(f"versions are {versions}, expected one or more, each at least 1")
    return _TEMPLATE.format(
        name=name,
        backend=server,
        max_batch_size=MAX_BATCH_ROWS,
        inputs=",\n".join(_tensor(tensor) for tensor in (DENSE_INPUT, CATEGORICAL_INPUT)),
        outputs=_tensor(PROBABILITY_OUTPUT),
        instances=instances,
        queue_timeout=QUEUE_TIMEOUT_MICROSECONDS,
        queue_size=MAX_QUEUED_REQUESTS,
        versions=", ".join(str(version) for version in sorted(versions)),
        parameters=_ONE_THREAD if server == ONNXRUNTIME else "",
    )


def _tensor(tensor: Tensor) -> str:
    return f'  {{ name: "{tensor.name}" data_type: TYPE_{tensor.datatype} dims: [ {tensor.width} ] }}'


_TEMPLATE = """\
# Written by components.deployment at each release; edits are overwritten.
name: "{name}"
backend: "{backend}"
max_batch_size: {max_batch_size}
input [
{inputs}
]
output [
{outputs}
]
instance_group [ {{ count: {instances} kind: KIND_CPU }} ]
dynamic_batching {{
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: {queue_timeout}
    allow_timeout_override: false
    max_queue_size: {queue_size}
  }}
}}
version_policy {{ specific {{ versions: [ {versions} ] }} }}
{parameters}"""

_ONE_THREAD = """\
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
parameters { key: "inter_op_thread_count" value: { string_value: "1" } }
"""
