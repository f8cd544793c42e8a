from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from components.contracts import criteo
from components.validation.drift import JENSEN_SHANNON, L_INFINITY, measure_drift, new_value_share
from components.validation.log_histogram import EDGES
from components.validation.settings import ValidationSettings
from components.validation.summarize import by_feature, summarize

SETTINGS = ValidationSettings()


def statistics(table):
    return summarize(table.to_batches())


def drift_of(now, before, settings=SETTINGS):
    return {entry["feature"]: entry for entry in measure_drift(statistics(now), statistics(before), settings)}


def test_every_feature_has_an_entry_and_an_unchanged_window_none_that_warns(judged):
    drift = drift_of(judged(4000, seed=1), judged(4000))
    assert tuple(drift) == criteo.FEATURES
    assert {entry["severity"] for entry in drift.values()} == {"info"}
    assert max(drift[name]["distance"] for name in criteo.DENSE) < 0.01
    assert max(drift[name]["distance"] for name in criteo.CATEGORICAL) < 0.05


@pytest.mark.parametrize("rows", [60, 300])
def test_small_windows_do_not_raise_alarms(judged, rows):
    for seed in range(1, 4):
        drift = drift_of(judged(rows, seed=seed), judged(4000))
        assert [name for name, entry in drift.items() if entry["severity"] != "info"] == []


def test_distances_equal_their_definitions(judged):
    before, now = judged(3000), judged(2000, seed=1)
    drift = drift_of(now, before)

    def shares(table, name):
        values = table[name].drop_null()
        return {v["values"]: v["counts"] / len(values) for v in values.value_counts().to_pylist()}

    for name in criteo.CATEGORICAL:
        p, q = shares(before, name), shares(now, name)
        expected = max(abs(p.get(v, 0) - q.get(v, 0)) for v in p.keys() | q.keys())
        assert drift[name]["measure"] == L_INFINITY
        assert drift[name]["distance"] == pytest.approx(expected)
    for name in criteo.DENSE:
        p, q = (np.histogram(t[name].drop_null().to_numpy(), EDGES)[0] for t in (before, now))
        p, q = p / p.sum(), q / q.sum()
        assert drift[name]["measure"] == JENSEN_SHANNON
        assert drift[name]["distance"] == pytest.approx((entropy(p, (p + q) / 2) + entropy(q, (p + q) / 2)) / 2)
        assert drift[name]["num_rows_now"] == 2000 - now[name].null_count
        assert drift[name]["num_rows_before"] == 3000 - before[name].null_count


def entropy(p, q):
    return sum(a * np.log2(a / b) for a, b in zip(p, q) if a)


def test_a_planted_category_swap_is_large_and_named(judged):
    rows = judged(4000, seed=1)
    top, second = (v["values"] for v in sorted(rows["C9"].value_counts().to_pylist(), key=lambda v: -v["counts"])[:2])
    values = rows["C9"].to_pandas().astype("Int64").replace({top: second, second: top})
    drift = drift_of(judged(4000, seed=1, C9=pa.array(values, pa.int64())), judged(4000))
    assert [name for name, entry in drift.items() if entry["severity"] == "warn"] == ["C9"]
    assert drift["C9"]["distance"] > 0.2
    assert drift["C9"]["moved_value"]["value"] in (str(top), str(second))
    assert drift["C9"]["new_value_share"] == 0


def test_a_shift_by_half_a_standard_deviation_of_a_heavy_tail_is_seen(judged):
    rows = judged(4000, seed=1)
    shifted = pa.array(np.floor(rows["I5"].to_numpy() * np.float32(np.exp(0.6))), pa.float32())
    drift = drift_of(judged(4000, seed=1, I5=shifted), judged(4000))
    assert [name for name, entry in drift.items() if entry["severity"] == "warn"] == ["I5"]


def test_a_permutation_of_a_column_without_frequent_values_is_seen(judged):
    random = np.random.default_rng(0)

    def draw(order):
        return pa.array(order[np.minimum(random.zipf(1.05, 20_000), 500) % 500])

    order = np.arange(500, dtype=np.int64)
    before = draw(order)
    unchanged, permuted = draw(order), draw(random.permutation(order))
    rows = judged(20_000)
    place = rows.schema.get_field_index("C3")
    base = rows.set_column(place, "C3", before)
    assert drift_of(rows.set_column(place, "C3", unchanged), base)["C3"]["severity"] == "info"
    assert drift_of(rows.set_column(place, "C3", permuted), base)["C3"]["severity"] == "warn"


def test_new_value_share_counts_planted_new_values_and_no_rare_old_ones(judged):
    rows = judged(4000, seed=1)
    values = rows["C20"].to_pandas().to_numpy(dtype=float, na_value=np.nan)
    values[:400] = 123456789
    now = statistics(judged(4000, seed=1, C20=pa.array(values, pa.int64(), from_pandas=True)))
    before = statistics(judged(4000))
    share = new_value_share(by_feature(now)["C20"], by_feature(before)["C20"])
    assert share == pytest.approx(400 / np.isfinite(values).sum())
    unchanged, known = by_feature(statistics(judged(500, seed=2))), by_feature(before)
    for name in criteo.CATEGORICAL:
        assert new_value_share(unchanged[name], known[name]) == 0


def test_distance_is_none_where_a_side_has_no_values(judged):
    empty = pa.nulls(500, pa.float32())
    drift = drift_of(judged(500, I1=empty, C1=pa.nulls(500, pa.int64())), judged(500))
    for name in ("I1", "C1"):
        assert drift[name]["distance"] is None
        assert drift[name]["threshold"] is None
        assert drift[name]["severity"] == "info"
    assert drift["C1"]["new_value_share"] is None
    assert drift["I2"]["distance"] is not None
