"""Shadow requests: the other arm's scores for the record, at nobody's expense; a real server with two models."""

from __future__ import annotations

import asyncio

import numpy as np

from components.contracts.records import decode, encode
from inference_client.ranking import FeatureRows, rank
from inference_client.scorer import shadow_of
from tests.inference_client.following import CANARY, KEYS, STABLE, follow, make_plan, until


def test_shadow_scores_are_the_other_arms_and_served_to_nobody(served, objects, publish, make_rows, score_rows):
    plan = make_plan(shadow=1.0)
    publish(plan)
    rows = make_rows(4)

    async def talk(client):
        answers = []
        for key in KEYS[:12]:
            answer = await client.score(*rows, key=key)
            answers.append((key, answer, await shadow_of(answer, 20)))
        assert client.summary()["shadow"] == {"sent": 12, "answered": 12, "dropped": 0, "failed": {}}
        return answers

    for key, answer, shadow in follow(served, objects, talk):
        by_arm = {STABLE: score_rows(*rows), CANARY: 1 - score_rows(*rows)}
        arm = plan.arm_for(key)
        other = STABLE if arm == CANARY else CANARY
        np.testing.assert_array_equal(answer.scores, by_arm[arm])
        np.testing.assert_array_equal(shadow.scores, by_arm[other])
        assert (answer.model_version, shadow.model_version) == (arm.version, other.version)


def test_a_share_of_the_requests_has_a_shadow(served, objects, publish, make_rows):
    plan = make_plan(share=0.0, shadow=0.3)
    publish(plan)

    async def talk(client):
        with_shadow = []
        for i in range(100):
            answer = await client.score(*make_rows(1), request_id=f"r{i}", key="one user")
            if await shadow_of(answer, 20):
                with_shadow.append(f"r{i}")
        return with_shadow

    found = follow(served, objects, talk)
    assert found == [f"r{i}" for i in range(100) if plan.shadow_for("one user", f"r{i}")]
    assert 15 < len(found) < 45


def test_a_stuck_shadow_delays_nobody_and_those_beyond_the_bound_are_dropped(
    served, objects, publish, make_rows, score_rows
):
    publish(make_plan(share=0.0, shadow=1.0))
    served.scoring.canary_wait = served.make_event()
    rows = make_rows(2)

    async def talk(client):
        answers = [await client.score(*rows) for _ in range(10)]
        for answer in answers:
            np.testing.assert_array_equal(answer.scores, score_rows(*rows))
        assert client.summary()["shadow"] == {"sent": 2, "answered": 0, "dropped": 8, "failed": {}}
        assert await shadow_of(answers[0], 0.01) is None
        assert await shadow_of(answers[9], 0.01) is None
        served.release(served.scoring.canary_wait)
        # Who has not waited may still look later.
        assert (await shadow_of(answers[0], 20)).model_version == 4

    follow(served, objects, talk, max_shadows=2)


def test_a_failing_shadow_fails_no_request(served, objects, publish, make_rows):
    publish(make_plan(share=0.0, shadow=1.0))
    served.scoring.canary_version = None

    async def talk(client):
        answer = await client.score(*make_rows(2))
        assert await shadow_of(answer, 20) is None
        assert client.summary()["shadow"]["failed"] == {"ModelAbsent": 1}
        return answer

    assert follow(served, objects, talk).model_version == 3


def test_no_shadow_is_sent_while_served_requests_wait(served, objects, publish, make_rows):
    publish(make_plan(share=0.0, shadow=1.0))
    served.scoring.wait = served.make_event()

    async def talk(client):
        callers = [asyncio.create_task(client.score(*make_rows(1))) for _ in range(8)]
        await until(lambda: served.scoring.in_flight == 1)
        served.release(served.scoring.wait)
        await asyncio.gather(*callers)
        await client.shadows.close()
        return client.summary()["shadow"]

    shadow = follow(served, objects, talk, max_in_flight=1, max_shadows=100)
    # The last one has nobody behind it.
    assert shadow["dropped"] >= 6
    assert shadow["dropped"] + shadow["answered"] == 8


def test_both_arms_at_one_version_are_no_comparison(served, objects, publish, make_rows):
    publish(make_plan(share=0.0, shadow=1.0))
    served.scoring.version = 4

    async def talk(client):
        return await shadow_of(await client.score(*make_rows(2)), 20)

    assert follow(served, objects, talk) is None


def test_a_ranked_list_is_one_arms_and_its_record_holds_the_shadows_scores_of_what_was_shown(
    served, objects, publish, make_rows, score_rows
):
    publish(make_plan(share=1.0, shadow=1.0))
    dense, categorical = make_rows(9000, seed=1)
    context = FeatureRows(dense=np.ones((1, 13), np.float32), categorical=np.full((1, 26), 5))
    filled = np.where(np.isnan(dense), 1, dense), np.where(categorical == -1, 5, categorical)

    async def talk(client):
        ranking = await rank(client, context, FeatureRows(dense=dense, categorical=categorical), 10, key="a user")
        return ranking, await ranking.record_with_shadow(12.5, 20)

    ranking, record = follow(served, objects, talk)
    expected = 1 - score_rows(*filled)
    best = np.argsort(-expected, kind="stable")[:10]
    np.testing.assert_array_equal(ranking.candidates, best)
    back = decode(encode(record))
    assert (back.canary, back.model_version, back.shadow_version) == (True, 4, 3)
    np.testing.assert_array_equal(back.scores, expected[best])
    np.testing.assert_array_equal(back.shadow_scores, score_rows(*filled)[best])
