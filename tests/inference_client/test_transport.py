"""Tests of deadlines, cancelled callers, back-pressure and replicas, with real gRPC servers."""

import asyncio
import contextlib
import socket
import threading
import time

import grpc
import numpy as np
import pytest

from inference_client import replicas as replicas_module
from inference_client import transport as transport_module
from inference_client.errors import BadRequest, DeadlineExpired, Overloaded, ServerUnavailable
from inference_client.replicas import CALLS_PER_SLOT
from inference_client.scoring import ClientSettings, ScoringClient
from inference_client.timing import Timing, shortened
from testing.served_names import MODEL_NAME
from tests.support.errors import raises
from tests.support.traffic_plans import until
from tests.support.triton_double import GrpcTriton
from tests.support.virtual_time import VirtualTime

ABSENT = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'click_model' is not found")


@pytest.fixture
def stuck(server):
    """A server that delays every answer until the test releases it."""
    server.scoring.wait = server.make_event()
    yield server
    server.release(server.scoring.wait)


def run_client(server, use_client, url=None, **settings):
    async def run():
        async with ScoringClient(
            url or server.url, MODEL_NAME, ClientSettings(**settings), timing=Timing(jitter=float)
        ) as client:
            return await use_client(client)

    return asyncio.run(run())


def test_expired_deadline_is_not_on_wire_and_frees_its_slot(stuck, make_rows, score_rows):
    rows = make_rows(3)

    async def talk(client):
        for number in range(1, CALLS_PER_SLOT + 1):
            with raises(DeadlineExpired, "within 0.2 s"):
                await client.score(*rows)
            await until(
                lambda number=number: (
                    client.transport.num_calls == stuck.scoring.in_flight == number
                )
            )
        with raises(Overloaded, "4 unanswered requests", "within 0.2 s"):
            await client.score(*rows)
        assert len(stuck.scoring.requests) == CALLS_PER_SLOT
        stuck.release(stuck.scoring.wait)
        await until(lambda: not client.transport.num_calls)
        return await client.score(*rows, deadline_seconds=20)

    answer = run_client(stuck, talk, deadline_seconds=0.2, max_in_flight=1)
    np.testing.assert_array_equal(answer.scores, score_rows(*rows))
    assert stuck.scoring.cancelled == 0
    assert stuck.scoring.wire_seconds[0] > 250


def test_cancelled_caller_leaves_call_alone(stuck, make_rows):
    async def talk(client):
        caller = asyncio.create_task(client.score(*make_rows(3)))
        await until(lambda: stuck.scoring.in_flight)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert stuck.scoring.in_flight == client.transport.num_calls == 1
        stuck.release(stuck.scoring.wait)
        await until(lambda: not stuck.scoring.in_flight)

    run_client(stuck, talk)
    assert stuck.scoring.cancelled == 0


def test_full_partition_is_reported_at_once_and_accepts_callers_when_it_moves(
    stuck, make_rows, score_rows
):
    rows = make_rows(2)

    async def talk(client):
        callers = [asyncio.create_task(client.score(*rows)) for _ in range(3)]
        await until(lambda: stuck.scoring.in_flight == 1)
        with raises(Overloaded, "3 callers", "fewer than 3"):
            await client.score(*rows)
        stuck.release(stuck.scoring.wait)
        answers = await asyncio.gather(*callers)
        return [*answers, await client.score(*rows)]

    answers = run_client(stuck, talk, max_in_flight=1, max_waiting=2)
    assert len(answers) == 4
    assert stuck.scoring.most_in_flight == 1
    for answer in answers:
        np.testing.assert_array_equal(answer.scores, score_rows(*rows))


def test_closing_waits_for_calls_whose_callers_have_given_up(stuck, make_rows):

    async def run():
        client = ScoringClient(stuck.url, MODEL_NAME, ClientSettings(deadline_seconds=0.5))
        with pytest.raises(DeadlineExpired):
            await client.score(*make_rows(1))
        closing = asyncio.create_task(client.close())
        done, _ = await asyncio.wait({closing}, timeout=0.05)
        assert not done
        stuck.release(stuck.scoring.wait)
        await closing

    asyncio.run(run())
    assert stuck.scoring.cancelled == 0


def test_closing_does_not_wait_for_ever(stuck, make_rows):
    async def talk(client):
        with pytest.raises(DeadlineExpired):
            await client.score(*make_rows(1))

    run_client(stuck, talk, deadline_seconds=0.5, close_seconds=0.1)


def test_deadline_bounds_all_attempts_and_waits_together(server, make_rows):
    server.scoring.always = (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
    time, waits = VirtualTime(), []

    async def sleep(seconds):
        waits.append(seconds)
        time.now += seconds

    async def run():
        settings = ClientSettings(deadline_seconds=1.0, max_attempts=100)
        timing = Timing(timer=time.clock, sleep=sleep, jitter=float)
        async with ScoringClient(server.url, MODEL_NAME, settings, timing=timing) as client:
            await client.score(*make_rows(1))

    with raises(ServerUnavailable, "maximum queue size"):
        asyncio.run(run())
    # A further wait of 0.8 s would exceed the deadline.
    assert waits == [0.05, 0.1, 0.2, 0.4]


def test_random_factor_shortens_waits_by_up_to_half():
    waits = [shortened(2.0) for _ in range(2000)]
    assert 1.0 <= min(waits) < 1.05
    assert 1.95 < max(waits) <= 2.0


def test_model_that_answered_and_is_absent_is_requested_again(server, make_rows, score_rows):
    """The model is absent for a moment, because a watchdog unloads and reloads it."""
    rows = make_rows(3)

    async def talk(client):
        await client.score(*rows)
        server.scoring.failures = [ABSENT] * 3
        return await client.score(*rows)

    np.testing.assert_array_equal(
        run_client(server, talk, first_backoff_seconds=0.01).scores, score_rows(*rows)
    )


def test_message_over_limit_of_server_is_not_retried(server, make_rows):
    text = "Received message larger than max (300000 vs. 1000)"
    server.scoring.always = (grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    with raises(BadRequest, "message of this size"):
        run_client(server, lambda client: client.score(*make_rows(1)))


@pytest.fixture
def replicas():
    running = [GrpcTriton(), GrpcTriton()]
    yield running
    for each in running:
        each.close()


def test_requests_go_to_every_replica_in_turn_and_dead_replica_fails_none(
    replicas, make_rows, score_rows
):
    first, second = replicas
    rows = make_rows(2)

    async def talk(client):
        # The client alternates evenly between two servers only after it has connected to both
        # servers.
        while not (first.scoring.requests and second.scoring.requests):
            await client.score(*rows)
        before = [len(each.scoring.requests) for each in replicas]
        for _ in range(20):
            await client.score(*rows)
        assert [len(each.scoring.requests) - b for each, b in zip(replicas, before)] == [10, 10]
        await asyncio.to_thread(second.kill)
        answers = [await client.score(*rows) for _ in range(20)]
        for answer in answers:
            np.testing.assert_array_equal(answer.scores, score_rows(*rows))
        # The returning server gets its share of requests again.
        await asyncio.to_thread(second.start_again)
        seen = len(second.scoring.requests)
        end = time.monotonic() + 120
        while len(second.scoring.requests) == seen:
            assert time.monotonic() < end, "the recovered replica got no request for 20 s"
            await client.score(*rows)

    run_client(None, talk, url=f"ipv4:127.0.0.1:{first.port},127.0.0.1:{second.port}")


class Unreliable:
    """A TCP port in front of a server.

    Connections that are `frozen` stay open but transfer no bytes, as after a lost route. Without a
    server, the port accepts connections and sends nothing.
    """

    def __init__(self, port: int | None) -> None:
        self._behind, self._frozen, self._sockets = port, threading.Event(), []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                self.accepted += 1
                self._sockets.append(near)
                if self._behind is None:
                    continue
                far = socket.create_connection(("127.0.0.1", self._behind))
                self._sockets.append(far)
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(
                        target=self._pump, args=(source, sink, self._frozen), daemon=True
                    ).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, frozen: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                if not frozen.is_set():
                    sink.sendall(content)

    def freeze(self) -> None:
        """Stop forwarding open connections. New connections are forwarded."""
        self._frozen.set()
        self._frozen = threading.Event()

    def close(self) -> None:
        for each in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def unreliable():
    """Opens an `Unreliable` port in front of a server's port."""
    made = []

    def make(port=None):
        made.append(Unreliable(port))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def quick_stalls(monkeypatch):
    """Stalls are detected within a fraction of a second."""
    monkeypatch.setattr(replicas_module, "_STALL_SECONDS", 0.2)
    monkeypatch.setattr(replicas_module, "_MAX_STALL_SECONDS", 0.4)
    monkeypatch.setattr(replicas_module, "_DOWN_SECONDS", 0.1)


async def send_all(client, rows, *, callers, requests):
    """Return the answers of all callers. Each caller sends its requests one after another."""

    async def caller():
        return [await client.score(*rows) for _ in range(requests)]

    return [
        answer
        for each in await asyncio.gather(*(caller() for _ in range(callers)))
        for answer in each
    ]


@pytest.mark.parametrize("kind", ["answers nothing", "says nothing at all"])
def test_replica_that_accepts_and_never_answers_fails_no_request(
    replicas, make_rows, score_rows, unreliable, quick_stalls, kind
):
    well, ill = replicas
    rows = make_rows(2)
    port = ill.port
    if kind == "answers nothing":
        ill.scoring.wait = ill.make_event()
    else:
        port = unreliable().port

    async def talk(client):
        return await send_all(client, rows, callers=20, requests=30)

    try:
        answers = run_client(
            None, talk, url=f"ipv4:127.0.0.1:{well.port},127.0.0.1:{port}", close_seconds=0.1
        )
    finally:
        if ill.scoring.wait is not None:
            ill.release(ill.scoring.wait)
    assert len(answers) == 600
    for answer in answers:
        np.testing.assert_array_equal(answer.scores, score_rows(*rows))
    # At first, the failing server gets its share of requests. Later, the failing server gets only a
    # few copies of requests.
    assert len(ill.scoring.requests) < 60


def test_half_open_connection_is_replaced_and_fails_no_request(
    server, make_rows, score_rows, unreliable, quick_stalls
):
    rows, between = make_rows(2), unreliable(server.port)

    async def talk(client):
        answers = await send_all(client, rows, callers=4, requests=5)
        for _ in range(2):
            between.freeze()
            answers += await send_all(client, rows, callers=20, requests=5)
        return answers

    answers = run_client(None, talk, url=f"127.0.0.1:{between.port}", close_seconds=0.1)
    assert len(answers) == 220
    for answer in answers:
        np.testing.assert_array_equal(answer.scores, score_rows(*rows))
    assert between.accepted >= 3


def test_replica_that_answers_again_gets_its_share_again(replicas, make_rows, quick_stalls):
    first, second = replicas
    rows = make_rows(2)

    async def talk(client):
        second.scoring.wait = second.make_event()
        await send_all(client, rows, callers=8, requests=10)
        second.release(second.scoring.wait)
        second.scoring.wait = None
        before = None

        async def has_its_share():
            nonlocal before
            now = [len(each.scoring.requests) for each in replicas]
            share, before = before and now[1] - before[1], now
            return bool(share) and share >= 8

        end = time.monotonic() + 60
        while not await has_its_share():
            assert time.monotonic() < end, "the recovered replica does not get its share"
            for _ in range(20):
                await client.score(*rows)

    run_client(None, talk, url=f"ipv4:127.0.0.1:{first.port},127.0.0.1:{second.port}")


def test_server_that_hangs_alone_answers_its_calls_after_it_resumes(
    stuck, make_rows, score_rows, quick_stalls
):
    rows = make_rows(2)

    async def talk(client):
        callers = [asyncio.create_task(client.score(*rows)) for _ in range(8)]
        await until(lambda: stuck.scoring.in_flight == 16)  # each request was sent twice
        stuck.release(stuck.scoring.wait)
        return await asyncio.gather(*callers)

    for answer in run_client(stuck, talk):
        np.testing.assert_array_equal(answer.scores, score_rows(*rows))
    assert stuck.scoring.cancelled == 0
    assert len(stuck.scoring.requests) <= 16 + 8


def test_addresses_that_name_gains_and_loses_are_followed(replicas, make_rows, monkeypatch):
    first, second = replicas
    rows, known = make_rows(2), [[f"ipv4:127.0.0.1:{first.port}"]]

    async def resolve(server):
        assert server == "dns:///triton:8001"
        if isinstance(known[0], OSError):
            raise known[0]
        return known[0]

    monkeypatch.setattr(transport_module, "resolve", resolve)
    monkeypatch.setattr(transport_module, "_RESOLVE_SECONDS", 0.0)

    async def send_until(client, answering, *others):
        before = [len(each.scoring.requests) for each in others]
        seen, end = len(answering.scoring.requests), time.monotonic() + 60
        while len(answering.scoring.requests) < seen + 20:
            assert time.monotonic() < end
            await client.score(*rows)
        return [len(each.scoring.requests) - b for each, b in zip(others, before)]

    async def talk(client):
        assert await send_until(client, first, second) == [0]
        known[0] = [f"ipv4:127.0.0.1:{second.port}"]
        assert await send_until(client, second, first) <= [5]
        known[0] = OSError("no such name")
        assert await send_until(client, second, first) <= [5]

    run_client(None, talk, url="dns:///triton:8001")
    known[0] = OSError("no such name")
    with raises(ServerUnavailable, "dns:///triton:8001", "unavailable", "no such name"):
        run_client(
            None, lambda client: client.score(*rows), url="dns:///triton:8001", max_attempts=2
        )
