"""Asks servers over gRPC or HTTP in a closed or an open loop, and notes when each answer came.

Requests are built beforehand, because the server is what is measured: a call sends bytes and reads the answer's. gRPC
goes through grpc.aio, HTTP/1.1 through asyncio's streams with connections kept open. No call is ever cancelled (Triton
2.51 does not survive it). `inference_client.load` measures what users of the client library feel; here the library's
own work is left out, and every request's time is kept, to see what happened while a release was on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from components.contracts.criteo import MISSING_CATEGORY
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, GRPC_OPTIONS, PROBABILITY_OUTPUT
from inference_client.rows import FeatureRows

_CONNECTIONS = 128
"""To a web server at once; what is due beyond waits, and its wait counts."""

Scores = NDArray[np.float32]


class Failed(Exception):
    """A request was not answered; the message says why."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What came back in one run."""

    asked: NDArray[np.float64]
    """When each request was due, seconds of `time.perf_counter`."""
    latencies: NDArray[np.float64]
    """Seconds from then to the answer."""
    seconds: float
    """From the first request to the last answer."""
    num_failed: int
    errors: tuple[str, ...] = ()
    """The first few distinct ones."""


Caller = Callable[[int], Awaitable[Scores]]


async def closed_loop(
    call: Caller, concurrency: int, seconds: float, *, clock: Callable[[], float] = time.perf_counter
) -> Answers:
    """`concurrency` callers, each asking as soon as it is answered, for `seconds` of `clock`."""
    notes = _Notes(clock)
    began = clock()
    numbers = iter(range(2**62))

    async def ask_on() -> None:
        while (now := clock()) < began + seconds:
            await notes.ask(call, next(numbers), now)

    await asyncio.gather(*(ask_on() for _ in range(concurrency)))
    return notes.answers(clock() - began)


async def open_loop(
    call: Caller,
    rate: float,
    seconds: float | None,
    *,
    seed: int = 0,
    until: asyncio.Event | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Answers:
    """Requests at the times of a Poisson process of `rate` per second, however late answers are.

    Latency counts from the time a request was due, so that a stall is felt by all who would have come in it.

    Args:
        call: Asks.
        rate: Requests per second.
        seconds: For how long; None = until `until` is set.
        seed: Of the times.
        until: Ends the load.
        clock: Seconds.
        sleep: Waits seconds of `clock`.
    """
    random = np.random.default_rng(seed)
    notes, waiting = _Notes(clock), set()
    began = due = clock()
    i = 0
    while (seconds is None or due < began + seconds) and not (until and until.is_set()):
        if (left := due - clock()) > 0:
            await sleep(left)
        task = asyncio.ensure_future(notes.ask(call, i, due))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        due += random.exponential(1 / rate)
        i += 1
    if waiting:
        await asyncio.wait(waiting)
    return notes.answers(clock() - began)


class _Notes:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: list[float] = []
        self._latencies: list[float] = []
        self._num_failed = 0
        self._errors: dict[str, None] = {}

    async def ask(self, call: Caller, i: int, due: float) -> None:
        try:
            await call(i)
        except Failed as error:
            self._num_failed += 1
            if len(self._errors) < 5:
                self._errors[str(error)] = None
            return
        self._asked.append(due)
        self._latencies.append(self._clock() - due)

    def answers(self, seconds: float) -> Answers:
        return Answers(np.array(self._asked), np.array(self._latencies), seconds, self._num_failed, tuple(self._errors))


class GrpcCaller:
    """Asks the model `name` of a Triton, `batch` rows at a time."""

    def __init__(self, url: str, name: str, rows: FeatureRows, *, batch: int) -> None:
        self._requests = [_infer_request(name, part) for part in _parts(rows, batch)]
        self._channel = grpc.aio.insecure_channel(url, options=list(GRPC_OPTIONS))
        self._infer = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelInfer

    async def __call__(self, i: int) -> Scores:
        """The scores of the `i`-th request."""
        try:
            answer = await self._infer(self._requests[i % len(self._requests)])
        except grpc.aio.AioRpcError as error:
            raise Failed(str(error.details())) from error
        return np.frombuffer(answer.raw_output_contents[0], np.float32)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()


class HttpCaller:
    """Asks a web server at host:port, as JSON or as the tensors' bytes."""

    def __init__(self, address: str, path: str, rows: FeatureRows, *, batch: int) -> None:
        self._host, self._port = address.rsplit(":", 1)
        self._is_json = path == "/json"
        encode = _json_body if self._is_json else _binary_body
        self._requests = [_http_request(self._host, path, encode(part)) for part in _parts(rows, batch)]
        self._free = asyncio.Semaphore(_CONNECTIONS)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self, i: int) -> Scores:
        """The scores of the `i`-th request."""
        try:
            async with self._free:
                head, body = await self._exchange(self._requests[i % len(self._requests)])
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Failed(str(error)) from error
        if not head.startswith(b"HTTP/1.1 200"):
            raise Failed(head.split(b"\r\n")[0].decode())
        if self._is_json:
            return np.array(json.loads(body)["probability"], np.float32)
        return np.frombuffer(body, np.float32)

    async def _exchange(self, request: bytes) -> tuple[bytes, bytes]:
        streams = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        reader, writer = streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        self._idle.append(streams)
        return head, body

    async def close(self) -> None:
        """Closes the connections."""
        while self._idle:
            self._idle.pop()[1].close()


def _parts(rows: FeatureRows, batch: int) -> list[FeatureRows]:
    """At most 64 requests of `batch` rows each."""
    starts = range(0, min(len(rows.dense), 64 * batch) - batch + 1, batch)
    return [rows.take(slice(start, start + batch)) for start in starts]


def _infer_request(name: str, rows: FeatureRows) -> Any:
    request = service_pb2.ModelInferRequest(model_name=name)
    for tensor, values in ((DENSE_INPUT, rows.dense), (CATEGORICAL_INPUT, rows.categorical)):
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
    request.outputs.add(name=PROBABILITY_OUTPUT.name)
    return request


def _json_body(rows: FeatureRows) -> bytes:
    dense = [[None if np.isnan(v) else v for v in row] for row in rows.dense.tolist()]
    categorical = [[None if v == MISSING_CATEGORY else v for v in row] for row in rows.categorical.tolist()]
    return json.dumps({"dense": dense, "categorical": categorical}).encode()


def _binary_body(rows: FeatureRows) -> bytes:
    return rows.dense.tobytes() + rows.categorical.tobytes()


def _http_request(host: str, path: str, body: bytes) -> bytes:
    kind = "application/json" if path == "/json" else "application/octet-stream"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
