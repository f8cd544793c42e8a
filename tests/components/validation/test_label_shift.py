"""The change of the click rate: its interval and p-value by simulation, and what is made of it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from components.contracts import criteo
from components.validation.champion_windows import window_of_reference
from components.validation.kept_windows import KeptWindows
from components.validation.label_shift import measure_label_shift
from components.validation.reference import ReferenceCounter
from components.validation.rules import Judging
from components.validation.rules.click_rate import judge_click_rate
from components.validation.settings import ValidationSettings

JUDGING = Judging(settings=ValidationSettings())


@pytest.fixture
def clicked(judged):
    """A window's summary whose clicks are these [n], in requests of `size` rows; its features play no part."""
    features = judged(64, seed=0).drop([criteo.LABEL])

    def make(clicks, size=1):
        n = len(clicks)
        table = features.take(pa.array(np.arange(n) % 64))
        table = table.append_column(criteo.LABEL, pa.array(np.asarray(clicks, np.int32)))
        ids = pa.array([f"r{i}" for i in range(-(-n // size))]).take(pa.array(np.arange(n) // size))
        counter = ReferenceCounter(excluded=criteo.FEATURES[2:])
        for batch in table.append_column(criteo.REQUEST_ID, ids).combine_chunks().to_batches():
            counter.add(batch)
        return counter.window()

    return make


def test_rates_and_difference_are_those_of_the_rows(clicked):
    random = np.random.default_rng(0)
    now, before = random.random(3000) < 0.05, random.random(5000) < 0.03
    found = measure_label_shift(clicked(now), KeptWindows((clicked(before),)))
    assert (found["rate_now"], found["rate_before"]) == (now.mean(), before.mean())
    assert found["difference"] == pytest.approx(now.mean() - before.mean())
    assert (found["num_rows_now"], found["num_rows_before"], found["newest"]) == (3000, 5000, None)
    # The likelihood ratio test of two shares, written out; half a row as good as an independent one goes to the other
    # sample, for continuity.
    both, half = np.concatenate([now, before]).mean(), found["design_effect"] / 2
    deviance = 0.0
    for part, clicks in ((now, now.sum() - half), (before, before.sum() + half)):
        others = len(part) - clicks
        deviance += 2 * clicks * np.log(clicks / len(part) / both)
        deviance += 2 * others * np.log(others / len(part) / (1 - both))
    half_normal = 2 * (1 - _normal(np.sqrt(deviance / found["design_effect"])))
    assert found["p_value"] == pytest.approx(half_normal, rel=1e-6)


def _normal(z):
    from statistics import NormalDist

    return NormalDist().cdf(z)


@pytest.mark.parametrize("alike", [False, True])
def test_of_rates_that_stand_still_no_more_are_called_changed_than_the_level_says(clicked, alike):
    """Rows of a request with one click rate for all, or with its own; 5 % of 120 windows, within 1 in 1000."""
    random = np.random.default_rng(1)

    def window(requests):
        rates = random.beta(0.3, 2.7, requests) if alike else np.full(requests, 0.1)
        return clicked(random.random(requests * 16) < np.repeat(rates, 16), 16)

    found = [measure_label_shift(window(60), KeptWindows((window(120),))) for _ in range(120)]
    assert sum(each["p_value"] <= 0.05 for each in found) <= 14
    assert np.mean([each["low"] <= 0 <= each["high"] for each in found]) >= 0.9
    assert (np.mean([each["design_effect"] for each in found]) > 3) == alike


def test_a_halved_rate_is_told_and_a_smaller_change_or_a_few_rows_are_not(clicked):
    def finding(now, before):
        return judge_click_rate(measure_label_shift(clicked(now), KeptWindows((clicked(before),))), JUDGING)

    def rows(n, share):
        return np.random.default_rng(2).permutation(np.arange(n) < share * n)

    (told,) = finding(rows(5000, 0.02), rows(5000, 0.05))
    assert (told["feature"], told["rule"], told["severity"]) == ("label", "click_rate", "warn")
    assert told["description"].startswith("the share of clicks is 2.00%, was 5.00%")
    assert finding(rows(5000, 0.03), rows(5000, 0.05)) == []
    assert finding(rows(20, 0.15), rows(5000, 0.05)) == []


def test_a_rate_that_the_newest_window_learnt_is_not_told_again(clicked):
    low, high = np.arange(4000) % 50 == 0, np.arange(4000) % 10 == 0
    kept = KeptWindows((clicked(high), clicked(high), clicked(low)))
    found = measure_label_shift(clicked(low), kept)
    assert found["newest"]["difference"] == 0
    assert found["p_value"] < 1e-6
    assert judge_click_rate(found, JUDGING) == []
    assert judge_click_rate({**found, "newest": None}, JUDGING) != []


def test_nothing_is_said_where_clicks_are_not_known(clicked, judged):
    counter = ReferenceCounter()
    for batch in judged(300).to_batches():
        counter.add(batch)
    older = window_of_reference(counter.statistics())
    assert measure_label_shift(clicked(np.ones(10)), KeptWindows((older,))) is None
    assert judge_click_rate(None, JUDGING) == []
