"""The test doubles of Triton: a server in files, models of known scores, and both over real gRPC.

`TritonDouble` replaces the real server in this process and follows its rules. `GrpcTriton` serves a
`TritonDouble` or a `ScoringDouble` over Triton's protocol, and its calls can be corrupted.
`Altered` replaces methods of a test double or of a real connection. Other tests check the real
server.
"""

import asyncio
import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from uuid import uuid4

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from controller.canary.evidence import COUNTERS
from evergreen.config.features import Features
from evergreen.contracts.serving import (
    CATEGORICAL_INPUT,
    COLUMNS,
    DENSE_INPUT,
    PROBABILITY_OUTPUT,
    versions_of,
)
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.serving.parity import GoldenRows, open_graph, score
from evergreen.serving.repository.triton_config import warmup_files_of
from evergreen.serving.servers import NotListening
from testing.recommenders import SHOP
from testing.served_names import CANARY_NAME, MODEL_NAME

SERVICE = "inference.GRPCInferenceService"
DTYPES = {"FP32": "<f4", "INT64": "<i8"}


class TritonDouble:
    """The server at `url`, which loads models from `repository`.

    A load reads config.pbtxt and loads exactly the versions that the file names, if their warm-up
    rows exist. If one version fails to load, no version is loaded. A server answers from its own
    copy of a loaded version, even if the repository changes. The highest version answers requests
    without a version. A starting server loads what is configured, and its counters are zero. The
    server scores with ONNX Runtime. The loaded models are stored as
    `<state>/<url>/<model>/<version>/model.onnx`, so they survive the end of the process.
    """

    def __init__(self, url, *, repository, state):
        self.url, self._repository, self._memory = url, Path(repository), Path(state) / url
        self._down = Path(state) / f"{url}.down"
        self.counted: dict[str, Counter] = {name: Counter() for name in COUNTERS}

    def start(self):
        """Start as a pod does: clear memory and counters, and load the configured versions."""
        self.counted = {name: Counter() for name in COUNTERS}
        shutil.rmtree(self._memory, ignore_errors=True)
        self._down.unlink(missing_ok=True)
        if (self._repository / MODEL_NAME / "config.pbtxt").exists():
            self.load(MODEL_NAME)
        return self

    def crash(self):
        self._down.parent.mkdir(parents=True, exist_ok=True)
        self._down.touch()

    def close(self):
        pass

    def check_live(self):
        if self._down.exists():
            raise NotListening(f"triton {self.url}: connection refused")

    def load(self, name):
        self.check_live()
        config = self._repository / name / "config.pbtxt"
        if not config.exists():
            raise PermanentError(f"triton {self.url}: failed to load {name}, no configuration")
        for file in warmup_files_of(config.read_text()):
            if not (config.parent / "warmup" / file).exists():
                raise PermanentError(
                    f"triton {self.url}: failed to load {name}, no warm-up rows {file}"
                )
        fresh = self._memory / f".{name}.{uuid4().hex}"
        for version in versions_of(config.read_text()):
            source = self._repository / name / str(version)
            try:
                open_graph(source / "model.onnx")
            except ContractError as error:
                shutil.rmtree(fresh, ignore_errors=True)
                raise PermanentError(
                    f"triton {self.url}: failed to load {name} version {version}: {error}"
                ) from error
            shutil.copytree(source, fresh / str(version))
        self.unload(name)
        fresh.rename(self._memory / name)

    def unload(self, name):
        self.check_live()
        shutil.rmtree(self._memory / name, ignore_errors=True)

    def loaded(self, name=MODEL_NAME):
        """Return the loaded versions, ascending."""
        return sorted(int(path.name) for path in (self._memory / name).glob("*"))

    def graph(self, version, name=MODEL_NAME):
        return self._memory / name / str(version) / "model.onnx"

    def is_ready(self, name, version):
        self.check_live()
        return version in self.loaded(name)

    def infer(self, name, dense, categorical, *, version=None):
        self.check_live()
        if not self.loaded(name) or (version is not None and version not in self.loaded(name)):
            raise PermanentError(f"triton {self.url}: {name} version {version} is not loaded")
        chosen = version or max(self.loaded(name))
        rows = GoldenRows(
            features=SHOP.features, dense=dense, categorical=categorical, expected=dense[:, 0]
        )
        scores = score(open_graph(self.graph(chosen, name)), rows)
        self.count(name, chosen, success=1, infer_us=1000)
        return scores, chosen

    def count(self, name, version, **counters):
        for counter, number in counters.items():
            self.counted[counter][name, version] += number

    def metrics(self):
        """Return Triton's Prometheus text."""
        lines = ["# HELP nv_inference_request_success Number of successful inference requests"]
        for counter, name in COUNTERS.items():
            for (model, version), value in self.counted[counter].items():
                more = 'reason="BACKEND",' if counter == "failure" else ""
                lines.append(f'{name}{{model="{model}",{more}version="{version}"}} {value:g}')
        return "\n".join(lines) + "\n"

    def serves(self):
        """Return the calls of Triton's protocol that a TritonDouble answers, by method."""
        return {
            "ServerLive": self._server_live,
            "ModelReady": self._model_ready,
            "RepositoryModelLoad": self._repository_load,
            "RepositoryModelUnload": self._repository_unload,
            "ModelInfer": self._model_infer,
        }

    async def _server_live(self, request, context):
        self.check_live()
        return service_pb2.ServerLiveResponse(live=True)

    async def _model_ready(self, request, context):
        ready = self.is_ready(request.name, int(request.version))
        return service_pb2.ModelReadyResponse(ready=ready)

    async def _repository_load(self, request, context):
        self.load(request.model_name)
        return service_pb2.RepositoryModelLoadResponse()

    async def _repository_unload(self, request, context):
        self.unload(request.model_name)
        return service_pb2.RepositoryModelUnloadResponse()

    async def _model_infer(self, request, context):
        arrays = _arrays(request)
        scores, version = self.infer(
            request.model_name,
            arrays[DENSE_INPUT],
            arrays[CATEGORICAL_INPUT],
            version=int(request.model_version) if request.model_version else None,
        )
        return _scored(request.model_name, version, scores.reshape(-1, 1))


class Altered:
    """A server, real or not, with some methods replaced by the test.

    Each replacement is called with the server as its first argument.
    """

    def __init__(self, real, **methods):
        self._real = real
        for name, method in methods.items():
            setattr(self, name, lambda *a, method=method, **k: method(real, *a, **k))

    def __getattr__(self, name):
        return getattr(self._real, name)


def known_scores(dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
    """Return [n] probabilities that depend on every feature.

    Product code does not use the formula.
    """
    logit = np.nansum(np.log1p(np.maximum(dense.astype(np.float64), 0)), axis=1) / 40
    logit += np.cos(categorical.astype(np.float64)).sum(axis=1) / 5 - 1
    return (1 / (1 + np.exp(-logit))).astype(np.float32)


class ScoringDouble:
    """Test double of a server whose models return known scores. Tests inject failures and delays.

    The test double parses the tensors like Triton. A request fails with the next error in
    `failures`. Requests succeed while `failures` is empty.
    """

    def __init__(self, features: Features = SHOP.features) -> None:
        self.features, self.version = features, 1
        self.versions: list[int] = []
        """Version numbers in the next answers. Later answers contain `version`."""
        self.failures: list[tuple[grpc.StatusCode, str]] = []
        self.always: tuple[grpc.StatusCode, str] | None = None
        self.canary_version: int | str | None = None
        """Version under the canary's name. None = no canary is served. A string here makes the
        version in the reply invalid."""
        self.canary_failure: tuple[grpc.StatusCode, str] | None = None
        self.canary_wait: asyncio.Event | None = None
        self.model_names: list[str] = []
        """Model name of every request."""
        self.reply_scores = None
        """Function that changes the scores [n] before they are sent. The function may return any
        array."""
        self.wait: asyncio.Event | None = None
        self.wire_seconds: list[float] = []
        """Remaining deadline of each request on arrival, in seconds."""
        self.cancelled = 0
        """Calls that the client cancelled before the answer."""
        self.requests: list[int] = []
        """Rows of each parsed request."""
        self.in_flight = self.most_in_flight = 0
        self.columns: dict[int, dict[str, list[str]]] = {}
        """Features that a version accepts, if they differ from `features`."""

    def serves(self):
        """Return the calls of Triton's protocol that a ScoringDouble answers, by method."""
        return {"ModelConfig": self._model_config, "ModelInfer": self._model_infer}

    async def _model_config(self, request, context):
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
        return self.columns.get(version, self.features.columns)

    async def _model_infer(self, request, context):
        self.wire_seconds.append(context.time_remaining())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if failure := (self.failures.pop(0) if self.failures else self.always):
                await context.abort(*failure)
            return await self._answer(request, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _answer(self, request, context):
        self.model_names.append(request.model_name)
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
        return _scored(request.model_name, version, scores)

    @staticmethod
    def _parse(request, columns):
        arrays = _arrays(request)
        for name, kind in ((DENSE_INPUT, "numeric"), (CATEGORICAL_INPUT, "categorical")):
            array = arrays.get(name)
            if array is None or array.ndim != 2 or array.shape[1] != len(columns[kind]):
                raise ValueError(
                    f"unexpected shape for input '{name}' for model '{request.model_name}'"
                )
        if {o.name for o in request.outputs} != {PROBABILITY_OUTPUT.name}:
            raise ValueError("unexpected inference output")
        return arrays[DENSE_INPUT], arrays[CATEGORICAL_INPUT]


class GrpcTriton:
    """A gRPC server with Triton's protocol over `served`, in its own thread and event loop.

    Other processes can call the server too.
    """

    def __init__(self, served=None, credentials: grpc.ServerCredentials | None = None) -> None:
        self.scoring = ScoringDouble() if served is None else served
        self._credentials = credentials
        self.token: str | None = None
        """Required token of a call. None = no token is required."""
        self.malformed: dict = {}
        """Maps a method to a malformed reply: a gRPC status, or a function that changes the reply's
        bytes."""
        self.called: list[str] = []
        """Names of the gRPC methods that clients called."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._call(self._start(0))
        self.url = f"127.0.0.1:{self.port}"

    async def _start(self, port: int) -> int:
        self._server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
        )
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(
                self._answering(method, call),
                request_deserializer=getattr(service_pb2, f"{method}Request").FromString,
            )
            for method, call in self.scoring.serves().items()
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        address = f"127.0.0.1:{port}"
        if self._credentials is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, self._credentials)
        await self._server.start()
        return bound

    def _answering(self, method, call):
        async def answer(request, context):
            self.called.append(method)
            found = dict(context.invocation_metadata()).get("authorization")
            if self.token is not None and found != f"Bearer {self.token}":
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{found} is no token")
            malformed = self.malformed.get(method)
            if isinstance(malformed, tuple):
                await context.abort(*malformed)
            try:
                right = (await call(request, context)).SerializeToString()
            except PermanentError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return right if malformed is None else malformed(right)

        return answer

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def make_event(self) -> asyncio.Event:
        async def make() -> asyncio.Event:
            return asyncio.Event()

        return self._call(make())

    def release(self, event: asyncio.Event) -> None:
        self.loop.call_soon_threadsafe(event.set)

    def kill(self) -> None:
        """Close the port at once, and end all running calls."""
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

    def __enter__(self) -> "GrpcTriton":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _arrays(request):
    """Return the arrays of an inference request by their names."""
    return {
        tensor.name: np.frombuffer(content, DTYPES[tensor.datatype]).reshape(list(tensor.shape))
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }


def _scored(name, version, scores):
    reply = service_pb2.ModelInferResponse(model_name=name, model_version=str(version))
    reply.outputs.add(name=PROBABILITY_OUTPUT.name, datatype="FP32", shape=list(scores.shape))
    reply.raw_output_contents.append(scores.astype("<f4").tobytes())
    return reply


def edited(change):
    """Return a function that applies `change(message)` to the bytes of an inference reply."""

    def answer(right):
        reply = service_pb2.ModelInferResponse.FromString(right)
        change(reply)
        return reply.SerializeToString()

    return answer
