"""Start the compared servers, and connect to them.

Deployment's command releases our model onto the bundled tritonserver. The same server loads the
echo model, which computes nothing. The reference runs in a second server of the same binary. The
models of this server use the environment `serving-peers`. The web server runs the graph of our
model.

Requests are built before the measurement, because only the server is measured. A call only sends
bytes, and reads the bytes of the response. No call is ever cancelled, because Triton 2.51 would
crash.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.command import run_to_end
from benchmarks.serving_model import Models
from demo.environments import REPOSITORY
from demo.stack import LOOPBACK, Stack, answers, free_port
from demo.triton import TritonServer
from evergreen.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from evergreen.contracts.manifests import Model, Release
from evergreen.contracts.serving import (
    GRPC_OPTIONS,
    INPUT_TYPES,
    MAX_BATCH_ROWS,
    PROBABILITY_OUTPUT,
    named_inputs,
)
from evergreen.networks.files import NETWORK_FILE
from evergreen.registry.recommenders import accept
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import PermanentError
from evergreen.serving.repository.triton_config import ServingOptions, read_options, triton_config
from evergreen.serving.servers import Triton
from inference_client.rows import FeatureRows

OURS = "evergreen"
FLOOR, REFERENCE = "floor", "reference"
WEB = "web"
PEERS = Path(__file__).with_name("serving_peers")


_CONNECTIONS = 128
"""Maximum connections to a web server. If all connections are in use, a request waits. The wait is
a part of its measured latency."""

Scores = NDArray[np.float32]


class RequestFailed(PermanentError):
    """A server did not score a request. The message contains the reason."""


class GrpcCaller:
    """Sender of requests with `batch` rows to the model `name` of a Triton server."""

    def __init__(self, url: str, name: str, rows: FeatureRows, *, batch: int) -> None:
        self._requests = [_infer_request(name, part) for part in _request_rows(rows, batch)]
        self._channel = grpc.aio.insecure_channel(url, options=list(GRPC_OPTIONS))
        self._infer = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelInfer

    async def __call__(self, i: int) -> Scores:
        """Return the scores of the `i`-th request."""
        try:
            response = await self._infer(self._requests[i % len(self._requests)])
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(str(error.details())) from error
        return np.frombuffer(response.raw_output_contents[0], np.float32)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class HttpCaller:
    """Sender of requests to a web server at host:port. A request has the bytes of the tensors."""

    def __init__(self, address: str, path: str, rows: FeatureRows, *, batch: int) -> None:
        self._host, self._port = address.rsplit(":", 1)
        self._requests = [
            _http_request(self._host, path, part) for part in _request_rows(rows, batch)
        ]
        self._free = asyncio.Semaphore(_CONNECTIONS)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self, i: int) -> Scores:
        """Return the scores of the `i`-th request."""
        try:
            async with self._free:
                head, body = await self._exchange(self._requests[i % len(self._requests)])
        except (OSError, asyncio.IncompleteReadError) as error:
            raise RequestFailed(str(error)) from error
        if not head.startswith(b"HTTP/1.1 200"):
            raise RequestFailed(head.split(b"\r\n")[0].decode())
        return np.frombuffer(body, np.float32)

    async def _exchange(self, request: bytes) -> tuple[bytes, bytes]:
        streams = (
            self._idle.pop()
            if self._idle
            else await asyncio.open_connection(self._host, self._port)
        )
        reader, writer = streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        self._idle.append(streams)
        return head, body

    async def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop()[1].close()


def _request_rows(rows: FeatureRows, batch: int) -> list[FeatureRows]:
    """Return the rows of at most 64 requests with `batch` rows each."""
    starts = range(0, min(len(rows.dense), 64 * batch) - batch + 1, batch)
    return [rows.take(slice(start, start + batch)) for start in starts]


def _infer_request(name: str, rows: FeatureRows) -> Any:
    request = service_pb2.ModelInferRequest(model_name=name)
    for tensor, values in named_inputs(rows.dense, rows.categorical).items():
        request.inputs.add(name=tensor, datatype=INPUT_TYPES[tensor], shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
    request.outputs.add(name=PROBABILITY_OUTPUT.name)
    return request


def _http_request(host: str, path: str, rows: FeatureRows) -> bytes:
    body = rows.dense.tobytes() + rows.categorical.tobytes()
    kind = "application/octet-stream"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(frozen=True)
class MeasuredServer:
    """A server to measure."""

    name: str
    address: str
    """host:port of the server."""
    target: str
    """Name of Triton's model, or path of a web server."""

    def connect(self, rows: FeatureRows, batch: int) -> GrpcCaller | HttpCaller:
        """Return a caller that sends `rows` in requests of `batch` rows."""
        kind = HttpCaller if self.target.startswith("/") else GrpcCaller
        return kind(self.address, self.target, rows, batch=batch)


class Released:
    """Triton server of the benchmark, which also releases models."""

    def __init__(self, models: Models) -> None:
        self.repository = models.folder / "repository"
        self.server = TritonServer(self.repository, log=models.folder / "triton.log")
        self.store = models.store
        self._models = models
        self._live: str | None = None

    def command(self, seed: int) -> tuple[list[str], Path]:
        """Return the command that releases the model with this seed, and the path of its output."""
        output = self._models.folder / f"release-{seed}.json"
        flags = {
            "run": f"benchmark-{seed}",
            "store": self._models.store.as_uri(),
            "output": output,
            "verdict": self._models.verdict(seed, champion=self._live),
        }
        self._live = f"model-{seed}"
        return [
            sys.executable,
            "-m",
            "components.deployment",
            *(f"--{k}={v}" for k, v in flags.items()),
        ], output

    def controller_command(self) -> list[str]:
        """Accept the recommender, and return the command of the controller."""
        now = datetime.now(timezone.utc)
        accept(self.store, CRITEO_RECOMMENDER, who="benchmark", why="its models", now=now)
        return [
            *(sys.executable, "-m", "controller", "--store", str(self.store)),
            *("--repository", self.repository.as_uri(), "--triton-urls", self.server.grpc_url),
        ]

    def release(self, seed: int) -> Release:
        """Release the model with this seed."""
        command, output = self.command(seed)
        run_to_end(command)
        return Release.read(output)

    def options(self) -> ServingOptions:
        """Return the serving options of the released model."""
        return read_options(
            (self.repository / CRITEO_RECOMMENDER.name / "config.pbtxt").read_text()
        )

    def graph(self, version: int) -> Path:
        """Return the path of the served graph."""
        return self.repository / CRITEO_RECOMMENDER.name / str(version) / "model.onnx"


@contextmanager
def running(
    models: Models, peers_python: Path
) -> Iterator[tuple[Released, dict[str, MeasuredServer]]]:
    """Release the model with seed 0 onto our server, and yield it with all servers to measure."""
    ours = Released(models)
    # Triton runs its models with the first Python on PATH.
    variables = {
        "PATH": f"{peers_python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    reference = TritonServer(
        models.folder / "reference", log=models.folder / "reference.log", variables=variables
    )
    _write_reference(models, reference.repository)
    with ExitStack() as stack:
        stack.enter_context(ours.server)
        processes = stack.enter_context(
            Stack(logs=models.folder / "logs", variables={"OMP_NUM_THREADS": "1"})
        )
        processes.start("controller", ours.controller_command())
        version = ours.release(0).version
        _write_floor(ours)
        _load_model(ours.server.grpc_url, FLOOR)
        stack.enter_context(reference)
        _load_model(reference.grpc_url, REFERENCE)
        web = _start_web_server(processes, peers_python, ours.graph(version))
        servers = [
            MeasuredServer(OURS, ours.server.grpc_url, CRITEO_RECOMMENDER.name),
            MeasuredServer(FLOOR, ours.server.grpc_url, FLOOR),
            MeasuredServer(REFERENCE, reference.grpc_url, REFERENCE),
            MeasuredServer(WEB, web, "/score"),
        ]
        yield ours, {server.name: server for server in servers}


def _load_model(url: str, name: str) -> None:
    with closing(Triton(url)) as triton:
        triton.load(name)


def reload_model(url: str, name: str) -> None:
    """Unload a model of the server at `url`, and load it again."""
    with closing(Triton(url)) as triton:
        triton.unload(name)
        triton.load(name)


def _start_web_server(stack: Stack, python: Path, graph: Path) -> str:
    """Start the web server, and return its host:port once it responds."""
    port = free_port()
    address = f"{LOOPBACK}:{port}"
    stack.start(
        "web", [str(python), "-m", "benchmarks.serving_peers.web_server", str(graph), str(port)]
    )
    stack.wait_until(
        lambda: answers(f"http://{address}/ready"),
        what="the web server's start",
        seconds=30,
        every=0.02,
    )
    return address


def _write_floor(ours: Released) -> None:
    """Write the echo model, which is served like ours but computes nothing."""
    folder = ours.repository / FLOOR / "1"
    folder.mkdir(parents=True)
    shutil.copyfile(PEERS / "echo_model.py", folder / "model.py")
    write_whole(
        ours.repository / FLOOR / "config.pbtxt",
        triton_config(FLOOR, ours.options(), [1], features=CRITEO),
    )


def _write_reference(models: Models, repository: Path) -> None:
    """Write the workflow, the network, and the ensemble of both."""
    encoded = (
        'name: "dense_encoded" data_type: TYPE_FP32 dims: [ 13 ]',
        'name: "ids" data_type: TYPE_INT64 dims: [ 26 ]',
    )
    import_from = f'parameters {{ key: "import_from" value: {{ string_value: "{REPOSITORY}" }} }}\n'
    workflow = _write_model(
        repository,
        "workflow",
        "nvtabular_model.py",
        inputs=_TENSORS_IN,
        outputs=encoded,
        extra=import_from,
    )
    shutil.copytree(models.nvtabular, workflow / "nvtabular")
    network = _write_model(
        repository, "network", "network_model.py", inputs=encoded, outputs=_TENSORS_OUT
    )
    np.save(network / "table.npy", models.weights(0).table)
    shutil.copyfile(models.model_folder(0) / Model.WEIGHTS / NETWORK_FILE, network / NETWORK_FILE)
    np.save(
        network / "offsets.npy", np.concatenate([[0], np.cumsum(models.workflow.slot_sizes)[:-1]])
    )
    _write_model(
        repository, REFERENCE, None, inputs=_TENSORS_IN, outputs=_TENSORS_OUT, extra=_ENSEMBLE
    )


def _write_model(
    repository: Path, name: str, code: str | None, *, inputs: Any, outputs: Any, extra: str = ""
) -> Path:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    if code:
        shutil.copyfile(PEERS / code, folder / "model.py")
    lines = [f'name: "{name}"', f"max_batch_size: {MAX_BATCH_ROWS}"]
    lines.append(
        'backend: "python"\ninstance_group [ { count: 1 kind: KIND_CPU } ]'
        if code
        else 'platform: "ensemble"'
    )
    for kind, tensors in (("input", inputs), ("output", outputs)):
        lines += [f"{kind} [ {{ {tensor} }} ]" for tensor in tensors]
    write_whole(repository / name / "config.pbtxt", "\n".join([*lines, extra]))
    return folder


_TENSORS_IN = (
    'name: "dense" data_type: TYPE_FP32 dims: [ 13 ]',
    'name: "categorical" data_type: TYPE_INT64 dims: [ 26 ]',
)
_TENSORS_OUT = ('name: "probability" data_type: TYPE_FP32 dims: [ 1 ]',)
_ENSEMBLE = """\
ensemble_scheduling {
  step [
    {
      model_name: "workflow" model_version: -1
      input_map { key: "dense" value: "dense" }
      input_map { key: "categorical" value: "categorical" }
      output_map { key: "dense_encoded" value: "dense_encoded" }
      output_map { key: "ids" value: "ids" }
    },
    {
      model_name: "network" model_version: -1
      input_map { key: "dense_encoded" value: "dense_encoded" }
      input_map { key: "ids" value: "ids" }
      output_map { key: "probability" value: "probability" }
    }
  ]
}
"""
