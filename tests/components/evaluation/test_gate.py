"""Tests of the gate's checks on all rows, and of its decision."""

import re
from dataclasses import replace

import numpy as np
import pytest

from components.evaluation import gate
from evergreen.config.gate import GateSettings
from evergreen.contracts.checks import advice
from evergreen.runtime.errors import ContractError, flags_to_run_again
from tests.support.errors import raises

SETTINGS = GateSettings(min_auc=0.6, max_auc_loss=0.01)


def decided(labels, candidate, champion=None, *, settings, groups=None):
    """Return the gate's verdict on log-odds. Without `groups`, each row is a request of its own.

    The calibration check is turned off here. Another test file tests the calibration check.
    """
    groups = np.arange(len(labels)) if groups is None else groups
    scores = [
        None if logits is None else 1 / (1 + np.exp(-logits)) for logits in (candidate, champion)
    ]
    return gate.decide(
        labels, *scores, groups=groups, settings=replace(settings, max_calibration_factor=1e6)
    )


def result_of(answer, name):
    return next(check.result for check in answer.checks if check.name == name)


def rows(n, *, candidate=1.0, champion=1.0, seed=0, click_rate=0.3):
    """Return labels, and the scores of two models.

    `candidate` and `champion` are the mean differences between a model's scores of clicks and its
    scores of other rows.
    """
    random = np.random.default_rng(seed)
    labels = (random.random(n) < click_rate).astype(np.int8)
    shared = random.normal(size=n)

    def score(separation):
        return shared + 0.5 * random.normal(size=n) + separation * labels

    return labels, score(candidate), score(champion)


@pytest.mark.parametrize(
    ("num_rows", "quality", "decision"),
    [
        (20_000, 1.2, "pass"),
        (20_000, 1.0, "pass"),
        (20_000, 0.9, "fail"),
        (400, 1.0, "inconclusive"),
    ],
    ids=["better", "equal", "worse", "few rows"],
)
def test_candidate_above_floor_is_evaluated_by_interval_of_its_lead(num_rows, quality, decision):
    answer = decided(*rows(num_rows, candidate=quality, seed=2), settings=SETTINGS)
    assert answer.decision == decision
    assert answer.estimates.candidate.low > SETTINGS.min_auc
    assert (answer.estimates.difference.low > 0) == (quality == 1.2)
    assert (answer.estimates.difference.high > 0) == (quality >= 1.0)
    assert result_of(answer, "AUC against the champion") == decision


@pytest.mark.parametrize(
    ("min_auc", "decision"),
    [(0.7, "pass"), (0.72, "inconclusive"), (0.75, "inconclusive"), (0.76, "fail")],
)
def test_floor_is_evaluated_by_interval(min_auc, decision):
    labels, scores, _ = rows(2000, candidate=1.0, seed=3)
    answer = decided(labels, scores, settings=GateSettings(min_auc=min_auc))
    assert answer.decision == decision
    assert answer.estimates.champion is None
    assert answer.estimates.difference is None
    assert result_of(answer, "AUC") == decision
    assert [check.name for check in answer.checks] == ["AUC", "calibration"]


def test_failed_floor_outweighs_passed_comparison():
    labels, candidate, champion = rows(20_000, candidate=0.1, champion=0.0)
    answer = decided(labels, candidate, champion, settings=SETTINGS)
    assert answer.decision == "fail"
    assert result_of(answer, "AUC") == "fail"
    assert result_of(answer, "AUC against the champion") == "pass"


def resample(sample, n, seed):
    drawn = np.random.default_rng(seed).integers(0, len(sample[0]), n)
    return [column[drawn] for column in sample]


@pytest.mark.parametrize(
    ("clicks", "others", "name", "requests"),
    [
        (0, 0, "requests with clicks", 0),
        (0, 50, "requests with clicks", 0),
        (50, 0, "requests with rows without a click", 0),
        (1, 50, "requests with clicks", 1),
    ],
)
def test_too_few_of_class_is_inconclusive(clicks, others, name, requests):
    labels = np.repeat([1, 0], [clicks, others])
    # With few rows, the interval of a perfect model has width 0. The gate must not trust an
    # interval of width 0.
    scores = labels + np.linspace(0, 0.1, clicks + others)
    answer = decided(labels, scores, -scores, settings=SETTINGS)
    assert answer.decision == "inconclusive"
    (check,) = answer.checks
    assert (check.name, check.value, check.limit) == (name, requests, 10)
    assert answer.estimates == (None, None, None)


def test_gate_lets_candidate_worse_by_margin_pass_in_one_of_forty_tries():
    # If the true loss equals the margin, a 95 % interval passes with a probability of 2.5 %.
    sample = rows(3000, candidate=0.95, seed=6)
    loss = -decided(*sample, settings=SETTINGS).estimates.difference.auc
    assert loss > 0
    settings = GateSettings(min_auc=0.0, max_auc_loss=loss)
    passed = sum(
        decided(*resample(sample, 3000, seed), settings=settings).decision == "pass"
        for seed in range(300)
    )
    assert passed <= 17  # 17 is the 99.9 % quantile of Binomial(300, 0.025)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_auc": -0.1}, "min_auc is -0.1"),
        ({"min_auc": float("nan")}, "min_auc is nan"),
        ({"max_auc_loss": 1.5}, r"max_auc_loss is 1.5, expected a number in \[0, 1\]"),
        ({"max_slice_loss": -0.1}, "max_slice_loss"),
        ({"max_slice_loss": float("nan")}, "max_slice_loss"),
        ({"max_calibration_factor": 0.9}, "max_calibration_factor"),
    ],
)
def test_threshold_that_makes_no_sense_is_refused(changes, said):
    with pytest.raises(ContractError, match=said):
        GateSettings(**changes)


def test_scores_that_are_not_numbers_are_refused():
    labels, scores, _ = rows(50)
    with raises(ContractError, "1 scores", "NaN"):
        decided(labels, np.r_[np.nan, scores[1:]], settings=SETTINGS)


@pytest.mark.parametrize(("clicks", "is_enough"), [(9, False), (10, True)])
@pytest.mark.parametrize("rare", [1, 0], ids=["clicks", "rows without a click"])
def test_as_many_rows_of_class_as_asked_for_are_enough(clicks, is_enough, rare):
    labels = np.full(200, 1 - rare, np.int8)
    labels[:clicks] = rare
    scores = np.random.default_rng(4).normal(size=200) + 3.0 * labels
    answer = decided(labels, scores, settings=GateSettings(min_auc=0.6))
    assert (answer.checks[0].name == "AUC") == is_enough
    assert answer.decision == ("pass" if is_enough else "inconclusive")


def test_clicks_of_few_requests_are_inconclusive_however_many_rows():
    random = np.random.default_rng(2)
    groups = np.repeat(np.arange(40), 64)
    labels = ((groups < 6) & (random.random(len(groups)) < 0.5)).astype(np.int8)
    scores = random.normal(size=len(groups)) + labels
    answer = decided(labels, scores, scores, groups=groups, settings=SETTINGS)
    assert answer.decision == "inconclusive"
    assert [(check.name, check.value) for check in answer.checks] == [("requests with clicks", 6)]


def test_perfect_order_is_inconclusive_since_it_has_no_interval():
    labels = np.repeat([1, 0], 50)
    answer = decided(labels, labels + 0.5, settings=SETTINGS)
    assert answer.decision == "inconclusive"
    assert (answer.checks[0].name, answer.checks[0].interval) == ("AUC", None)


def advice_of(answer):
    return advice(answer.checks)


def advised_rows(way):
    return int(re.search(r"about ([\d,]+) held-out rows", way)[1].replace(",", ""))


@pytest.mark.parametrize("min_auc", [0.72, 0.75])
def test_advice_of_undecided_floor_names_rows_that_would_decide_it(min_auc):
    settings, (labels, scores, _) = GateSettings(min_auc=min_auc), rows(2000, candidate=1.0, seed=3)
    answer = decided(labels, scores, settings=settings)
    (way,) = advice_of(answer)
    assert "there are 2,000" in way
    needed = advised_rows(way)
    assert needed > 2000
    larger = [
        decided(*resample((labels, scores), 4 * needed, seed), settings=settings)
        for seed in range(20)
    ]
    assert sum(each.decision != "inconclusive" for each in larger) >= 19
    undecided = [
        decided(*resample((labels, scores), needed // 4, seed), settings=settings)
        for seed in range(20)
    ]
    assert sum(each.decision == "inconclusive" for each in undecided) >= 15


def test_advice_of_too_few_clicks_names_rows_that_have_enough():
    labels, scores, _ = rows(40, click_rate=0.1, seed=8)
    num_clicks = int(labels.sum())
    assert 0 < num_clicks < 10
    (way,) = advice_of(decided(labels, scores, settings=SETTINGS))
    assert advised_rows(way) == -(-40 * 10 // num_clicks)
    labels[:] = 0
    (way,) = advice_of(decided(labels, scores, settings=SETTINGS))
    assert "the held-out rows contain no clicks" in way


def test_advice_of_refused_floor_is_floor_that_model_passes():
    labels, scores, _ = rows(4000, candidate=0.4, seed=5)
    settings = GateSettings(min_auc=0.9)
    (way,) = advice_of(decided(labels, scores, settings=settings))
    (flag, setting) = flags_to_run_again(way)
    lower = float(setting.removeprefix("gate.min_auc="))
    assert flag == "--set"
    assert 0.5 < lower < 0.7
    assert decided(labels, scores, settings=GateSettings(min_auc=lower)).decision == "pass"


def test_model_that_knows_nothing_is_not_advised_to_lower_floor():
    labels, scores, _ = rows(4000, candidate=0.0, seed=5)
    answer = decided(labels, scores, settings=SETTINGS)
    assert answer.decision == "fail"
    assert advice_of(answer) == ["bring features or rows that predict the clicks better"]


def test_passed_checks_advise_nothing():
    labels, scores, _ = rows(4000, candidate=1.5, seed=5)
    assert advice_of(decided(labels, scores, settings=SETTINGS)) == []
