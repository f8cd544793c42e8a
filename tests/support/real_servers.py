"""Helpers for tests of real servers: a connection with one changed method, background traffic."""

import asyncio
import os
import signal
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.serving.servers import Triton
from inference_client.scoring import ClientSettings, ScoringClient
from testing.processes import runs, wait_for
from testing.served_names import MODEL_NAME


def live_version(client, rows, model=MODEL_NAME):
    return client.infer(model, *rows)[1]


def kill_stubs(server):
    """Kill the stub processes of a server, which become zombies."""
    stubs = set()
    for children in Path(f"/proc/{server.pid}/task").glob("*/children"):
        # A thread or a stub of the server may end while this loop runs.
        with suppress(OSError):
            stubs |= {int(child) for child in children.read_text().split()}
    killed = {stub for stub in stubs if runs(stub)}
    for stub in killed:
        os.kill(stub, signal.SIGKILL)
    wait_for(lambda: not any(runs(stub) for stub in killed))


FAULT = "    def _fault(self, tensors: Tensors) -> str | None:\n"
"""Line in the code of the served model that runs at the start of each batch."""


def change_code(triton, version, old, new):
    """Change the code of a released version, and let the server load it."""
    code = triton.repository / MODEL_NAME / str(version) / "model.py"
    assert old in code.read_text()
    code.write_text(code.read_text().replace(old, new))
    client = Triton(triton.grpc_url)
    client.unload(MODEL_NAME)
    client.load(MODEL_NAME)
    wait_for(lambda: client.is_ready(MODEL_NAME, version))
    client.close()


class Traffic:
    """Answers to the clients of `under_load`: each client's versions in order, and all failures."""

    def __init__(self, num_clients):
        self.answers = [[] for _ in range(num_clients)]
        self.failures = []


@contextmanager
def under_load(urls, rows, *, until=None, enough=30, model=MODEL_NAME):
    """Send requests every few milliseconds, one client per url, during the `with` block.

    `until` is a version that each client must reach. A client stops after `enough` answers of
    version `until`, if its last answer is also of this version.
    """
    traffic, stop, done = Traffic(len(urls)), threading.Event(), threading.Event()

    def send_requests(client, answers):
        while not stop.wait(0.005):
            if done.is_set() and answers.count(until) >= enough and answers[-1] == until:
                return
            try:
                answers.append(live_version(client, rows, model))
            except Exception as error:
                traffic.failures.append(error)
                return

    clients = [Triton(url) for url in urls]
    threads = [
        threading.Thread(target=send_requests, args=pair, daemon=True)
        for pair in zip(clients, traffic.answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield traffic
        done.set()
        for thread in threads if until is not None else ():
            thread.join(120)
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
        for client in clients:
            client.close()


class BackgroundTraffic:
    """Sends requests in a thread within a `with` block. Subclasses define the coroutine `_ask`."""

    def __init__(self):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


class RetryingTraffic(BackgroundTraffic):
    """A client that scores the same rows every few milliseconds, with retries.

    The client records all answers and all failures.
    """

    def __init__(self, url, rows, *, attempts=10):
        super().__init__()
        self.answers, self.failures = [], []
        self._url, self._rows, self._attempts = url, rows, attempts

    async def _ask(self):
        async with ScoringClient(
            self._url, MODEL_NAME, ClientSettings(max_attempts=self._attempts)
        ) as client:
            while not self._stop.is_set():
                try:
                    self.answers.append(await client.score(*self._rows))
                except (TemporaryError, PermanentError) as error:
                    self.failures.append(error)
                await asyncio.sleep(0.005)

    def more(self, count=5):
        """Wait for `count` more answers."""
        wanted = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= wanted)
