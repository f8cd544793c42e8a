"""Tests of a client that follows a traffic plan, and of shadow requests that delay no caller."""

import asyncio
import logging
import threading
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from inference_client import routing
from inference_client.errors import DeadlineExpired
from inference_client.recommender import RecommenderClient
from inference_client.routing import PlanFollower, PlannedClient
from inference_client.rows import FeatureRows
from inference_client.scoring import shadow_of
from testing.recommenders import SHOP
from testing.served_names import CANARY_NAME, MODEL_NAME, TRAFFIC_FILE
from tests.support.errors import raises
from tests.support.traffic_plans import KEYS, follow, make_plan, until


def test_without_plan_stable_model_answers(served, objects, make_rows):
    async def talk(client):
        assert client.plan.problem is None
        return [await client.score(*make_rows(2), key=key) for key in KEYS[:10]]

    assert {answer.model_version for answer in follow(served, objects, talk)} == {3}
    assert set(served.scoring.model_names) == {MODEL_NAME}


def test_published_plan_is_followed_and_so_is_its_removal(served, objects, publish, make_rows):
    async def talk(client):
        rows = make_rows(2)
        assert not (await client.score(*rows)).canary
        publish(make_plan(share=1.0))
        await until(lambda: client.plan.current is not None)
        assert (await client.score(*rows)).canary
        publish(make_plan(2, canary=None))
        await until(lambda: client.plan.current.canary is None)
        assert not (await client.score(*rows)).canary
        publish(make_plan(3, share=1.0))
        await until(lambda: client.plan.current.canary is not None)
        objects.delete(TRAFFIC_FILE)
        await until(lambda: client.plan.current is None)
        assert not (await client.score(*rows)).canary

    follow(served, objects, talk, interval=0.01)


def test_corrupt_plan_leaves_last_good_one_in_force_and_is_reported_once(
    served, objects, publish, make_rows, caplog, monkeypatch
):
    publish(make_plan(share=1.0))

    async def talk(client):
        with caplog.at_level(logging.WARNING, "inference_client.routing"):
            publish(b"{ no plan")
            await until(lambda: client.plan.problem)
            reads, refresh = [], client.plan.refresh
            monkeypatch.setattr(client.plan, "refresh", lambda: reads.append(refresh()))
            await until(lambda: len(reads) >= 3)
        assert "traffic.json is" in client.plan.problem
        assert (await client.score(*make_rows(2))).canary
        # If the client's code fails while it reads the plan, the client keeps the last plan. A
        # storage error has the same effect.
        storage, client.plan.objects = client.plan.objects, None
        await until(lambda: "NoneType" in client.plan.problem)
        publish(make_plan(2, canary=None))
        client.plan.objects = storage
        await until(lambda: client.plan.problem is None)
        assert not (await client.score(*make_rows(2))).canary

    follow(served, objects, talk, interval=0.01)
    assert len([r for r in caplog.records if "traffic.json" in r.message]) == 1


def test_storage_that_hangs_delays_neither_requests_nor_end(served, make_rows, monkeypatch):
    monkeypatch.setattr(routing, "_FIRST_READ_SECONDS", 0.05)
    released = threading.Event()
    # The timer releases hanging calls. A passing test ends long before the timer.
    late = threading.Timer(20, released.set)
    late.start()

    async def run():
        hanging = SimpleNamespace(
            uri="file:///somewhere", read=lambda name: released.wait(30) and None
        )
        async with PlannedClient(served.url, PlanFollower(hanging, MODEL_NAME)) as client:
            return await client.score(*make_rows(2))

    try:
        assert asyncio.run(run()).model_version == 3
        assert not released.is_set()
    finally:
        late.cancel()
        released.set()


def test_absent_canary_fails_no_request(served, objects, publish, make_rows, score_rows):
    publish(make_plan(share=1.0))
    rows = make_rows(3)

    async def talk(client):
        served.scoring.canary_version = None
        publish(make_plan(2, canary=None))
        answer = await client.score(*rows)
        assert (answer.canary, answer.model_version) == (False, 3)
        np.testing.assert_array_equal(answer.scores, score_rows(*rows))
        assert dict(client.fallbacks) == {"ModelAbsent": 1}
        client.plan.refresh()
        await client.score(*rows)

    follow(served, objects, talk)
    assert served.scoring.model_names == [CANARY_NAME, MODEL_NAME, MODEL_NAME]


@pytest.mark.parametrize("version", ["", "latest", "4.0", "-4", "\u00b2", "9" * 20, "9" * 5000])
@pytest.mark.parametrize("arm", ["canary", "shadow"])
def test_canary_with_invalid_version_fails_no_request_and_loses_no_record(
    served, objects, publish, make_rows, score_rows, read_log, tmp_path, version, arm
):
    served.scoring.canary_version = version
    rows = FeatureRows(dense=make_rows(2)[0], categorical=make_rows(2)[1])
    publish(make_plan(share=1.0) if arm == "canary" else make_plan(share=0.0, shadow=1.0))

    async def talk():
        options = {
            "recommender": SHOP,
            "log": f"sqlite:///{tmp_path}/log.db",
            "plan_uri": objects.uri,
        }
        async with RecommenderClient(served.url, **options) as client:
            answers = [
                await client.score(rows, request_id=f"r{i}", key=f"user {i}") for i in range(3)
            ]
        return answers, client.log_counts

    answers, counts = asyncio.run(talk())
    for answer in answers:
        assert (answer.canary, answer.model_version, answer.logged) == (False, 3, True)
        np.testing.assert_array_equal(answer.scores, score_rows(rows.dense, rows.categorical))
    records = read_log(tmp_path / "log.db")
    logged = sorted(
        (each.request_id, each.model_version, each.shadow_version is None) for each in records
    )
    assert logged == [(f"r{i}", 3, True) for i in range(3)]
    assert (counts.published_rows, counts.dropped_rows) == (6, 0)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ((grpc.StatusCode.INTERNAL, "Stub process 'x' is not healthy."), "ServerFault"),
        ((grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape"), "BadRequest"),
    ],
    ids=["fault", "refusal"],
)
def test_stable_arm_answers_where_canary_cannot(
    served, objects, publish, make_rows, score_rows, failure, kind
):
    publish(make_plan(share=1.0, shadow=1.0))
    served.scoring.canary_failure = failure
    rows = make_rows(3)

    async def talk(client):
        answer = await client.score(*rows)
        assert dict(client.fallbacks) == {kind: 1}
        return answer

    answer = follow(served, objects, talk)
    np.testing.assert_array_equal(answer.scores, score_rows(*rows))
    # The stable version answers if the canary fails. A shadow request would go to the stable
    # version too, so no shadow request is sent.
    assert (answer.canary, answer.shadow) == (False, None)
    assert served.scoring.model_names == [CANARY_NAME, MODEL_NAME]


def test_one_deadline_covers_both_arms(served, objects, publish, make_rows):
    publish(make_plan(share=1.0))
    served.scoring.canary_failure = (grpc.StatusCode.INTERNAL, "broken")
    served.scoring.wait = served.make_event()
    # The canary fails after 29.9 of the 30 seconds.
    times = iter([100.0, 129.9])

    async def run():
        async with PlannedClient(
            served.url, PlanFollower(objects, MODEL_NAME), timer=lambda: next(times)
        ) as client:
            asking = asyncio.create_task(client.score(*make_rows(1)))
            await until(lambda: served.scoring.in_flight == 1)
            served.release(served.scoring.wait)
            served.scoring.wait = served.make_event()
            with raises(DeadlineExpired, "within 0.1 s"):
                await asking
            served.release(served.scoring.wait)

    asyncio.run(run())


def test_record_contains_reply_and_not_what_plan_promised(served, objects, publish, make_rows):
    publish(make_plan(share=1.0))
    served.scoring.canary_version = 9

    async def talk(client):
        return await client.score(*make_rows(1))

    answer = follow(served, objects, talk)
    assert (answer.canary, answer.model_version) == (True, 9)


def test_stuck_shadow_delays_no_request_and_excess_shadows_are_dropped(
    served, objects, publish, make_rows, score_rows
):
    publish(make_plan(share=0.0, shadow=1.0))
    served.scoring.canary_wait = served.make_event()
    rows = make_rows(2)

    async def talk(client):
        answers = [await client.score(*rows) for _ in range(10)]
        for answer in answers:
            np.testing.assert_array_equal(answer.scores, score_rows(*rows))
        assert client.shadow_counts == {"dropped": 8}
        assert await shadow_of(answers[0], 0.01) is None
        assert await shadow_of(answers[9], 0.01) is None
        served.release(served.scoring.canary_wait)
        # A caller can also read the shadow scores later.
        assert (await shadow_of(answers[0], 20)).model_version == 4

    follow(served, objects, talk, max_shadows=2)


def test_failing_shadow_fails_no_request(served, objects, publish, make_rows):
    publish(make_plan(share=0.0, shadow=1.0))
    served.scoring.canary_version = None

    async def talk(client):
        answer = await client.score(*make_rows(2))
        assert await shadow_of(answer, 20) is None
        assert client.shadow_counts == {"ModelAbsent": 1}
        return answer

    assert follow(served, objects, talk).model_version == 3


def test_no_shadow_is_sent_while_served_requests_wait(served, objects, publish, make_rows):
    publish(make_plan(share=0.0, shadow=1.0))
    served.scoring.wait = served.make_event()

    async def talk(client):
        callers = [asyncio.create_task(client.score(*make_rows(1))) for _ in range(8)]
        await until(lambda: served.scoring.in_flight == 1)
        served.release(served.scoring.wait)
        answers = await asyncio.gather(*callers)
        await asyncio.gather(*(shadow_of(answer, 20) for answer in answers))
        return client.shadow_counts

    shadow = follow(served, objects, talk, max_in_flight=1, max_shadows=100)
    # The last request is not dropped, because no request follows.
    assert shadow["dropped"] >= 6
    assert shadow["dropped"] + shadow["answered"] == 8


def test_ranked_list_is_from_one_arm_and_records_shadow_scores_of_its_rows(
    served, objects, publish, make_rows, score_rows, read_log, tmp_path
):
    publish(make_plan(share=1.0, shadow=1.0))
    dense, categorical = make_rows(9000, seed=1)
    log = f"sqlite:///{tmp_path}/log.db"

    async def talk(planned):
        async with RecommenderClient(planned, recommender=SHOP, log=log) as client:
            return await client.rank(
                FeatureRows(dense=dense, categorical=categorical), 10, key="a user"
            )

    ranking = follow(served, objects, talk)
    expected = 1 - score_rows(dense, categorical)
    best = np.argsort(-expected, kind="stable")[:10]
    np.testing.assert_array_equal(ranking.candidates, best)
    [record] = read_log(tmp_path / "log.db")
    assert (record.canary, record.model_version, record.shadow_version) == (True, 4, 3)
    np.testing.assert_array_equal(record.scores, expected[best])
    np.testing.assert_array_equal(record.shadow_scores, score_rows(dense, categorical)[best])
