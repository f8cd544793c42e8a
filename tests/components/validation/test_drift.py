"""Tests of drift: planted changes are reported, stationary windows are not."""

import json
from dataclasses import asdict, replace
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pytest

from components.validation.checks import apply_rules, observe_click_rate
from components.validation.measure import LineageWindows, measure_drift, measure_label_shift
from evergreen.config.validation import ValidationSettings
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.category_texts import ShownValues
from evergreen.statistics.profile_counter import ProfileCounter

SETTINGS = ValidationSettings()


@pytest.fixture
def drift_of(window_of):
    def measure(now, *before, settings=SETTINGS):
        kept = LineageWindows(tuple(window_of(table) for table in before))
        return {
            entry.feature: entry
            for entry in measure_drift(window_of(now), kept, settings, shown=ShownValues())
        }

    return measure


def drifted(drift):
    return [name for name, entry in drift.items() if entry.drifted]


def test_every_feature_has_finite_drift_and_unchanged_window_no_warning(checked, drift_of):
    drift = drift_of(checked(4000, seed=1), checked(4000))
    assert tuple(drift) == criteo.FEATURES
    assert drifted(drift) == []
    json.dumps({name: asdict(entry) for name, entry in drift.items()}, allow_nan=False)
    for entry in drift.values():
        assert 0 <= entry.effect_low <= entry.effect <= entry.effect_high <= 1
        assert 0 <= entry.p_value <= entry.q_value <= 1
        assert entry.design_effect >= 1
        assert entry.detectable > 0


def test_of_windows_that_stand_still_no_more_alarm_than_rate_says(in_requests, window_of):
    """The rows of a request have equal values in five columns.

    At a false-alarm rate of 20 %, the count of alarms exceeds the binomial bound in 1 of 1000
    cases.
    """
    rate, alarms, settings = 0.2, 0, ValidationSettings(false_discovery_rate=0.2)
    windows = [window_of(in_requests(6400, seed=seed)) for seed in range(30)]
    pairs = [(windows[i], windows[i + 1]) for i in range(0, 30, 2)] + [
        (windows[i], windows[29 - i]) for i in range(15)
    ]
    significant = 0
    for now, before in pairs:
        entries = measure_drift(now, LineageWindows((before,)), settings, shown=ShownValues())
        alarms += any(entry.drifted for entry in entries)
        significant += any(entry.q_value <= rate for entry in entries)
    # With 30 draws at 20 %, more than 14 alarms occur in 1 of 1000 cases.
    assert alarms <= significant <= 14


def test_rows_of_request_count_as_independent_rows_that_they_are_worth(in_requests, drift_of):
    drift = drift_of(in_requests(12_800, seed=1), in_requests(12_800, seed=2))
    assert drifted(drift) == []
    assert drift["C9"].design_effect == pytest.approx(64, rel=0.05)
    assert drift["C8"].design_effect < 2


def plant_double(table, random):
    values = table["C18"].to_pandas().to_numpy(float, na_value=np.nan)
    kinds, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    share = counts / counts.sum()
    chosen = kinds[np.abs(share - 0.05).argmin()]
    struck = (random.random(len(values)) < 0.05) & ~np.isnan(values)
    values[struck] = chosen
    return {"C18": pa.array(values, pa.int64(), from_pandas=True)}


def plant_nulls(table, random):
    column = table["I7"].to_pandas().to_numpy(copy=True)
    column[random.random(len(column)) < 0.1] = np.nan
    return {"I7": pa.array(column, pa.float32(), from_pandas=True)}


def plant_mean(table, random):
    column = table["I9"].to_pandas().to_numpy(float)
    return {
        "I9": pa.array(np.round(column + 0.2 * np.nanstd(column)), pa.float32(), from_pandas=True)
    }


def plant_log_mean(table, random):
    logs = np.log1p(table["I9"].to_pandas().to_numpy(float))
    return {
        "I9": pa.array(
            np.round(np.expm1(logs + 0.2 * np.nanstd(logs))), pa.float32(), from_pandas=True
        )
    }


def plant_unit(table, random):
    return {"I12": pa.array(table["I12"].to_pandas() * 1000, pa.float32(), from_pandas=True)}


def plant_swap(table, random):
    return {"C20": table["C24"], "C24": table["C20"]}


SHIFTS = {
    "one category doubles": plant_double,
    "10 % null": plant_nulls,
    "mean +0.2 sd": plant_mean,
    "mean of the logarithm +0.2 sd": plant_log_mean,
    "unit x1000": plant_unit,
    "swapped columns": plant_swap,
}


@pytest.mark.parametrize("name", SHIFTS)
def test_planted_shift_is_found_in_10_000_rows_and_nothing_else_is(checked, drift_of, name):
    for seed in (1, 2):
        rows = checked(10_000, seed=seed)
        planted = SHIFTS[name](rows, np.random.default_rng(seed))
        drift = drift_of(checked(10_000, seed=seed, **planted), checked(10_000, seed=9))
        assert drifted(drift) == list(planted)


def test_shift_of_whole_requests_is_found_in_many_and_undetectable_in_few(in_requests, drift_of):
    before = in_requests(64_000, seed=1)

    def entry(rows):
        table = in_requests(rows, seed=2)
        shifted = pa.array(np.floor(table["I5"].to_numpy() * np.float32(np.exp(0.5))), pa.float32())
        table = table.set_column(table.schema.get_field_index("I5"), "I5", shifted)
        return drift_of(table, before)["I5"]

    few, many = entry(2_560), entry(64_000)
    assert many.drifted
    assert many.detectable < many.effect
    assert not few.drifted
    assert few.detectable > few.threshold


def test_significant_change_of_no_size_is_no_drift(drift_of, checked):
    random = np.random.default_rng(0)

    def coins(share):
        return checked(60_000, C1=pa.array((random.random(60_000) < share).astype(np.int64)))

    entry = drift_of(coins(0.515), coins(0.5))["C1"]
    assert entry.q_value <= SETTINGS.false_discovery_rate
    assert not entry.drifted
    assert entry.effect < entry.threshold == SETTINGS.categorical_drift
    strict = ValidationSettings(categorical_drift=0.005)
    assert drift_of(coins(0.515), coins(0.5), settings=strict)["C1"].drifted


def test_permutation_of_column_without_frequent_values_is_seen(checked, drift_of):
    random = np.random.default_rng(0)

    def draw(order):
        return pa.array(order[np.minimum(random.zipf(1.05, 20_000), 500) % 500])

    order = np.arange(500, dtype=np.int64)
    base = checked(20_000, C3=draw(order))
    assert not drift_of(checked(20_000, C3=draw(order)), base)["C3"].drifted
    assert drift_of(checked(20_000, C3=draw(random.permutation(order))), base)["C3"].drifted


def test_new_value_share_counts_planted_new_values_and_no_rare_old_ones(checked, drift_of):
    values = checked(4000, seed=1)["C20"].to_pandas().to_numpy(dtype=float, na_value=np.nan)
    values[::10] = 123456789
    entry = drift_of(
        checked(4000, seed=1, C20=pa.array(values, pa.int64(), from_pandas=True)), checked(4000)
    )["C20"]
    assert entry.new_value_share == pytest.approx(400 / np.isfinite(values).sum())
    assert entry.moved_value.value == "123456789"
    unchanged = drift_of(checked(500, seed=2), checked(4000))
    assert {unchanged[name].new_value_share for name in criteo.CATEGORICAL} == {0}


def test_drift_newest_window_learned_is_reported_again_only_on_return(checked, drift_of):
    old = pa.array(np.random.default_rng(0).integers(0, 4, 8000), pa.int64())
    new = pa.array(np.random.default_rng(1).integers(2, 6, 8000), pa.int64())

    def rows(seed, column):
        return checked(8000, seed=seed, C4=column)

    before = rows(1, old)
    assert drifted(drift_of(rows(2, new), before)) == ["C4"]
    learned = drift_of(rows(3, new), before, rows(4, old), rows(2, new))["C4"]
    assert (learned.is_trained_on, learned.drifted, learned.changes) == (True, False, ("values",))
    assert drift_of(rows(3, old), rows(4, new), rows(2, new), rows(5, new))["C4"].drifted


def test_newest_window_too_small_to_show_change_hides_none(checked, drift_of):
    rows = checked(10_000, seed=1)
    shifted = pa.array(np.floor(rows["I5"].to_numpy() * np.float32(np.exp(0.2))), pa.float32())
    now, before = checked(10_000, seed=1, I5=shifted), checked(40_000)
    assert drift_of(now, before)["I5"].drifted
    assert drift_of(now, before, checked(60, seed=5))["I5"].drifted


def test_effect_is_undefined_on_empty_side_and_missing_share_drifted(checked, drift_of):
    drift = drift_of(
        checked(3000, I1=pa.nulls(3000, pa.float32()), C1=pa.nulls(3000, pa.int64())), checked(3000)
    )
    for name in ("I1", "C1"):
        assert [
            getattr(drift[name], key)
            for key in ("effect", "threshold", "divergence", "new_value_share")
        ] == [None] * 4
        assert drift[name].changes == ("missing",)
        assert drift[name].missing_now == 1
    assert drift["I2"].effect is not None


def test_constant_columns_have_no_mean_shift_in_standard_deviations(checked, drift_of):
    def rows(value):
        return checked(3000, I1=pa.array([value] * 3000, pa.float32()))

    assert drift_of(rows(3.0), rows(3.0))["I1"].mean_shift == 0
    entry = drift_of(rows(4.0), rows(3.0))["I1"]
    assert (entry.mean_shift, entry.drifted) == (None, True)


def test_window_that_left_feature_out_does_not_change_its_missing_share(checked, window_of):
    half = pa.array([1.0, None] * 3000, pa.float32())
    before = [
        window_of(checked(6000, seed=seed, I3=half), excluded=left_out)
        for seed, left_out in ((1, ("I3",)), (2, ()))
    ]
    kept = LineageWindows(tuple(before))
    found = measure_drift(window_of(checked(6000, I3=half)), kept, SETTINGS, shown=ShownValues())
    (entry,) = [entry for entry in found if entry.feature == "I3"]
    assert (entry.missing_now, entry.missing_before) == (0.5, 0.5)
    assert entry.changes == ()


def test_feature_that_run_leaves_out_has_no_entry(checked, window_of):
    now, before = window_of(checked(500), excluded=("I3", "C7")), window_of(checked(500, seed=1))
    names = [
        entry.feature
        for entry in measure_drift(now, LineageWindows((before,)), SETTINGS, shown=ShownValues())
    ]
    assert names == [name for name in criteo.FEATURES if name not in ("I3", "C7")]


def test_requests_of_two_sizes_are_no_drift_of_column_of_user(checked, window_of):
    """Each window has 150 requests of similar users.

    Requests have 64 rows in one window and 40 to 64 rows in the other window.
    """
    random = np.random.default_rng(0)
    found = []
    for number in range(8):
        pair = []
        for sizes in (np.full(150, 64), random.integers(40, 65, 150)):
            users = random.integers(0, 400, 150) * 7919
            ids = pa.array([f"{number}-{i}" for i in range(150)]).take(
                pa.array(np.repeat(np.arange(150), sizes))
            )
            table = checked(
                int(sizes.sum()), seed=number, C3=pa.array(np.repeat(users, sizes), pa.int64())
            )
            pair.append(
                window_of(table.drop([raw_rows.REQUEST_ID]).append_column(raw_rows.REQUEST_ID, ids))
            )
        entries = {
            e.feature: e
            for e in measure_drift(
                pair[0], LineageWindows((pair[1],)), SETTINGS, shown=ShownValues()
            )
        }
        found.append(entries["C3"].p_value)
    # The smallest of 8 draws is below 0.001 in 1 of 125 cases.
    assert min(found) > 0.001


# -- click rate


@pytest.fixture
def clicked(checked):
    """Makes the summary of a window from the clicks [n] of its rows. A request has `size` rows.

    The features do not matter.
    """
    features = checked(64, seed=0).drop([raw_rows.LABEL, raw_rows.REQUEST_ID])

    def make(clicks, size=1):
        n = len(clicks)
        table = features.take(pa.array(np.arange(n) % 64))
        table = table.append_column(raw_rows.LABEL, pa.array(np.asarray(clicks, np.int32)))
        ids = pa.array([f"r{i}" for i in range(-(-n // size))]).take(pa.array(np.arange(n) // size))
        counter = ProfileCounter(criteo.CRITEO, excluded=criteo.FEATURES[2:])
        for batch in table.append_column(raw_rows.REQUEST_ID, ids).combine_chunks().to_batches():
            counter.add(batch)
        return counter.profile()

    return make


def test_rates_and_difference_are_those_of_rows(clicked):
    random = np.random.default_rng(0)
    now, before = random.random(3000) < 0.05, random.random(5000) < 0.03
    found = measure_label_shift(clicked(now), LineageWindows((clicked(before),)))
    assert (found.rate_now, found.rate_before) == (now.mean(), before.mean())
    assert found.difference == pytest.approx(now.mean() - before.mean())
    assert (found.num_rows_now, found.num_rows_before, found.newest) == (3000, 5000, None)
    # The likelihood ratio test of two shares. For the continuity correction, half of an effective
    # row is moved to the other sample.
    both, half = np.concatenate([now, before]).mean(), found.design_effect / 2
    deviance = 0.0
    for part, clicks in ((now, now.sum() - half), (before, before.sum() + half)):
        others = len(part) - clicks
        deviance += 2 * clicks * np.log(clicks / len(part) / both)
        deviance += 2 * others * np.log(others / len(part) / (1 - both))
    half_normal = 2 * (1 - NormalDist().cdf(np.sqrt(deviance / found.design_effect)))
    assert found.p_value == pytest.approx(half_normal, rel=1e-6)


@pytest.mark.parametrize("alike", [False, True])
def test_stable_rates_are_called_changed_no_more_often_than_level(clicked, alike):
    """If `alike` is true, each request has its own click rate. Otherwise all rows share one rate.

    At most 5 % of 120 windows raise an alarm, within a bound of 1 in 1000.
    """
    random = np.random.default_rng(1)

    def window(requests):
        rates = random.beta(0.3, 2.7, requests) if alike else np.full(requests, 0.1)
        return clicked(random.random(requests * 16) < np.repeat(rates, 16), 16)

    found = [measure_label_shift(window(60), LineageWindows((window(120),))) for _ in range(120)]
    assert sum(each.p_value <= 0.05 for each in found) <= 14
    assert np.mean([each.low <= 0 <= each.high for each in found]) >= 0.9
    assert (np.mean([each.design_effect for each in found]) > 3) == alike


def check_click_rate(label):
    return apply_rules(observe_click_rate(label, SETTINGS), SETTINGS)


def test_halved_rate_is_reported_and_smaller_change_or_few_rows_are_not(clicked):
    def finding(now, before):
        return check_click_rate(
            measure_label_shift(clicked(now), LineageWindows((clicked(before),)))
        )

    def rows(n, share):
        return np.random.default_rng(2).permutation(np.arange(n) < share * n)

    (found,) = finding(rows(5000, 0.02), rows(5000, 0.05))
    assert (found.column, found.rule, found.result) == ("label", "click_rate", "warn")
    assert found.detail.startswith("the share of clicks is 2.00%, was 5.00%")
    assert finding(rows(5000, 0.03), rows(5000, 0.05)) == []
    assert finding(rows(20, 0.15), rows(5000, 0.05)) == []


def test_rate_that_newest_window_learned_is_not_reported_again(clicked):
    low, high = np.arange(4000) % 50 == 0, np.arange(4000) % 10 == 0
    kept = LineageWindows((clicked(high), clicked(high), clicked(low)))
    found = measure_label_shift(clicked(low), kept)
    assert found.newest.difference == 0
    assert found.p_value < 1e-6
    assert check_click_rate(found) == []
    assert check_click_rate(replace(found, newest=None)) != []
