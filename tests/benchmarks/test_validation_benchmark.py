"""The validation study's windows and shifts are what they say, by NumPy; its shares are counts over windows."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import validation as figures
from benchmarks.validation_study import plan
from benchmarks.validation_study.shifts import (
    EQUAL,
    INDEPENDENT,
    ITEM_SHIFTS,
    UNEQUAL,
    USER_COLUMNS,
    USER_SHIFTS,
    Shift,
    column_of,
    doubled_category,
    draw_window,
)
from components.contracts import criteo
from components.contracts.features import MISSING_CATEGORY
from inference_client.simulation.world import World

ROWS = 64_000


@pytest.fixture(scope="module")
def world():
    return World.create(7)


@pytest.fixture(scope="module")
def window(world):
    return draw_window(world, ROWS, np.random.default_rng(5))


def same(a, b):
    return bool(np.array_equal(a, b, equal_nan=True))


def runs(window, name):
    """Whether all rows of each request have one value."""
    values = column_of(window, name)
    inside = window.request[1:] == window.request[:-1]
    equal = (values[1:] == values[:-1]) | ((values[1:] != values[1:]) & (values[:-1] != values[:-1]))
    return bool(equal[inside].all())


@pytest.mark.parametrize("requests", [EQUAL, UNEQUAL, INDEPENDENT])
def test_rows_of_a_request_share_the_users_columns_and_no_others(world, requests):
    drawn = draw_window(world, 20_000, np.random.default_rng(1), requests=requests)
    sizes = np.bincount(drawn.request)
    assert (np.diff(drawn.request) >= 0).all()
    if requests == INDEPENDENT:
        assert (sizes == 1).all()
        return
    assert sizes.mean() == pytest.approx(64, rel=0.2)
    assert (len(np.unique(sizes[:-1])) == 1) == (requests == EQUAL)
    for name in criteo.FEATURES:
        assert runs(drawn, name) == (name in USER_COLUMNS), name


def test_clicks_follow_the_worlds_truth_for_the_rows_as_they_are(world, window):
    rows = window.rows
    effects = world.tables.effects_of(rows.dense, rows.categorical)
    truth = 1 / (1 + np.exp(-(world.strength * effects.astype(np.float64) + world.bias)))
    assert rows.probability == pytest.approx(truth)
    # Clicks beside their probability: within five standard errors of independent draws.
    error = np.sqrt((truth * (1 - truth)).sum()) / ROWS
    assert rows.label.mean() == pytest.approx(truth.mean(), abs=5 * error)


@pytest.mark.parametrize("shift", [*ITEM_SHIFTS, *USER_SHIFTS], ids=lambda shift: shift.name)
def test_a_shift_changes_its_columns_alone_and_keeps_requests_alike(window, shift):
    after = shift.plant(window, np.random.default_rng(3))
    changed = {name for name in criteo.FEATURES if not same(column_of(after, name), column_of(window, name))}
    assert changed == set(shift.columns)
    assert same(after.rows.label, window.rows.label)
    for name in shift.columns:
        assert runs(after, name) == (name in USER_COLUMNS)
        values = column_of(after, name).astype(np.float64)
        present = values[~np.isnan(values)]
        assert same(present, np.floor(present)), "Criteo's numbers are whole"


def before_and_after(window, kind, column):
    after = Shift(kind, (column,)).plant(window, np.random.default_rng(3))
    return (column_of(each, column).astype(np.float64) for each in (window, after))


@pytest.mark.parametrize("column", ["C14", "C26"])
def test_one_category_doubles_at_the_others_cost(window, column):
    before, after = before_and_after(window, "one category doubles", column)
    chosen, share = doubled_category(column_of(window, column)[before != MISSING_CATEGORY])
    had = before[before != MISSING_CATEGORY]
    values, counts = np.unique(had, return_counts=True)
    assert share == counts[values == chosen][0] / len(had) == max(c / len(had) for c in counts if c <= 0.3 * len(had))
    has = after[after != MISSING_CATEGORY]
    assert len(has) == len(had), "nothing is lost"
    error = np.sqrt(share / len(had))
    assert (has == chosen).mean() == pytest.approx(2 * share, abs=5 * error)
    moved = before != after
    assert (after[moved] == chosen).all()


def test_alarms_are_counted_per_pair_and_a_shift_is_found_by_its_names(world):
    shift = Shift("swapped columns", ("I7", "I9"))
    still = plan.StudyCase(name="still", pairs={"a": 3})
    moved = plan.StudyCase(name="moved", pairs={"a": 2}, shift=shift)
    asked, alarms = [], [[], ["I7", "I9", "C1"], ["C2"], ["I7"], []]

    def judge(before, now):
        asked.append([pq.read_table(folder).num_rows for folder in (before, now)])
        return {"mine": alarms[len(asked) - 1]}

    series = plan.PairSeries(rows=500, cases=[still, moved])
    counts = {}
    for case, answers in plan.show(series, 0, world, judges={"a": judge}):
        count = counts.setdefault(case.name, figures.SettingCount(is_stationary=case.shift is None))
        count.add(case, answers["mine"])
    # Pairs in turn: still, moved, still, moved, still.
    assert asked == [[500, 500]] * 5
    assert {name: (count.hits, count.windows) for name, count in counts.items()} == {"still": (1, 3), "moved": (1, 2)}
    assert not counts["still"].figures()["met"]
    assert "1/3 = 0.333" in figures.format_table({"still": {"mine": counts["still"]}}, ours="mine")
