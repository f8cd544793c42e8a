"""What ends when a pod of Triton ends: by its manifest's numbers nothing that was begun, and no request of a client.

Kubernetes takes a pod that is being deleted out of its Service, runs the preStop hook, and only then sends SIGTERM; a
gRPC client would keep its one connection to it all that time. So connections are given an age, and the hook outlasts
it. The Service is played by a forwarder: new connections go where it points now, old ones stay where they are.
"""

import asyncio
import re
import selectors
import signal
import socket
import threading
from contextlib import suppress

import numpy as np
import pytest

from components.deployment.repository.triton_config import ServingOptions
from inference_client.scoring import ClientSettings, ScoringClient
from k8s.scaling.cluster import StartTimes
from pipelines.local.stack import LOOPBACK
from tests.k8s.pod import TritonPod, flag, triton_container
from tests.support.processes import wait_for
from tests.support.real_servers import RetryingTraffic
from tests.support.rendering import pod_template, workloads
from tests.support.served_names import MODEL_NAME
from tests.support.triton import write_model

pytestmark = pytest.mark.e2e

JITTER = 1.1
"""gRPC ends a connection up to a tenth later than its age says."""
SECONDS_TO_FORGET = 5
"""For every node to take an ending pod out of its Service, while new connections still reach it."""
QUEUE_SECONDS = ServingOptions().queue_timeout_microseconds / 1e6 + 0.5
"""The longest that an accepted request may wait before it is computed: Triton looks every half second."""
ROW = np.zeros((1, 13), np.float32), np.zeros((1, 26), np.int64)


def spec_of_triton(manifests):
    return next(spec for workload, spec in workloads(manifests) if workload["metadata"]["name"] == "triton")


def pre_stop_seconds(container):
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return float(seconds)


def test_a_pod_waits_longer_than_any_connection_lives_and_has_time_left_to_end(variant):
    container = triton_container(variant)
    age = int(flag(container, "grpc-max-connection-age")) / 1000
    assert not any("connection-age-grace" in argument for argument in container["args"]), "it would cut calls off"
    waits, drains = pre_stop_seconds(container), int(flag(container, "exit-timeout-secs"))
    assert waits == StartTimes().stop, "the autoscaler's simulator knows it"
    assert waits >= age * JITTER + SECONDS_TO_FORGET
    assert drains >= QUEUE_SECONDS + 10
    assert spec_of_triton(variant)["terminationGracePeriodSeconds"] >= waits + drains + 5


def test_an_update_brings_the_new_pod_before_it_takes_the_old_one(variant):
    (triton,) = [w for w, _ in workloads(variant) if w["metadata"]["name"] == "triton"]
    assert triton["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    start = pod_template(triton)["spec"]["containers"][0]["startupProbe"]
    assert triton["spec"]["progressDeadlineSeconds"] > start["periodSeconds"] * start["failureThreshold"]


class Service:
    """A TCP forwarder to `target`, which may change; counts the connections that are open to each target."""

    def __init__(self, target: int) -> None:
        self.target, self.open = target, dict.fromkeys([target], 0)
        self._listener = socket.create_server((LOOPBACK, 0))
        self._listener.settimeout(0.05)
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def url(self) -> str:
        return f"{LOOPBACK}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Service":
        self._threads[0].start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            with suppress(TimeoutError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._forward, args=(client, self.target))
                self._threads.append(thread)
                thread.start()

    def _forward(self, client: socket.socket, target: int) -> None:
        with client, suppress(OSError), socket.create_connection((LOOPBACK, target)) as server:
            self._count(target, 1)
            try:
                with selectors.DefaultSelector() as ready:
                    ready.register(client, selectors.EVENT_READ, server)
                    ready.register(server, selectors.EVENT_READ, client)
                    while not self._is_over.is_set():
                        for key, _ in ready.select(0.05):
                            if not (data := key.fileobj.recv(65536)):
                                return
                            key.data.sendall(data)
            finally:
                self._count(target, -1)

    def _count(self, target: int, change: int) -> None:
        with self._lock:
            self.open[target] = self.open.get(target, 0) + change


@pytest.fixture
def make_pod(rendered, tmp_path):
    """`make_pod(name, seconds=)`: a ready pod whose model takes that long; connections live longer than a request."""
    opened = []

    def make(name, *, seconds=0.0):
        repository = tmp_path / name / "repository"
        write_model(repository, work=f"Path({str(tmp_path / name / 'begun')!r}).touch()\ntime.sleep({seconds})")
        pod = TritonPod(
            rendered("cpu"),
            repository,
            tmp_path / name,
            change={"grpc-max-connection-age": "1000" if not seconds else "30000"},
            until="readinessProbe",
        )
        opened.append(pod.__enter__())
        return pod

    yield make
    for pod in opened:
        pod.__exit__()


def test_a_pod_is_replaced_under_load_and_no_request_fails(make_pod):
    old, new = make_pod("old"), make_pod("new")
    with Service(old.ports.grpc) as service, RetryingTraffic(service.url, ROW, attempts=1) as traffic:
        traffic.more(20)
        service.target = new.ports.grpc
        # The preStop hook: nothing but time passes, in which connections reach their age.
        wait_for(lambda: service.open[old.ports.grpc] == 0 and service.open.get(new.ports.grpc, 0) > 0)
        traffic.more(20)
        old.process.send_signal(signal.SIGTERM)
        old.process.wait(120)
        traffic.more(20)
        assert not traffic.failures
        assert old.process.returncode == 0


def waiting(pod) -> int:
    """Requests that wait in the server's queue; the one that is computed is not among them."""
    with suppress(OSError):
        return sum(int(n) for n in re.findall(r"nv_inference_pending_request_count\{[^}]*\} (\d+)", pod.metrics()))
    return 0


def test_what_was_begun_at_the_signal_is_answered(make_pod, tmp_path):
    begun = tmp_path / "slow" / "begun"
    pod = make_pod("slow", seconds=2.0)

    async def three_and_the_signal() -> list[object]:
        async with ScoringClient(pod.grpc_url, MODEL_NAME, ClientSettings(max_attempts=1)) as client:
            calls = [asyncio.ensure_future(client.score(*ROW))]
            # One is computed, and only then do two come to wait: all three at once could be one batch.
            await asyncio.to_thread(wait_for, begun.exists)
            calls += [asyncio.ensure_future(client.score(*ROW)) for _ in range(2)]
            await asyncio.to_thread(wait_for, lambda: waiting(pod) == 2 or calls[0].done())
            pod.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(three_and_the_signal())
    assert [getattr(answer, "model_version", answer) for answer in answers] == [1, 1, 1]
    assert pod.process.wait(60) == 0
