"""A world that moves slowly: its truth at every time, how fast it forgets, and that nothing else wanders."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from components.contracts.criteo import CATEGORICAL
from inference_client.simulation.columns import CATEGORY_COLUMNS
from inference_client.simulation.slow_drift import DriftingWorld, SlowDrift, ornstein_uhlenbeck
from inference_client.simulation.world import World

ROWS = 50_000
C2, C14, C17 = (CATEGORICAL.index(name) for name in ("C2", "C14", "C17"))


@pytest.fixture(scope="module")
def world():
    return World.create(7)


@pytest.fixture(scope="module")
def drifting(world):
    return DriftingWorld(world=world, drift=SlowDrift(seed=3))


def moving(world, **settings):
    return DriftingWorld(world=world, drift=SlowDrift(seed=3, **settings))


def test_the_same_time_gives_the_same_world_whatever_was_asked_before(world, drifting):
    drifting.at(50.0)
    there, again = drifting.at(5.25), moving(World.create(7)).at(5.25)
    assert (there.bias, there.strength, there.bayes_auc) == (again.bias, again.strength, again.bayes_auc)
    for a, b in zip(there.draw(2000, np.random.default_rng(1)), again.draw(2000, np.random.default_rng(1))):
        np.testing.assert_array_equal(a, b)


def test_the_world_stands_still_within_a_step_and_moves_after_it(drifting):
    weights = [drifting.tables_at(hours).categories[C14].weights for hours in (0.25, 0.49, 0.5)]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[1], weights[2])


def test_an_hour_that_rounds_down_is_in_its_own_step(world):
    drifting = moving(world, step_minutes=6.0)
    assert [drifting.at(n / 10).hours for n in range(100)] == pytest.approx([n / 10 for n in range(100)])


@pytest.mark.parametrize("hours", [0.0, 49.5, 300.0])
def test_click_rate_and_best_auc_do_not_wander(world, drifting, hours):
    now = drifting.at(hours)
    rows = now.draw(ROWS, np.random.default_rng(5))
    measured = roc_auc_score(rows.label, rows.probability)
    assert rows.label.mean() == pytest.approx(world.click_rate, abs=0.008)
    assert measured == pytest.approx(now.bayes_auc, abs=0.01)
    assert now.bayes_auc == pytest.approx(drifting.at(0.0).bayes_auc, abs=0.006)


def test_a_snapshot_knows_the_probability_of_rows_that_it_drew(drifting):
    now = drifting.at(12.0)
    rows = now.draw(ROWS, np.random.default_rng(7))
    np.testing.assert_allclose(now.probability_of(rows.dense, rows.categorical), rows.probability, atol=1e-6)


def test_old_truth_loses_a_point_of_auc_in_a_day_and_more_the_older_it_is(world):
    """What the default `moving_share` promises, over five days that begin anew."""
    drifting = moving(world)
    lost = {age: [] for age in (1.0, 5.0, 24.0)}
    for start in range(0, 120, 24):
        old = drifting.at(start)
        for age, losses in lost.items():
            rows = drifting.at(start + age).draw(40_000, np.random.default_rng(start))
            best = roc_auc_score(rows.label, rows.probability)
            losses.append(best - roc_auc_score(rows.label, old.probability_of(rows.dense, rows.categorical)))
    means = {age: float(np.mean(losses)) for age, losses in lost.items()}
    assert 0 < means[1.0] < means[5.0] < means[24.0]
    assert means[24.0] == pytest.approx(0.01, abs=0.004)


def test_a_path_is_the_recursion_of_its_definition():
    decay, random = 0.9, np.random.default_rng([1, 2])
    x = random.normal(size=4)
    for step in range(30):
        np.testing.assert_allclose(ornstein_uhlenbeck([1, 2], count=4, step=step, decay=decay), x, rtol=0, atol=1e-12)
        x = decay * x + np.sqrt(1 - decay**2) * random.normal(size=4)


def test_weights_forget_half_in_a_half_life(world):
    half_life = 3.0
    drifting = moving(world, half_life_hours=half_life, moving_share=1.0, step_minutes=60.0, new_category_columns=())

    @functools.cache
    def weights(hours):
        # C2 has 500 categories, whose weights move each on its own.
        return drifting.tables_at(hours).categories[C2].weights[:-1].astype(np.float64)

    for halves in (1, 2):
        starts = [n * half_life for n in range(40)]
        relations = [np.corrcoef(weights(s), weights(s + halves * half_life))[0, 1] for s in starts]
        assert np.mean(relations) == pytest.approx(0.5**halves, abs=0.02)


def test_the_stated_share_of_the_variance_moves_and_the_sum_stays(world):
    share = 0.5
    drifting = moving(
        world,
        moving_share=share,
        half_life_hours=1.0,
        step_minutes=1200.0,
        popularity_spread=0.0,
        new_category_columns=(),
    )
    table = world.tables.categories[C17]
    shares, fixed = table.row_shares, table.weights / table.spread
    # Twenty half-lives apart, so each time is a new draw.
    seen = [drifting.tables_at(20.0 * n).categories[C17].weights / table.spread for n in range(200)]
    variances = [shares @ (w - shares @ w) ** 2 for w in seen]
    along_fixed = [shares @ (w * fixed) for w in seen]
    assert np.mean(variances) == pytest.approx(1.0, abs=0.05)
    np.testing.assert_allclose(along_fixed, np.sqrt(1 - share), atol=1e-4)


def test_only_the_stated_columns_move(world, drifting):
    now = drifting.at(24.0).tables
    for name, before, after in zip(CATEGORICAL, world.tables.categories, now.categories):
        assert (before is after) == (name not in SlowDrift(seed=3).columns), name
    assert now.dense is world.tables.dense


def test_popularity_moves_by_the_stated_spread(world):
    drifting = moving(world, popularity_spread=0.3, new_category_columns=())
    ratio = np.log(drifting.tables_at(24.0).categories[C2].frequencies / world.tables.categories[C2].frequencies)
    assert ratio.std() == pytest.approx(0.3, abs=0.04)
    same = moving(world, popularity_spread=0.0, new_category_columns=()).tables_at(24.0).categories[C2].frequencies
    np.testing.assert_allclose(same, world.tables.categories[C2].frequencies, rtol=1e-12)


def test_new_categories_come_at_the_stated_rate_and_share_and_go(world):
    drifting = moving(world, new_categories_per_hour=4.0, new_category_share=0.1, new_category_half_life_hours=2.0)
    known = set(world.tables.categories[C2].keys.tolist())

    def arrived(hours):
        return set(drifting.tables_at(hours).categories[C2].keys.tolist()) - known

    at_first, later, gone = arrived(24.0), arrived(29.0), arrived(24.0 + 17.0)
    assert len(later - at_first) == pytest.approx(5 * 4, abs=2)
    assert not at_first & gone, "eight half-lives later"
    assert len(at_first) == pytest.approx(4 * 8 * 2, abs=2)
    for hours in (0.0, 24.0):
        rows = drifting.at(hours).draw(ROWS, np.random.default_rng(8))
        new = ~np.isin(rows.categorical[:, C2], list(known))
        assert new.mean() == pytest.approx(0.1, abs=5 * np.sqrt(0.1 * 0.9 / ROWS))
        assert np.isin(rows.categorical[:, C17], world.tables.categories[C17].keys).all()


def test_a_new_category_keeps_its_value_and_weight_while_it_fades(world, drifting):
    def of(hours):
        table, n = drifting.tables_at(hours).categories[C2], CATEGORY_COLUMNS["C2"].cardinality
        part = slice(n, -1)
        return {k: (w, f) for k, w, f in zip(table.keys[part].tolist(), table.weights[part], table.frequencies[n:])}

    before, after = of(10.0), of(22.0)
    both = before.keys() & after.keys()
    assert len(both) > 50
    assert all(before[k][0] == after[k][0] for k in both)
    newest = list(before)[-20:]
    # Twelve hours are a half-life; which categories share the constant sum with it changes a little.
    assert np.mean([after[k][1] / before[k][1] for k in newest]) == pytest.approx(0.5, abs=0.05)
