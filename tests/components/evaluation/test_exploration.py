"""Tests that compare the estimated gain of the candidate's ranking with simulated users."""

import math
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.evaluation.__main__ import main
from components.evaluation.exploration import MIN_SWAPS, ShownRows, deviation_bound, reordering_gain
from evergreen.contracts.exploration import explored
from evergreen.contracts.manifests import ReorderingGain, Verdict


class Log(NamedTuple):
    rows: ShownRows
    gains: np.ndarray
    """For each list, the sum of the true gains of the disputed pairs."""
    disputed: np.ndarray


def simulate(
    random, lists: int, *, positions: int, share: float, rate: float, noise: float = 0.5
) -> Log:
    """Simulate users who see lower positions less often and click on some of the items.

    The served scores ignore the positions and are wrong by a factor of two. The click rate doubles
    over the log.
    """
    seen = 1 / np.log2(np.arange(2, positions + 2))
    odds = rate * np.linspace(1, 2, lists)[:, None] * random.lognormal(0, 0.8, (lists, positions))
    odds = np.clip(odds, 0, 1)
    served = np.clip(2 * odds * random.lognormal(0, noise, odds.shape), 0, 1)
    candidate = (odds * random.lognormal(0, 0.2, odds.shape)).astype(np.float32)
    order = np.argsort(-served, axis=1, kind="stable")
    shown, propensities = map(
        np.stack, zip(*(explored(each, share, random.random()) for each in order))
    )

    def take(values, rows):
        return np.take_along_axis(values, rows, axis=1)

    live, wanted = take(odds, order), take(candidate, order)
    disputed = wanted[:, 1:] > wanted[:, :-1]
    gains = disputed * (seen[:-1] - seen[1:]) * (live[:, 1:] - live[:, :-1])
    rows = ShownRows(
        lists=np.repeat(np.arange(lists), positions),
        positions=np.tile(np.arange(1, positions + 1), lists),
        propensities=propensities.ravel(),
        labels=(random.random(odds.shape) < take(odds, shown) * seen).astype(np.float64).ravel(),
        served=take(served, shown).ravel(),
        candidate=take(candidate, shown).ravel(),
    )
    return Log(rows, gains.sum(1), disputed.sum(1))


def first(rows: ShownRows, count: int) -> ShownRows:
    return ShownRows(*(each[:count] for each in rows))


SCENARIOS = {
    "lists of five": {"lists": 2000, "positions": 5, "share": 0.3, "rate": 0.1},
    "pairs": {"lists": 1500, "positions": 2, "share": 0.45, "rate": 0.3},
    "rare clicks": {"lists": 3000, "positions": 10, "share": 0.2, "rate": 0.005},
}


@pytest.mark.parametrize("logs", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_interval_contains_true_gain_at_all_looks_without_bias(scenario, logs):
    """Evaluate each log 12 times while the log grows.

    A log is a miss if at least one of its intervals does not contain the true gain.
    """
    random, setting = np.random.default_rng(7), SCENARIOS[scenario]
    misses, errors, looks = 0, [], 0
    for _ in range(logs):
        log, positions = simulate(random, **setting), setting["positions"]
        missed = False
        for lists in np.geomspace(100, setting["lists"], 12).astype(int):
            found = reordering_gain(first(log.rows, lists * positions))
            if found.gain is not None:
                looks += 1
                true_gain = log.gains[:lists].sum() / log.disputed[:lists].sum()
                missed |= not found.low <= true_gain <= found.high
        misses += missed
        errors.append(found.gain - true_gain)
    assert looks > 3 * logs
    assert misses <= 0.05 * logs
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(logs), (
        "the estimate must be unbiased"
    )


@pytest.mark.parametrize("odds", [0.5, 0.01])
def test_bound_is_crossed_at_any_time_with_at_most_5_percent(odds):
    """The test uses the most skewed sums possible, and checks the bound after every sum."""
    random, crossed = np.random.default_rng(3), 0
    for _ in range(400):
        sums = 2.0 * (random.random(600) < odds)
        crossed += any(
            abs(sums[:n].sum() - 2 * odds * n) > deviation_bound(sums[:n]) for n in range(1, 601, 3)
        )
    assert crossed <= 20


def test_clear_gain_is_found_and_its_opposite_too():
    log = simulate(np.random.default_rng(1), 20_000, positions=2, share=0.45, rate=0.2, noise=3)
    found = reordering_gain(log.rows)
    assert 0 < found.low < log.gains.sum() / log.disputed.sum() < found.high
    assert found.num_lists == 20_000
    # The candidate's scores are negated, so the disputed pairs are exactly the pairs on which both
    # models agreed before. The gain is negative.
    flipped = reordering_gain(log.rows._replace(candidate=-log.rows.candidate))
    assert flipped.high < 0
    assert found.disputed_share + flipped.disputed_share == pytest.approx(1)


def test_without_exploration_there_is_no_estimate():
    log = simulate(np.random.default_rng(1), 200, positions=4, share=0.0, rate=0.3)
    assert reordering_gain(log.rows) is None
    assert reordering_gain(first(log.rows, 0)) is None


def test_too_little_overlap_is_reported_with_its_counts():
    log = simulate(np.random.default_rng(1), 200, positions=4, share=0.1, rate=0.3)
    found = reordering_gain(log.rows)
    assert 0 < found.num_swaps < MIN_SWAPS
    assert (found.gain, found.low, found.high, found.num_lists) == (None, None, None, 200)
    agreeing = reordering_gain(log.rows._replace(candidate=log.rows.served.astype(np.float32)))
    assert agreeing == ReorderingGain(num_lists=200, num_swaps=0, disputed_share=0.0)


def test_incomplete_or_irregular_lists_are_excluded():
    log = simulate(np.random.default_rng(1), 400, positions=4, share=0.45, rate=0.3)
    whole = reordering_gain(log.rows)
    assert isinstance(whole, ReorderingGain)
    assert whole.gain is not None
    # The rows are the last three rows of a truncated list, a single row, a list in the order of its
    # scores, and an unexplored list.
    strange = ShownRows(
        lists=np.repeat([-1, -2, -3, -4], [3, 1, 3, 2]),
        positions=np.array([2, 3, 4, 1, 1, 2, 3, 1, 2]),
        propensities=np.array([0.7, 0.7, 0.85, 1.0, 0.1, 0.1, 0.1, 1.0, 1.0]),
        labels=np.ones(9),
        served=np.zeros(9),
        candidate=np.arange(9, dtype=np.float32),
    )
    assert reordering_gain(strange) is None
    both = ShownRows(*(np.concatenate(each) for each in zip(strange, log.rows)))
    assert vars(reordering_gain(both)) == pytest.approx(vars(whole), rel=1e-9)


def explore_some(made, *, lists: int) -> None:
    """Turn the first holdout rows into `lists` explored lists of ten rows each."""
    chances = np.random.default_rng(4).random(lists)
    odds = np.concatenate([explored(np.arange(10), 0.4, chance)[1] for chance in chances])
    path = made.root / "raw holdout" / "0.parquet"
    table, rows = pq.ParquetFile(path).read(), 10 * lists
    for name, values in (("propensity", odds), ("position", np.tile(np.arange(1, 11), lists))):
        field = table.schema.field(name)
        column = pa.chunked_array(
            [pa.array(values).cast(field.type), pa.nulls(table.num_rows - rows, field.type)]
        )
        table = table.set_column(table.schema.get_field_index(name), field, column)
    pq.write_table(table, path, row_group_size=70)


@pytest.mark.parametrize(
    ("lists", "sentence"), [(300, "Each such swap gains"), (20, "too few to estimate")]
)
def test_step_reports_it_in_verdict_and_page(make_round, lists, sentence):
    made = make_round(9_000)
    explore_some(made, lists=lists)
    main(made.flags())
    found = Verdict.read(made.path("verdict")).reordering_gain
    assert found.num_lists == lists
    assert found.num_swaps > 0
    page = made.path("report.html").read_text()
    assert f"{lists} held-out lists were explored" in page
    assert sentence in page
    if found.gain is not None:
        assert f"{found.gain:+.4f} [{found.low:+.4f}, {found.high:+.4f}]" in page


def test_step_reports_nothing_if_no_list_was_explored(make_round):
    made = make_round(200)
    main(made.flags())
    assert Verdict.read(made.path("verdict")).reordering_gain is None
    assert "No held-out list was explored" in made.path("report.html").read_text()
