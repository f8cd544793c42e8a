"""The numbers in the running monitor: from records in the log to what is shown of each version."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from tests.support.monitors import START, WINDOW, clicks, prediction, publish


def test_ranked_requests_reach_the_kpis(bench):
    b = bench()
    monitor = b.start()
    positions = np.array([3, 1, 2, 4, 6, 5, 12, 7], np.int32)
    lists = [
        dataclasses.replace(prediction(name, 8, time=START + i), positions=positions)
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
