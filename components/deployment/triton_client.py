"""One running Triton, as a release needs it: load, unload, readiness, and an answer to golden rows.

The only module here that calls tritonclient; its exceptions become `TemporaryError` or `PermanentError`, once.
Deadlines are generous on purpose: Triton 2.51 can crash when gRPC calls are cancelled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.serving import GRPC_OPTIONS, INPUT_TYPES, PROBABILITY_OUTPUT, named_inputs
from components.runtime.errors import PermanentError, TemporaryError

CALL_SECONDS = 30.0
LOAD_SECONDS = 120.0
"""Loading a model of 700 MB takes 3 s and 5 GB of memory; a model that hangs its loader is given up after this."""

_TEMPORARY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED")


class NotListening(TemporaryError):
    """Nothing listens at the server's address: its process has not started to listen, or has ended."""


class Triton:
    """A Triton in explicit model control, reached by gRPC at `url` (host:port)."""

    def __init__(self, url: str) -> None:
        import tritonclient.grpc as grpc_client

        self.url = url
        self._grpc = grpc_client
        with self._translated("connect"):
            self._client = grpc_client.InferenceServerClient(url, channel_args=list(GRPC_OPTIONS))

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def check_live(self) -> None:
        """Returns if the server answers.

        Raises:
            NotListening: its port is closed.
            TemporaryError: it does not answer, or reports that it is not live.
        """
        try:
            with self._translated("liveness"):
                if not self._client.is_server_live(client_timeout=CALL_SECONDS):
                    raise TemporaryError(f"triton {self.url} is not live")
        except TemporaryError as error:
            # The system's word, which gRPC gives nowhere but in its message.
            if "Connection refused" in str(error):
                raise NotListening(str(error)) from error
            raise

    def load(self, name: str) -> None:
        """Loads or reloads the model as its folder is now; the versions that stay keep answering meanwhile."""
        with self._translated(f"load of {name}"):
            self._client.load_model(name, client_timeout=LOAD_SECONDS)

    def unload(self, name: str) -> None:
        """Unloads every version of the model."""
        with self._translated(f"unload of {name}"):
            self._client.unload_model(name, client_timeout=CALL_SECONDS)

    def is_ready(self, name: str, version: int) -> bool:
        """Whether that version reports that it is ready."""
        with self._translated(f"readiness of {name}"):
            return bool(self._client.is_model_ready(name, str(version), client_timeout=CALL_SECONDS))

    def infer(
        self, name: str, dense: NDArray[np.float32], categorical: NDArray[np.int64], *, version: int | None = None
    ) -> tuple[NDArray[np.float32], int]:
        """Probabilities [n], and the version that gave them; without `version`, the one that Triton chooses."""
        inputs = []
        for tensor, rows in named_inputs(dense, categorical).items():
            inputs.append(self._grpc.InferInput(tensor, list(rows.shape), INPUT_TYPES[tensor]))
            inputs[-1].set_data_from_numpy(np.ascontiguousarray(rows))
        with self._translated(f"inference on {name}"):
            answer: Any = self._client.infer(
                name, inputs, model_version="" if version is None else str(version), client_timeout=CALL_SECONDS
            )
            return answer.as_numpy(PROBABILITY_OUTPUT.name).ravel(), int(answer.get_response().model_version)

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        from tritonclient.utils import InferenceServerException

        try:
            yield
        except InferenceServerException as error:
            status = str(error.status() or "")
            message = f"triton {self.url}: {call} failed: {error.message()}"
            if any(name in status for name in _TEMPORARY):
                raise TemporaryError(message) from error
            raise PermanentError(message) from error
