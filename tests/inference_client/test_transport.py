"""Deadlines, cancelled callers, back-pressure and replicas, against real gRPC servers."""

import asyncio
import time

import grpc
import numpy as np
import pytest

from inference_client.errors import BadRequest, DeadlineExpired, Overloaded, ServerUnavailable
from inference_client.scoring import ClientSettings, ScoringClient
from inference_client.timing import Timing, shortened
from tests.support.served_names import MODEL_NAME
from tests.support.traffic_plans import until
from tests.support.triton_double import RunningServer
from tests.support.virtual_time import VirtualTime

ABSENT = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'click_model' is not found")


@pytest.fixture
def stuck(server):
    """The server, holding every answer back; the test releases it."""
    server.scoring.wait = server.make_event()
    yield server
    server.release(server.scoring.wait)


def converse(server, conversation, url=None, **settings):
    async def run():
        async with ScoringClient(
            url or server.url, MODEL_NAME, ClientSettings(**settings), timing=Timing(jitter=float)
        ) as client:
            return await conversation(client)

    return asyncio.run(run())


def test_an_expired_deadline_is_not_on_the_wire_and_the_call_keeps_its_slot(stuck, make_rows, score_rows):
    rows = make_rows(3)

    async def talk(client):
        with pytest.raises(DeadlineExpired, match=r"within 0\.5 s"):
            await client.score(*rows)
        assert (len(client.transport._calls), stuck.scoring.in_flight) == (1, 1)
        with pytest.raises(Overloaded, match=r"has 1 requests to answer and ended none within 0\.5 s"):
            await client.score(*rows)
        assert len(stuck.scoring.requests) == 1
        stuck.release(stuck.scoring.wait)
        await until(lambda: not client.transport._calls)
        return await client.score(*rows, deadline_seconds=20)

    answer = converse(stuck, talk, deadline_seconds=0.5, max_in_flight=1)
    np.testing.assert_array_equal(answer.scores, score_rows(*rows))
    assert stuck.scoring.cancelled == 0
    assert stuck.scoring.wire_seconds[0] > 250


def test_a_cancelled_caller_leaves_the_call_alone(stuck, make_rows):
    async def talk(client):
        caller = asyncio.create_task(client.score(*make_rows(3)))
        await until(lambda: stuck.scoring.in_flight)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert stuck.scoring.in_flight == len(client.transport._calls) == 1
        stuck.release(stuck.scoring.wait)
        await until(lambda: not stuck.scoring.in_flight)

    converse(stuck, talk)
    assert stuck.scoring.cancelled == 0


def test_a_full_line_is_said_at_once_and_takes_callers_again_when_it_moves(stuck, make_rows, score_rows):
    rows = make_rows(2)

    async def talk(client):
        callers = [asyncio.create_task(client.score(*rows)) for _ in range(3)]
        await until(lambda: stuck.scoring.in_flight == 1)
        with pytest.raises(Overloaded, match="has 3 callers waiting, expected fewer than 3"):
            await client.score(*rows)
        stuck.release(stuck.scoring.wait)
        answers = await asyncio.gather(*callers)
        return [*answers, await client.score(*rows)]

    answers = converse(stuck, talk, max_in_flight=1, max_waiting=2)
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

    converse(stuck, talk, deadline_seconds=0.5, close_seconds=0.1)


def test_the_deadline_bounds_all_attempts_and_waits_together(server, make_rows):
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

    with pytest.raises(ServerUnavailable, match="maximum queue size"):
        asyncio.run(run())
    # 0.8 more would pass the deadline.
    assert waits == [0.05, 0.1, 0.2, 0.4]


def test_chance_shortens_waits_by_up_to_a_half():
    waits = [shortened(2.0) for _ in range(2000)]
    assert 1.0 <= min(waits) < 1.05
    assert 1.95 < max(waits) <= 2.0


def test_a_model_that_answered_and_is_gone_is_asked_again(server, make_rows, score_rows):
    """A watchdog that reloads a model unloads it first."""
    rows = make_rows(3)

    async def talk(client):
        await client.score(*rows)
        server.scoring.failures = [ABSENT] * 3
        return await client.score(*rows)

    np.testing.assert_array_equal(converse(server, talk, first_backoff_seconds=0.01).scores, score_rows(*rows))


def test_a_message_larger_than_the_server_takes_is_not_tried_again(server, make_rows):
    text = "Received message larger than max (300000 vs. 1000)"
    server.scoring.always = (grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    with pytest.raises(BadRequest, match="takes no message of this size"):
        converse(server, lambda client: client.score(*make_rows(1)))


@pytest.fixture
def replicas():
    running = [RunningServer(), RunningServer()]
    yield running
    for each in running:
        each.close()


def test_requests_go_to_every_replica_in_turn_and_a_dead_one_costs_no_request(replicas, make_rows, score_rows):
    first, second = replicas
    rows = make_rows(2)

    async def talk(client):
        # Both must be connected before turns are even.
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
        # The one that comes back gets its share again.
        await asyncio.to_thread(second.start_again)
        seen = len(second.scoring.requests)
        end = time.monotonic() + 120
        while len(second.scoring.requests) == seen:
            assert time.monotonic() < end, "the replica that came back was not asked for 20 s"
            await client.score(*rows)

    converse(None, talk, url=f"ipv4:127.0.0.1:{first.port},127.0.0.1:{second.port}")
