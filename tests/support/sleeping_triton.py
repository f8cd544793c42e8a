"""A real Triton whose models only sleep for a known time, and a client that counts answers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc_client

from demo.triton import TritonServer
from evergreen.serving.repository.triton_config import ServingOptions
from testing.recommenders import SHOP
from testing.served_names import MODEL_NAME
from tests.support.triton import write_model

LONGEST = 3_600_000_000
"""Maximum queue time of a request in microseconds. No request of the tests waits for an hour, so
Triton rejects none."""


class Client:
    """Client that sends the same row to one server repeatedly, and counts the answers.

    The client sets no deadline, because a cancelled call can crash Triton.
    """

    def __init__(self, url: str) -> None:
        self.grpc = grpc_client.InferenceServerClient(url)
        self._inputs = []
        for name, kind, row in (
            ("dense", "FP32", np.zeros((1, len(SHOP.features.numeric)), np.float32)),
            ("categorical", "INT64", np.zeros((1, len(SHOP.features.position_names)), np.int64)),
        ):
            self._inputs.append(grpc_client.InferInput(name, list(row.shape), kind))
            self._inputs[-1].set_data_from_numpy(row)
        self.answered = 0
        self._lock = threading.Lock()

    def send(self, model: str = MODEL_NAME) -> None:
        """Send one request and wait for its answer."""
        self.grpc.infer(model, self._inputs)
        with self._lock:
            self.answered += 1

    def send_at_once(self, count: int, model: str = MODEL_NAME) -> list[threading.Thread]:
        """Send `count` requests in parallel and return their threads.

        If the server is stopped, the threads end without an answer.
        """

        def send() -> None:
            with suppress(Exception):
                self.send(model)

        threads = [threading.Thread(target=send, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads


@contextmanager
def sleeping_triton(
    folder: Path, models: dict[str, float]
) -> Iterator[tuple[TritonServer, Client]]:
    """Start a server whose models sleep, and a client of the server.

    `models` maps a name to seconds.
    """
    options = ServingOptions(instances=1, queue_timeout_microseconds=LONGEST)
    for name, seconds in models.items():
        write_model(
            folder / "repository", name, f"time.sleep({seconds} * len(requests))", options=options
        )
    with TritonServer(folder / "repository", log=folder / "triton.log") as server:
        yield server, Client(server.grpc_url)
