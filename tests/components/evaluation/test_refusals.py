"""Tests that a worse slice or a wrong calibration is refused despite good overall metrics."""

import numpy as np
import pytest

from components.evaluation.gate import SLICE_ALPHA, decide, holm
from evergreen.config.gate import GateSettings
from testing.planted_models import draw, draw_slices, noise_that_costs, shifted

SLICES = "slices with more log loss"
LENIENT = GateSettings(min_auc=0.0, max_auc_loss=1.0)


def check_of(answer, name):
    return next(check for check in answer.checks if check.name == name)


def decided(drawn, candidate, *, slices=None, settings=LENIENT):
    return decide(
        drawn.labels,
        candidate,
        drawn.champion,
        groups=drawn.requests,
        slices=slices,
        settings=settings,
    )


@pytest.mark.parametrize("rows_per_request", [1, 10])
def test_runs_at_allowed_loss_in_every_slice_are_refused_at_stated_rate(rows_per_request):
    rate, rounds = 0.25, 150
    noise = noise_that_costs(rate, LENIENT.max_slice_loss)
    refused = 0
    for seed in range(rounds):
        random = np.random.default_rng((rows_per_request, seed))
        drawn = draw(random, rows=4000, rate=rate, rows_per_request=rows_per_request, noise=noise)
        slices = draw_slices(random, drawn.requests, columns=8)
        refused += decided(drawn, drawn.candidate, slices=slices).decision == "fail"
    assert refused <= rounds * SLICE_ALPHA + 3 * (rounds * SLICE_ALPHA) ** 0.5


@pytest.mark.parametrize("rows_per_request", [1, 10])
def test_slice_that_loses_third_is_found_though_all_rows_hardly_change(rows_per_request):
    for seed in range(10):
        random = np.random.default_rng(seed)
        drawn = draw(random, rows=10_000, rate=0.25, rows_per_request=rows_per_request)
        slices = draw_slices(random, drawn.requests)
        harmed, candidate = slices["column 3: 4"], drawn.candidate.copy()
        candidate[harmed] = shifted(candidate[harmed], 0.33)
        answer = decided(drawn, candidate, slices=slices)
        assert answer.decision == "fail"
        check = check_of(answer, SLICES)
        assert (check.result, check.limit) == ("fail", 0)
        assert check.value >= 1
        assert "column 3: 4" in check.detail
        assert answer.estimates.difference.auc > -0.015
        assert decided(drawn, drawn.candidate, slices=slices).decision == "pass"


def test_slice_of_few_clicks_is_not_tested_and_changes_nothing():
    drawn = draw(np.random.default_rng(1), rows=4000, rate=0.25)
    few = np.arange(4000) < 30
    candidate = np.where(few, 0.999, drawn.candidate)
    answer = decided(drawn, candidate, slices={"the first": few})
    assert (answer.decision, dict(answer.slice_p_values)) == ("pass", {})
    assert (check_of(answer, SLICES).value, check_of(answer, SLICES).result) == (0, "pass")


def test_slice_is_evaluated_by_its_requests_and_not_by_its_rows():
    """A decline in three requests may be chance, although the requests have many rows."""
    drawn = draw(np.random.default_rng(1), rows=6000, rate=0.25, rows_per_request=300)
    part = np.isin(drawn.requests, range(15))
    candidate = np.where(np.isin(drawn.requests, range(3)), 0.5, drawn.candidate)
    rows = np.arange(len(drawn.labels))
    settings = GateSettings(min_auc=0.0, max_auc_loss=1.0, max_slice_loss=0.0)
    by_request = decide(
        drawn.labels,
        candidate,
        drawn.champion,
        groups=drawn.requests,
        slices={"part": part},
        settings=settings,
    )
    by_row = decide(
        drawn.labels,
        candidate,
        drawn.champion,
        groups=rows,
        slices={"part": part},
        settings=settings,
    )
    assert (by_request.decision, by_row.decision) == ("pass", "fail")


@pytest.mark.parametrize(
    ("factor", "decision"), [(1.3, "pass"), (1.9, "fail"), (1 / 1.3, "pass"), (1 / 1.9, "fail")]
)
def test_clicks_that_are_predicted_wrongly_by_more_than_factor_fail(factor, decision):
    drawn = draw(np.random.default_rng(2), rows=20_000, rate=0.03)
    answer = decide(drawn.labels, drawn.candidate * factor, groups=drawn.requests, settings=LENIENT)
    assert answer.decision == decision
    ratio = drawn.candidate.sum() * factor / drawn.labels.sum()
    assert check_of(answer, "calibration").value == pytest.approx(ratio)


def test_candidate_better_calibrated_than_champion_passes_calibration():
    drawn = draw(np.random.default_rng(2), rows=20_000, rate=0.03)
    groups, off = drawn.requests, drawn.candidate * 1.9
    assert (
        decide(drawn.labels, off, drawn.champion * 2.5, groups=groups, settings=LENIENT).decision
        == "pass"
    )
    assert (
        decide(drawn.labels, off, drawn.champion * 1.6, groups=groups, settings=LENIENT).decision
        == "fail"
    )


def test_rows_sampled_with_weights_are_evaluated_as_all_rows_are():
    drawn = draw(np.random.default_rng(5), rows=40_000, rate=0.03)
    clicked = drawn.labels == 1
    sampled = clicked | (np.random.default_rng(6).random(len(clicked)) < 0.1)
    part = np.random.default_rng(7).random(len(clicked)) < 0.5
    harmed = np.where(part, np.clip(drawn.candidate * 2.5, 0, 0.9), drawn.candidate)
    weights = np.where(clicked, 1, 10)

    def answer(candidate, rows, **weights):
        models = {
            "groups": drawn.requests[rows],
            "slices": {"part": part[rows]},
            "settings": LENIENT,
        }
        return decide(
            drawn.labels[rows], candidate[rows], drawn.champion[rows], **models, **weights
        )

    passing = answer(drawn.candidate, sampled, weights=weights[sampled])
    assert passing.decision == "pass"
    ratio = (drawn.candidate * weights)[sampled].sum() / clicked.sum()
    assert check_of(passing, "calibration").value == pytest.approx(ratio)
    by_weight, of_all = (
        answer(harmed, sampled, weights=weights[sampled]),
        answer(harmed, slice(None)),
    )
    assert by_weight.decision == of_all.decision == "fail"
    assert check_of(by_weight, SLICES).result == "fail"
    # Without weights, the high click rate of the sample hides the difference.
    assert check_of(answer(harmed, sampled), SLICES).result == "pass"
    assert (
        answer(drawn.candidate, sampled, weights=np.zeros(sampled.sum())).decision == "inconclusive"
    )


def test_calibration_that_chance_explains_does_not_fail():
    drawn = draw(np.random.default_rng(3), rows=600, rate=0.03)
    ratio = drawn.candidate.sum() / drawn.labels.sum()
    answer = decide(
        drawn.labels, drawn.candidate * 1.7 / ratio, groups=drawn.requests, settings=LENIENT
    )
    assert answer.decision == "pass"


def test_holm_continues_while_each_next_is_small_enough():
    assert holm({"a": 0.02, "b": 0.3, "c": 0.01}, 0.05) == ["c", "a"]
    assert holm({"a": 0.02, "b": 0.3, "c": 0.02}, 0.05) == []
    assert holm({}, 0.05) == []
