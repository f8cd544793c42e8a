"""Asks servers over gRPC or HTTP, with as little of its own as can be; the same for every contestant of a kind.

Requests are built beforehand, since what is measured is the server: a call sends bytes and reads the answer's. gRPC
goes through grpc.aio, HTTP/1.1 through asyncio's streams with connections kept open. No call is ever cancelled (Triton
2.51 does not survive it).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.serving_load import Failed, Scores
from benchmarks.serving_model import Rows
from components.contracts.criteo import MISSING_CATEGORY
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, GRPC_OPTIONS, PROBABILITY_OUTPUT

_CONNECTIONS = 128
"""To a web server at once; what is due beyond waits, and its wait counts."""


class GrpcCaller:
    """Asks the model `name` of a Triton, `batch` rows at a time."""

    def __init__(self, url: str, name: str, rows: Rows, batch: int) -> None:
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

    def __init__(self, address: str, path: str, rows: Rows, batch: int) -> None:
        self._host, _, self._port = address.rpartition(":")
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


def _parts(rows: Rows, batch: int) -> list[Rows]:
    """At most 64 requests of `batch` rows each."""
    starts = range(0, min(len(rows.dense), 64 * batch) - batch + 1, batch)
    return [Rows(dense=rows.dense[i : i + batch], categorical=rows.categorical[i : i + batch]) for i in starts]


def _infer_request(name: str, rows: Rows) -> Any:
    request = service_pb2.ModelInferRequest(model_name=name)
    for tensor, values in ((DENSE_INPUT, rows.dense), (CATEGORICAL_INPUT, rows.categorical)):
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=values.shape)
        request.raw_input_contents.append(values.tobytes())
    request.outputs.add(name=PROBABILITY_OUTPUT.name)
    return request


def _json_body(rows: Rows) -> bytes:
    dense = [[None if np.isnan(v) else v for v in row] for row in rows.dense.tolist()]
    categorical = [[None if v == MISSING_CATEGORY else v for v in row] for row in rows.categorical.tolist()]
    return json.dumps({"dense": dense, "categorical": categorical}).encode()


def _binary_body(rows: Rows) -> bytes:
    return rows.dense.tobytes() + rows.categorical.tobytes()


def _http_request(host: str, path: str, body: bytes) -> bytes:
    kind = "application/json" if path == "/json" else "application/octet-stream"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
