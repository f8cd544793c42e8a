"""Tests of explored lists from the client's log up to the verdict."""

import asyncio
import random

import numpy as np
import pytest

from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.storage.uris import local_path
from inference_client import Outcome, RecommenderClient
from inference_client.scoring import Scored
from inference_client.timing import Timing
from monitoring.uploader import Uploader
from tests.support.lakes import table_in
from tests.support.monitors import Bench

pytestmark = pytest.mark.timeout(300)

LISTS, PLACES, SHARE = 700, 4, 0.4


class LiveModel:
    """Ranks rows by a feature that hardly predicts the clicks."""

    async def score(self, dense, categorical, *, request_id=None, key=None):
        return Scored((0.5 / (1 + np.nan_to_num(dense[:, 0]))).astype(np.float32), 1)


def _talk(url, rows, clock):
    """Send requests with four rows, each of which is ranked as a list.

    Users see lower positions less often, and click rows whose label is 1.
    """
    chance, requested = random.Random(5), []

    async def talk():
        timing = Timing(clock=clock, uniform=chance.random)
        async with RecommenderClient(
            LiveModel(), recommender=CRITEO_RECOMMENDER, log=url, timing=timing
        ) as client:
            for number in range(LISTS):
                clock.now += 1
                part = rows.slice(number * PLACES, PLACES)
                ranking = await client.rank(part.select(criteo.FEATURES), PLACES, explore=SHARE)
                labels = part[raw_rows.LABEL].to_numpy()[ranking.candidates]
                clicks = [
                    position
                    for position in range(PLACES)
                    if labels[position] and chance.random() < 0.9**position
                ]
                for position in clicks:
                    client.report(Outcome(request_id=ranking.request_id, row=position))
                requested.append((ranking, clicks))

    asyncio.run(talk())
    return requested


@pytest.fixture
def evaluated(tmp_path, criteo_table, chain_of):
    """The client's lists and clicks, the holdout rows, and the verdict."""
    bench = Bench(
        tmp_path,
        recommender=CRITEO_RECOMMENDER,
        attribution_window_seconds=10.0,
        archive_roll_rows=500,
    )
    requested = _talk(bench.url, criteo_table(LISTS * PLACES, seed=3), bench.clock)
    bench.start()
    bench.turn(12, 10.0)
    bench.monitor.stop()
    bench.close()
    Uploader(bench.settings.archive, tmp_path / "lake", clock=bench.clock).run_once()
    chain = chain_of(extraction={"holdout_fraction": 0.5})
    this = chain.turn_to_training("first")
    verdict, _ = chain.step("evaluation", "first", {"model": this.paths["training"]})
    return requested, table_in(this.extraction.holdout_uri), verdict


def test_verdict_contains_what_explored_lists_show_about_candidate(evaluated):
    requested, held_out, verdict = evaluated
    with np.load(local_path(verdict.scores_uri)) as scores:
        keys = zip(held_out[raw_rows.REQUEST_ID].to_pylist(), held_out[raw_rows.ROW].to_pylist())
        candidate = dict(zip(keys, scores["candidate"].tolist()))
    lists = [
        (r, c)
        for r, c in requested
        if all((r.request_id, row) in candidate for row in range(PLACES))
    ]
    assert 0.4 * LISTS < len(lists) < 0.6 * LISTS

    # Compute the gain's sums independently, list by list, from the client's lists and clicks.
    total = num_swaps = num_disputed = 0
    seen = expected = 1.0
    for ranking, clicks in lists:
        # Rows with equal scores stay in the given order.
        order = np.lexsort((ranking.candidates, -ranking.scores))
        seen_before, expected_before = seen, expected
        for upper, lower in zip(order, order[1:]):
            on_pair = float((upper in clicks) + (lower in clicks))
            forecast = float(ranking.scores[upper]) + float(ranking.scores[lower])
            seen, expected = seen + on_pair, expected + forecast
            if candidate[ranking.request_id, lower] <= candidate[ranking.request_id, upper]:
                continue
            num_disputed += 1
            excess = on_pair - min(2.0, forecast * seen_before / expected_before)
            if upper > lower:
                num_swaps += 1
                total += excess
            elif order.tolist() == list(range(PLACES)):
                total -= SHARE / (1 - SHARE) / (PLACES - 1) * excess
    found = verdict.reordering_gain
    assert (found.num_lists, found.num_swaps) == (len(lists), num_swaps)
    assert found.disputed_share == pytest.approx(num_disputed / len(lists) / (PLACES - 1))
    assert found.gain == pytest.approx(total / (num_disputed * SHARE / (PLACES - 1)), rel=1e-5)
    assert found.low < found.gain < found.high
