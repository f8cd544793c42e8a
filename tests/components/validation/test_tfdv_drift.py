"""TFDV's distances that the report shows, against their definitions, and what is left out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from components.contracts import criteo
from components.validation.log_histogram import EDGES
from components.validation.tfdv_drift import tfdv_distances
from tests.components.validation.counting import statistics_of


def distances(now, before, excluded=()):
    return tfdv_distances(statistics_of(now), statistics_of(before), excluded)


def entropy(p, q):
    return sum(a * np.log2(a / b) for a, b in zip(p, q) if a)


def test_distances_equal_their_definitions(judged):
    before, now = judged(3000), judged(2000, seed=1)
    found = distances(now, before)

    def shares(table, name):
        values = table[name].drop_null()
        return {v["values"]: v["counts"] / len(values) for v in values.value_counts().to_pylist()}

    for name in criteo.CATEGORICAL:
        p, q = shares(before, name), shares(now, name)
        assert found[name] == pytest.approx(max(abs(p.get(v, 0) - q.get(v, 0)) for v in p.keys() | q.keys()))
    for name in criteo.DENSE:
        p, q = (np.histogram(t[name].drop_null().to_numpy(), EDGES)[0] for t in (before, now))
        p, q = p / p.sum(), q / q.sum()
        assert found[name] == pytest.approx((entropy(p, (p + q) / 2) + entropy(q, (p + q) / 2)) / 2)


def test_a_column_without_values_or_left_out_has_no_distance(judged):
    now = judged(500, I1=pa.nulls(500, pa.float32()), C1=pa.nulls(500, pa.int64()))
    found = distances(now, judged(500), excluded=("C5",))
    assert set(criteo.FEATURES) - set(found) == {"I1", "C1", "C5"}
