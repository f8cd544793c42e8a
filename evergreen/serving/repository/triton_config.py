"""Generate `config.pbtxt`, Triton's configuration of the served model, from the contracts.

The model can run in one of two backends. `python` is used by a laptop's tritonserver, whose python
backend runs `served_model.py` with ONNX Runtime. `onnxruntime` is used by Triton's images, whose
ONNX Runtime backend reads `model.onnx` and `model.data` itself. The server wheel for laptops lacks
the backend `onnxruntime`, so on a laptop the configuration of this backend is checked only against
the format. The configuration does not enable TensorRT or another execution accelerator. The graph's
lookups are integer operations, which TensorRT would pass back to the default provider.

Clients get long deadlines, because a cancelled gRPC call can kill Triton 2.51. A server in a
container image limits its queue instead. A request that finds the queue full, or waits longer than
the time limit, is rejected as UNAVAILABLE.

On a laptop, the queue has no limits, because Triton 2.51 stalls if the queue has limits. If a queue
has a size or a timeout, the batcher of the queue sends a batch only if an instance is idle. An
instance that becomes idle does not wake the batcher. The batcher wakes when the next request
arrives, or after 500 ms. While all clients wait for responses, no further request arrives. More
instances make the stall rarer. Without queue limits, the batcher sends batches to busy instances in
advance, and wakes whenever an instance takes one of these batches. Triton 26.08 fixed a related
error, which left instances idle if batches were also delayed (triton-inference-server/server#8870).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from evergreen.config.features import Features
from evergreen.config.release import QUEUE_MICROSECONDS, QUEUED_REQUESTS, ServingSettings
from evergreen.contracts.serving import (
    COLUMNS,
    MAX_BATCH_ROWS,
    PROBABILITY_OUTPUT,
    PYTHON,
    Tensor,
    input_tensors,
)
from evergreen.runtime.errors import ContractError, expect, first_line

ONNXRUNTIME = "onnxruntime"
SERVERS = (PYTHON, ONNXRUNTIME)
CPU = "cpu"
GPU = "gpu"
DEVICES = (CPU, GPU)
WARMUP_BATCH = 64
"""Number of rows of the multi-row warm-up request. The multi-row request allocates the buffers for
batches before the first client connects."""

_KINDS = {CPU: "KIND_CPU", GPU: "KIND_GPU"}


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ServingSettings):
    """Serving options of a model: the settings of its recommender, the backend and the device.

    Raises:
        ContractError: a value is outside the range that servers accept.
    """

    server: str = PYTHON
    """Backend, `python` or `onnxruntime`."""
    device: str = CPU
    """`cpu` or `gpu`. A MIG slice counts as a GPU. The python backend runs the model on the CPU
    only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self, f"one of {', '.join(SERVERS)}", lambda value: value in SERVERS, "server")
        expect(self, f"one of {', '.join(DEVICES)}", lambda value: value in DEVICES, "device")
        if self.server == PYTHON and self.device == GPU:
            raise ContractError(
                f"device is {GPU!r} with server {PYTHON!r}, expected server {ONNXRUNTIME!r} for a "
                "GPU"
            )

    @property
    def queue_limits(self) -> tuple[int, int]:
        """Return the queue's size and its timeout in microseconds. 0 = unlimited."""
        size, timeout = self.max_queued_requests, self.queue_timeout_microseconds
        default_size, default_timeout = _QUEUE_LIMITS[self.server]
        return (
            default_size if size is None else size,
            default_timeout if timeout is None else timeout,
        )


_BUCKETS_MS = [
    0.5,
    *range(1, 16),
    *range(16, 32, 2),
    *range(32, 64, 4),
    *range(64, 129, 16),
    *(192, 256, 384, 512, 1024),
]
"""Upper bounds of the latency histogram's buckets in milliseconds.

Triton counts whole milliseconds, so finer bounds would count nothing. The default buckets of Triton
begin at 100 ms.
"""
_METRICS = {
    "metric_control": [
        {
            "metric_identifier": {"family": "nv_inference_first_response_histogram_ms"},
            "histogram_options": {"buckets": _BUCKETS_MS},
        }
    ]
}
_QUEUE_LIMITS = {PYTHON: (0, 0), ONNXRUNTIME: (QUEUED_REQUESTS, QUEUE_MICROSECONDS)}

WarmupRow: TypeAlias = Mapping[str, str]
"""Name of a file for each input of the model. The file is in the model's folder `warmup` and
contains one row. Triton reads the file as raw little-endian values."""


def triton_config(
    name: str,
    options: ServingOptions,
    versions: Iterable[int],
    *,
    features: Features,
    warmup: Sequence[WarmupRow] = (),
) -> str:
    """Return the text of `config.pbtxt` for the model `name`, which serves exactly `versions`.

    A request without a version is served by the highest of `versions`. Every version must score the
    rows of `warmup` before it is ready.

    Raises:
        ContractError: `versions` is empty or contains a number below 1.
    """
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    wanted = sorted(set(versions))
    if not wanted or wanted[0] < 1:
        raise ContractError(f"versions are {wanted}, expected one or more, each at least 1")
    # Triton expands a warm-up sample of batch size n to n requests with the same row, and runs them
    # as one batch.
    inputs = input_tensors(features)
    samples = [_sample(f"row {at}", row, inputs, batch_size=1) for at, row in enumerate(warmup)]
    if warmup:
        samples.append(_sample("batch", warmup[0], inputs, batch_size=WARMUP_BATCH))
    threads = (
        ("intra_op_thread_count", "inter_op_thread_count") if options.server == ONNXRUNTIME else ()
    )
    queue_size, queue_timeout = options.queue_limits
    document = {
        "name": name,
        "backend": options.server,
        "max_batch_size": MAX_BATCH_ROWS,
        "input": [{"name": tensor.name, **_shape(tensor)} for tensor in inputs],
        "output": [{"name": PROBABILITY_OUTPUT.name, **_shape(PROBABILITY_OUTPUT)}],
        "instance_group": [{"count": options.instances, "kind": _KINDS[options.device]}],
        "dynamic_batching": {
            "max_queue_delay_microseconds": options.max_queue_delay_microseconds,
            "default_queue_policy": {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": queue_timeout,
                "allow_timeout_override": False,
                "max_queue_size": queue_size,
            },
        },
        "response_cache": {"enable": options.response_cache},
        "version_policy": {"specific": {"versions": wanted}},
        "parameters": {
            COLUMNS: {"string_value": json.dumps(features.columns)},
            **{each: {"string_value": "1"} for each in threads},
        },
        "model_warmup": samples,
    }
    if options.server == ONNXRUNTIME:  # Triton 2.51 rejects a configuration with this field
        document["model_metrics"] = _METRICS
    config = json_format.ParseDict(document, model_config_pb2.ModelConfig())
    header = "# Written by components.deployment at each release; edits are overwritten.\n"
    return header + str(text_format.MessageToString(config))


def _shape(tensor: Tensor) -> dict[str, Any]:
    return {"data_type": f"TYPE_{tensor.datatype}", "dims": [tensor.width]}


def _sample(
    name: str, row: WarmupRow, inputs: Iterable[Tensor], *, batch_size: int
) -> dict[str, Any]:
    files = {
        tensor.name: {**_shape(tensor), "input_data_file": row[tensor.name]} for tensor in inputs
    }
    return {"name": name, "batch_size": batch_size, "inputs": files}


def warmup_files_of(text: str) -> set[str]:
    """Return the names of the warm-up files that a configuration needs, relative to `warmup`."""
    return set(re.findall(r'input_data_file: "([^"]+)"', text))


def read_options(text: str) -> ServingOptions:
    """Return the serving options in the text of a configuration.

    Raises:
        ContractError: `text` is not a Triton configuration, or was not written by `triton_config`.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        group = config.instance_group[0]
        policy = config.dynamic_batching.default_queue_policy
        kind = model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind)
        found = (policy.max_queue_size, policy.default_timeout_microseconds)
        size, timeout = (
            None if value == default else value
            for value, default in zip(found, _QUEUE_LIMITS.get(config.backend, found))
        )
        return ServingOptions(
            server=config.backend,
            instances=group.count,
            device=next((device for device, name in _KINDS.items() if name == kind), kind),
            response_cache=config.response_cache.enable,
            warmup_rows=sum(1 for sample in config.model_warmup if sample.batch_size == 1),
            max_queued_requests=size,
            queue_timeout_microseconds=timeout,
            max_queue_delay_microseconds=config.dynamic_batching.max_queue_delay_microseconds,
        )
    except (text_format.ParseError, IndexError) as error:
        raise ContractError(f"configuration cannot be read: {first_line(error)}") from error
