"""A real gRPC server with Triton's protocol that scores and fails as a test says."""

import asyncio
import json
import threading

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.serving import CATEGORICAL_INPUT, COLUMNS, DENSE_INPUT, PROBABILITY_OUTPUT
from tests.support.served_names import CANARY_NAME, MODEL_NAME


def known_scores(dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
    """Return [n] probabilities that depend on every feature. Only this double computes them."""
    logit = np.nansum(np.log1p(np.maximum(dense.astype(np.float64), 0)), axis=1) / 40
    logit += np.cos(categorical.astype(np.float64)).sum(axis=1) / 5 - 1
    return (1 / (1 + np.exp(-logit))).astype(np.float32)


class ScoringServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Parses the tensors like Triton. `failures` are raised first, one per request."""

    def __init__(self) -> None:
        self.version = 1
        self.versions: list[int] = []
        """Versions of the next answers, before `version`."""
        self.failures: list[tuple[grpc.StatusCode, str]] = []
        self.always: tuple[grpc.StatusCode, str] | None = None
        self.canary_version: int | str | None = None
        """Version under the canary's name. None means that it is not served. A text is sent as an
        unexpected version."""
        self.canary_failure: tuple[grpc.StatusCode, str] | None = None
        self.canary_wait: asyncio.Event | None = None
        self.asked: list[str] = []
        """Model name of every request."""
        self.reply_scores = None
        """Function that changes the scores [n] before they are sent. The result may be any
        array."""
        self.wait: asyncio.Event | None = None
        self.token: str | None = None
        """Required token of a call. None accepts every call."""
        self.wire_seconds: list[float] = []
        """Remaining deadline of each request on arrival, in seconds."""
        self.cancelled = 0
        """Calls that ended before they were answered."""
        self.requests: list[int] = []
        """Rows of every request that was parsed."""
        self.in_flight = self.most_in_flight = 0
        self.columns: dict[int, dict[str, list[str]]] = {}
        """Columns that a version accepts, if they differ from Criteo's."""

    async def _let_in(self, context):
        found = dict(context.invocation_metadata()).get("authorization")
        if self.token is not None and found != f"Bearer {self.token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{found} is no token")

    async def ModelConfig(self, request, context):  # noqa: N802 the protocol's name
        await self._let_in(context)
        version = (
            self.canary_version
            if request.name == CANARY_NAME
            else (self.versions or [self.version])[0]
        )
        reply = service_pb2.ModelConfigResponse()
        if isinstance(version, int):
            reply.config.version_policy.specific.versions.append(version)
        reply.config.parameters[COLUMNS].string_value = json.dumps(self.columns_of(version))
        return reply

    def columns_of(self, version):
        return self.columns.get(version, CRITEO.columns)

    async def ModelInfer(self, request, context):  # noqa: N802 the protocol's name
        self.wire_seconds.append(context.time_remaining())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self._let_in(context)
            if failure := (self.failures.pop(0) if self.failures else self.always):
                await context.abort(*failure)
            return await self._answer(request, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, request, context):
        self.asked.append(request.model_name)
        is_canary = request.model_name == CANARY_NAME and self.canary_version is not None
        if request.model_name != MODEL_NAME and not is_canary:
            text = f"Request for unknown model: '{request.model_name}' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        try:
            version = self.canary_version if is_canary else (self.versions or [self.version])[0]
            dense, categorical = self._parse(request, self.columns_of(version))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self.requests.append(len(dense))
        if self.wait is not None:
            await self.wait.wait()
        scores = known_scores(dense, categorical).reshape(-1, 1)
        if is_canary:
            if self.canary_failure is not None:
                await context.abort(*self.canary_failure)
            if self.canary_wait is not None:
                await self.canary_wait.wait()
            scores = 1 - scores
        if self.reply_scores is not None:
            scores = self.reply_scores(scores)
        version = (
            self.canary_version
            if is_canary
            else self.versions.pop(0)
            if self.versions
            else self.version
        )
        reply = service_pb2.ModelInferResponse(
            model_name=request.model_name, model_version=str(version)
        )
        reply.outputs.add(name=PROBABILITY_OUTPUT.name, datatype="FP32", shape=list(scores.shape))
        reply.raw_output_contents.append(scores.astype("<f4").tobytes())
        return reply

    @staticmethod
    def _parse(request, columns):
        arrays = {}
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
            dtype = {"FP32": "<f4", "INT64": "<i8"}[tensor.datatype]
            arrays[tensor.name] = np.frombuffer(content, dtype).reshape(list(tensor.shape))
        for name, kind in ((DENSE_INPUT, "numeric"), (CATEGORICAL_INPUT, "categorical")):
            array = arrays.get(name)
            if array is None or array.ndim != 2 or array.shape[1] != len(columns[kind]):
                raise ValueError(
                    f"unexpected shape for input '{name}' for model '{request.model_name}'"
                )
        if {o.name for o in request.outputs} != {PROBABILITY_OUTPUT.name}:
            raise ValueError("unexpected inference output")
        return arrays[DENSE_INPUT], arrays[CATEGORICAL_INPUT]


class RunningServer:
    """The server in its own thread and event loop, so that other processes can call it too."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.scoring, self._credentials = ScoringServer(), credentials
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._call(self._start(0))
        self.url = f"127.0.0.1:{self.port}"

    async def _start(self, port: int) -> int:
        self._server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self.scoring, self._server)
        address = f"127.0.0.1:{port}"
        if self._credentials is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, self._credentials)
        await self._server.start()
        return bound

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def make_event(self) -> asyncio.Event:
        async def make() -> asyncio.Event:
            return asyncio.Event()

        return self._call(make())

    def release(self, event: asyncio.Event) -> None:
        self.loop.call_soon_threadsafe(event.set)

    def kill(self) -> None:
        """Stop at once and close the port and open calls."""
        if self._server is not None:
            self._call(self._server.stop(None))
            self._server = None

    def start_again(self) -> None:
        """Serve on the same port as before `kill`."""
        self._call(self._start(self.port))

    def close(self) -> None:
        self.kill()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
