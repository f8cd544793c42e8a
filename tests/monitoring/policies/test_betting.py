"""Tests of the sequential test's e-processes: payoffs of pairs, capital and stored state."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.policies.betting import FRACTIONS, EProcess, cross_wins
from testing.click_streams import ClickTraffic, draw, part
from tests.support.evidence import rows_of

NEVER = float("inf")


def by_brute_force(labels, scores, groups, rounds, num_rounds):
    wins, pairs = np.zeros(num_rounds), np.zeros(num_rounds)
    for i in np.flatnonzero(labels == 1):
        for j in np.flatnonzero(labels == 0):
            if rounds[i] == rounds[j] and groups[i] != groups[j]:
                wins[rounds[i]] += (scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j])
                pairs[rounds[i]] += 1
    return wins, pairs


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    per_round=st.integers(2, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_pairs_of_different_requests_of_one_round_are_counted(sizes, per_round, seed):
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = (random.random(len(groups)) < 0.4).astype(np.uint8)
    scores = random.integers(0, 5, len(groups)).astype(np.float32)  # scores with many ties
    rounds, num_rounds = groups // per_round, len(sizes) // per_round + 1
    found = cross_wins(labels, scores, groups, rounds=rounds, num_rounds=num_rounds)
    for ours, expected in zip(found, by_brute_force(labels, scores, groups, rounds, num_rounds)):
        np.testing.assert_array_equal(ours, expected)


def test_bets_that_neither_win_nor_lose_keep_capital_at_one():
    """The capital stays 1 if every pair is a tie and the null hypothesis is an AUC of 0.5."""
    process = EProcess(0.5, {})
    for _ in range(50):
        process.update(rows_of([1, 0, 0, 0] * 10, [0.5] * 40), NEVER)
        assert process.value == pytest.approx(1.0, abs=1e-12)
    assert process.rounds > 100


def test_no_round_loses_all_capital_even_where_every_click_is_on_top():
    process = EProcess(0.9, {})
    for _ in range(20):
        process.update(rows_of([1, 0, 0, 0] * 10, [0.9, 0.1, 0.2, 0.3] * 10), NEVER)
        assert 0.0 < process.value <= 1.0
    assert all(0.0 < fraction < 1.0 for fraction in FRACTIONS)


def test_state_stored_as_json_continues_unchanged():
    random = np.random.default_rng(1)
    traffic = ClickTraffic(0.1, 100, rows_per_request=3)
    stream = draw(random, traffic, rows=3_000, auc=0.7)
    whole, state = EProcess(0.75, {}), {}
    for begin in range(0, 3_000, 90):
        rows = part(stream, begin, min(begin + 90, 3_000))
        whole.update(rows, NEVER)
        resumed = EProcess(0.75, state)
        resumed.update(rows, NEVER)
        state = json.loads(json.dumps(resumed.state_dict()))
        assert resumed.value == whole.value
    assert whole.rounds > 50


def test_requests_of_incomplete_round_wait_for_next_update():
    process = EProcess(0.75, {})
    # From the next update on, a round consists of 8 requests.
    process.update(rows_of([1, 0, 0, 0] * 10, [0.5] * 40), NEVER)
    sizes = [1, 2, 1, 1, 3, 1, 1, 1, 2, 1, 3]
    labels = [0] * sum(sizes)
    process.update(
        rows_of(labels, np.arange(len(labels)), np.repeat(np.arange(len(sizes)), sizes)), NEVER
    )
    left = process.state_dict()["rows"]
    assert (left["sizes"], left["clicks"]) == ([2, 1, 3], [])
    restored = EProcess(0.75, process.state_dict())
    for each in (process, restored):
        each.update(rows_of([0, 0], [0.1, 0.2], [0, 0]), NEVER)
        assert each.state_dict()["rows"]["sizes"] == [2, 1, 3, 2]


def test_evidence_against_another_hypothesis_is_not_carried_over():
    process = EProcess(0.75, {})
    process.update(rows_of([1, 0, 0, 0] * 10, [0.0, 0.1, 0.2, 0.3] * 10), NEVER)
    assert EProcess(0.7, process.state_dict()).rounds == 0
