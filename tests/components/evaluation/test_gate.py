"""The gate's decision on all rows together, and its sentence."""

import re
from dataclasses import replace

import numpy as np
import pytest

from components.evaluation import gate
from evergreen.config.gate import GateSettings
from evergreen.runtime.errors import ContractError, flags_to_run_again

SETTINGS = GateSettings(min_auc=0.6, max_auc_loss=0.01)


def judge(labels, candidate, champion=None, *, settings, groups=None):
    """The gate's answer to log-odds, whose calibration is another file's; without `groups` each row is a request."""
    groups = np.arange(len(labels)) if groups is None else groups
    scores = [None if logits is None else 1 / (1 + np.exp(-logits)) for logits in (candidate, champion)]
    return gate.judge(labels, *scores, groups=groups, settings=replace(settings, max_calibration_factor=1e6))


def rows(n, *, candidate=1.0, champion=1.0, seed=0, click_rate=0.3):
    """Labels and two scores that see the clicks `candidate` and `champion` standard deviations apart."""
    random = np.random.default_rng(seed)
    labels = (random.random(n) < click_rate).astype(np.int8)
    shared = random.normal(size=n)

    def score(separation):
        return shared + 0.5 * random.normal(size=n) + separation * labels

    return labels, score(candidate), score(champion)


@pytest.mark.parametrize(
    ("num_rows", "quality", "decision"),
    [(20_000, 1.2, "pass"), (20_000, 1.0, "pass"), (20_000, 0.9, "fail"), (400, 1.0, "inconclusive")],
    ids=["better", "equal", "worse", "few rows"],
)
def test_candidate_above_floor_is_judged_by_interval_of_its_lead(num_rows, quality, decision):
    answer = judge(*rows(num_rows, candidate=quality, seed=2), settings=SETTINGS)
    assert answer.decision == decision
    assert answer.estimates.candidate.low > SETTINGS.min_auc
    assert (answer.estimates.difference.low > 0) == (quality == 1.2)
    assert (answer.estimates.difference.high > 0) == (quality >= 1.0)
    assert ("may be a loss of more than 0.01" in answer.reason) == (decision == "inconclusive")


@pytest.mark.parametrize(
    ("min_auc", "decision"), [(0.7, "pass"), (0.72, "inconclusive"), (0.75, "inconclusive"), (0.76, "fail")]
)
def test_floor_is_judged_by_interval(min_auc, decision):
    labels, scores, _ = rows(2000, candidate=1.0, seed=3)
    answer = judge(labels, scores, settings=GateSettings(min_auc=min_auc))
    assert answer.decision == decision
    assert answer.estimates.champion is None
    assert answer.estimates.difference is None
    assert "no champion" in answer.reason


def test_failed_floor_outweighs_passed_comparison():
    labels, candidate, champion = rows(20_000, candidate=0.1, champion=0.0)
    answer = judge(labels, candidate, champion, settings=SETTINGS)
    assert answer.decision == "fail"
    assert "below the floor 0.6" in answer.reason
    assert "a loss of at most 0.01" in answer.reason


def resample(sample, n, seed):
    drawn = np.random.default_rng(seed).integers(0, len(sample[0]), n)
    return [column[drawn] for column in sample]


@pytest.mark.parametrize(
    ("clicks", "others", "said"),
    [
        (0, 0, "clicks come from 0 requests, expected 10"),
        (0, 50, "clicks come from 0 requests"),
        (50, 0, "rows without a click come from 0 requests"),
        (1, 50, "clicks come from 1 requests"),
    ],
)
def test_too_few_of_class_is_inconclusive(clicks, others, said):
    labels = np.repeat([1, 0], [clicks, others])
    # A perfect model: with few rows its interval has no width, and must not be believed.
    scores = labels + np.linspace(0, 0.1, clicks + others)
    answer = judge(labels, scores, -scores, settings=SETTINGS)
    assert answer.decision == "inconclusive"
    assert said in answer.reason
    assert answer.estimates == (None, None, None)


def test_gate_lets_candidate_worse_by_margin_pass_in_one_of_forty_tries():
    # The level that a 95 % interval promises at the margin itself: 2.5 %.
    sample = rows(3000, candidate=0.95, seed=6)
    loss = -judge(*sample, settings=SETTINGS).estimates.difference.auc
    assert loss > 0
    settings = GateSettings(min_auc=0.0, max_auc_loss=loss)
    passed = sum(judge(*resample(sample, 3000, seed), settings=settings).decision == "pass" for seed in range(300))
    assert passed <= 17  # 99.9 % quantile of Binomial(300, 0.025)


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
    with pytest.raises(ContractError, match="1 scores are NaN"):
        judge(labels, np.r_[np.nan, scores[1:]], settings=SETTINGS)


@pytest.mark.parametrize(("clicks", "is_judged"), [(9, False), (10, True)])
@pytest.mark.parametrize("rare", [1, 0], ids=["clicks", "rows without a click"])
def test_as_many_rows_of_class_as_asked_for_are_enough(clicks, is_judged, rare):
    labels = np.full(200, 1 - rare, np.int8)
    labels[:clicks] = rare
    scores = np.random.default_rng(4).normal(size=200) + 3.0 * labels
    answer = judge(labels, scores, settings=GateSettings(min_auc=0.6))
    assert ("expected 10" not in answer.reason) == is_judged
    assert answer.decision == ("pass" if is_judged else "inconclusive")


def test_clicks_of_few_requests_are_inconclusive_however_many_rows():
    random = np.random.default_rng(2)
    groups = np.repeat(np.arange(40), 64)
    labels = ((groups < 6) & (random.random(len(groups)) < 0.5)).astype(np.int8)
    scores = random.normal(size=len(groups)) + labels
    answer = judge(labels, scores, scores, groups=groups, settings=SETTINGS)
    assert answer.decision == "inconclusive"
    assert "clicks come from 6 requests, expected 10" in answer.reason


def test_perfect_order_is_inconclusive_since_it_has_no_interval():
    labels = np.repeat([1, 0], 50)
    answer = judge(labels, labels + 0.5, settings=SETTINGS)
    assert answer.decision == "inconclusive"
    assert "auc has no interval" in answer.reason


def advised_rows(advice):
    return int(re.search(r"about ([\d,]+) held-out rows", advice)[1].replace(",", ""))


@pytest.mark.parametrize("min_auc", [0.72, 0.75])
def test_advice_of_undecided_floor_names_rows_that_would_decide_it(min_auc):
    settings, (labels, scores, _) = GateSettings(min_auc=min_auc), rows(2000, candidate=1.0, seed=3)
    answer = judge(labels, scores, settings=settings)
    (advice,) = answer.advice
    assert "there are 2,000" in advice
    needed = advised_rows(advice)
    assert needed > 2000
    decided = [judge(*resample((labels, scores), 4 * needed, seed), settings=settings) for seed in range(20)]
    assert sum(each.decision != "inconclusive" for each in decided) >= 19
    undecided = [judge(*resample((labels, scores), needed // 4, seed), settings=settings) for seed in range(20)]
    assert sum(each.decision == "inconclusive" for each in undecided) >= 15


def test_advice_of_too_few_clicks_names_rows_that_have_enough():
    labels, scores, _ = rows(40, click_rate=0.1, seed=8)
    num_clicks = int(labels.sum())
    assert 0 < num_clicks < 10
    (advice,) = judge(labels, scores, settings=SETTINGS).advice
    assert advised_rows(advice) == -(-40 * 10 // num_clicks)
    labels[:] = 0
    (advice,) = judge(labels, scores, settings=SETTINGS).advice
    assert "no held-out row is one of the clicks" in advice


def test_advice_of_refused_floor_is_floor_that_model_passes():
    labels, scores, _ = rows(4000, candidate=0.4, seed=5)
    settings = GateSettings(min_auc=0.9)
    (advice,) = judge(labels, scores, settings=settings).advice
    (flag, setting) = flags_to_run_again(advice)
    lower = float(setting.removeprefix("gate.min_auc="))
    assert flag == "--set"
    assert 0.5 < lower < 0.7
    assert judge(labels, scores, settings=GateSettings(min_auc=lower)).decision == "pass"


def test_model_that_knows_nothing_is_not_advised_to_lower_floor():
    labels, scores, _ = rows(4000, candidate=0.0, seed=5)
    answer = judge(labels, scores, settings=SETTINGS)
    assert answer.decision == "fail"
    assert answer.advice == ["bring features or rows that tell more of the clicks"]


def test_passed_checks_advise_nothing():
    labels, scores, _ = rows(4000, candidate=1.5, seed=5)
    assert judge(labels, scores, settings=SETTINGS).advice == []
