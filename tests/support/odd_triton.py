"""A real gRPC server that answers Triton's calls with bytes or statuses chosen by a test."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from evergreen.runtime.errors import PermanentError

SERVICE = "inference.GRPCInferenceService"
DTYPES = {"FP32": "<f4", "INT64": "<i8"}


class OddTriton:
    """Answers like `real`, except for the methods in `odd`.

    An odd method changes the bytes of the right reply, or returns a gRPC status.
    """

    def __init__(self, real):
        self.real = real
        self.odd = {}
        self.asked = []
        self.token = None
        """Required value of `authorization`. None skips the check."""
        self.executor = ThreadPoolExecutor(4)

    def handlers(self):
        calls = {
            "ServerLive": self._live,
            "ModelReady": self._ready,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "ModelInfer": self._infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._answering(name, c))
            for name, c in calls.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _answering(self, name, call):
        def answer(request, context):
            self.asked.append(name)
            if (
                self.token is not None
                and dict(context.invocation_metadata()).get("authorization") != self.token
            ):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token")
            odd = self.odd.get(name)
            if isinstance(odd, tuple):
                context.abort(*odd)
            try:
                right = call(request).SerializeToString()
            except PermanentError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return right if odd is None else odd(right)

        return answer

    def _live(self, request):
        return service_pb2.ServerLiveResponse(live=True)

    def _ready(self, request):
        asked = service_pb2.ModelReadyRequest.FromString(request)
        return service_pb2.ModelReadyResponse(
            ready=self.real.is_ready(asked.name, int(asked.version))
        )

    def _load(self, request):
        self.real.load(service_pb2.RepositoryModelLoadRequest.FromString(request).model_name)
        return service_pb2.RepositoryModelLoadResponse()

    def _unload(self, request):
        self.real.unload(service_pb2.RepositoryModelUnloadRequest.FromString(request).model_name)
        return service_pb2.RepositoryModelUnloadResponse()

    def _infer(self, request):
        asked = service_pb2.ModelInferRequest.FromString(request)
        arrays = {
            tensor.name: np.frombuffer(content, DTYPES[tensor.datatype]).reshape(list(tensor.shape))
            for tensor, content in zip(asked.inputs, asked.raw_input_contents, strict=True)
        }
        version = int(asked.model_version) if asked.model_version else None
        scores, answered = self.real.infer(
            asked.model_name, arrays[DENSE_INPUT], arrays[CATEGORICAL_INPUT], version=version
        )
        reply = service_pb2.ModelInferResponse(
            model_name=asked.model_name, model_version=str(answered)
        )
        reply.outputs.add(name="probability", datatype="FP32", shape=[len(scores), 1])
        reply.raw_output_contents.append(scores.astype("<f4").tobytes())
        return reply


@contextmanager
def odd_triton(real):
    """Yield the server over `real` (`file_triton.FileTriton`), and its address."""
    odd = OddTriton(real)
    server = grpc.server(odd.executor, options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((odd.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield odd, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def edited(change):
    """Return a function that applies `change(message)` to the bytes of an inference reply."""

    def answer(right):
        reply = service_pb2.ModelInferResponse.FromString(right)
        change(reply)
        return reply.SerializeToString()

    return answer
