"""The numbers in the running monitor: from records in the log to what is shown of each version."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import ndcg_score, roc_auc_score

from tests.support.monitors import START, WINDOW, clicks, prediction, publish


def test_ranked_requests_reach_the_kpis(bench):
    b = bench()
    monitor = b.start()
    positions = np.array([3, 1, 2, 4, 6, 5, 12, 7], np.int32)
    lists = [
        dataclasses.replace(prediction(name, 8, time=START + i), session_id=name, positions=positions)
        for i, name in enumerate(["a", "b", "c"])
    ]
    outcomes = [("a", 0, START + 5), ("a", 3, START + 6), ("b", 6, START + 7)]
    publish(b.log, *lists, prediction("d", 8, time=START + 3), clicks("o", outcomes))
    b.clock.now = START + WINDOW + 10
    monitor.tick()
    (kpis,) = monitor._measuring.shown
    labels = np.zeros((4, 8), int)
    for name, row, _ in outcomes:
        labels["abcd".index(name), row] = 1
    assert (kpis.ranked_lists, kpis.hit_rate) == (3, pytest.approx(1 / 3))
    assert kpis.ndcg == pytest.approx(ndcg_score(labels[:1], [-positions], k=10) / 2)


def test_auc_without_labels_is_estimated_once_enough_rows_have_matured(bench):
    random = np.random.default_rng(0)

    def scored(name, time):
        return prediction(name, 600, time=time, scores=random.beta(2, 5, 600))

    b = bench(decide_seconds=1.0)
    monitor = b.start()
    first = scored("first", START)
    clicked = np.flatnonzero(random.random(600) < first.scores)
    publish(b.log, first, clicks("o", [("first", int(row), START + 1) for row in clicked]))
    b.clock.now = START + 2
    monitor.tick()
    assert monitor._measuring.open_labels[0].score_auc is None
    publish(b.log, scored("second", START + WINDOW))
    b.clock.now = START + WINDOW + 2
    monitor.tick()
    (shown,) = monitor._measuring.open_labels
    assert (shown.estimate.open_rows, shown.estimate.open_clicks) == (600, 0)
    truth = roc_auc_score(np.isin(np.arange(600), clicked), first.scores)
    assert shown.score_auc.low < truth < shown.score_auc.high
    assert 0.6 < shown.score_auc.auc < 0.9
