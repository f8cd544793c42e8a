"""Tests of a canary's rules on simulated pairs: error rates, and impossible decisions."""

import dataclasses
import math

import numpy as np
import pytest

from evergreen.runtime.errors import ContractError
from evergreen.serving.canary_policy import (
    ABORT,
    GROW,
    HOLD,
    ArmCounts,
    BothCounts,
    CanaryPolicy,
    Pairs,
    check_counts,
    evaluate,
    measure_differences,
    sequential_binomial,
)

POLICY = CanaryPolicy(min_pairs=500, max_looks=4, auc_margin=0.03, log_loss_margin=0.03)
HEALTHY = BothCounts(stable=ArmCounts(9000, 0, 9e6), canary=ArmCounts(500, 0, 5e5))


def expit(x):
    return 1 / (1 + np.exp(-x))


def result_of(found, name):
    return next(check.result for check in found.checks if check.name == name)


def score_pairs(
    seed, num_pairs, *, stable_noise=0.5, canary_noise=0.5, rows=1, canary_shift=0.0, base=-1.0
):
    """Return pairs of scores by two models. Each score is the true logit with the model's noise.

    Rows of one request share most of the logit and the noise.
    """
    random = np.random.default_rng(seed)
    requests = np.repeat(np.arange(math.ceil(num_pairs / rows)), rows)[:num_pairs]

    def shared(scale):
        own, of_request = (
            random.normal(0, 1, num_pairs),
            random.normal(0, 1, requests[-1] + 1)[requests],
        )
        return scale * (own if rows == 1 else 0.5 * own + math.sqrt(0.75) * of_request)

    true_logits = base + shared(1.0)
    return Pairs(
        labels=(random.random(num_pairs) < expit(true_logits)).astype(np.uint8),
        stable=expit(true_logits + shared(stable_noise)).astype(np.float32),
        canary=expit(true_logits + canary_shift + shared(canary_noise)).astype(np.float32),
        groups=requests,
    )


def run(seed, policy=POLICY, counts=HEALTHY, **planted):
    """Return the end of a canary of this simulator, and the number of pairs at that time.

    The policy evaluates the canary twice after each planned number of pairs.
    """
    pairs = score_pairs(seed, policy.looks[-1] + 17, **planted)
    for size in policy.looks:
        now = pairs.first(size + 17)
        found = evaluate(now, counts, policy)
        assert evaluate(now, counts, policy) == found
        if found.action != HOLD:
            break
    worse = any(check.result == "fail" and check.is_difference for check in found.by_pairs.checks)
    return "worse" if worse else "undecided" if found.action == ABORT else found.action, size


REPEATS = 120


@pytest.mark.parametrize("rows", [1, 10], ids=["single rows", "lists of ten"])
def test_equal_model_is_aborted_no_more_often_than_stated(rows):
    # No canary can reach these margins. The canary therefore never grows, and each look can raise a
    # false alarm.
    strict = CanaryPolicy(min_pairs=500, max_looks=4, auc_margin=1e-6, log_loss_margin=1e-6)
    aborted = sum(run(seed, strict, rows=rows)[0] == "worse" for seed in range(REPEATS))
    stated = strict.alpha
    bound = stated * REPEATS + 2.33 * math.sqrt(REPEATS * stated * (1 - stated))
    assert aborted <= bound, f"{aborted} of {REPEATS}"


@pytest.mark.parametrize("rows", [1, 10], ids=["single rows", "lists of ten"])
def test_few_clicks_are_no_evidence_however_many_pairs_there_are(rows):
    """Three clicks among 2000 pairs are too few for a normal approximation.

    With a normal approximation, a single look would abort one of thirty canaries that equal the
    live model.
    """
    policy = CanaryPolicy()
    found = [
        evaluate(score_pairs(seed, 2000, base=-7.0, rows=rows), HEALTHY, policy)
        for seed in range(250)
    ]
    aborted = sum(f.action == ABORT for f in found)
    assert aborted <= 3, (
        f"{aborted} of {len(found)}, where {2 * policy.level:.4f} of them are allowed"
    )
    assert not any(f.action == GROW for f in found)


def test_all_looks_together_have_stated_rates():
    policy = CanaryPolicy(max_looks=5)
    assert policy.level * 2 * policy.max_looks == pytest.approx(policy.alpha)
    assert sum(policy.growth_level(look) for look in range(1, 6)) == pytest.approx(
        policy.growth_alpha
    )


@pytest.mark.parametrize("rows", [1, 10], ids=["single rows", "lists of ten"])
def test_model_that_loses_margin_grows_no_more_often_than_stated(rows):
    """More noise lowers the AUC by 0.039, while the log loss stays far within its margin.

    The candidate's noise is 1.0 instead of 0.5.
    """
    policy = CanaryPolicy(
        min_pairs=500, max_looks=4, auc_margin=0.039, log_loss_margin=0.9, alpha=1e-9
    )
    grown = sum(
        run(seed, policy, rows=rows, canary_noise=1.0)[0] == GROW for seed in range(REPEATS)
    )
    bound = policy.growth_alpha * REPEATS + 2.33 * math.sqrt(REPEATS * policy.growth_alpha)
    assert grown <= bound, f"{grown} of {REPEATS}"


def test_worse_model_is_aborted_with_power_and_early():
    """More noise (1.0 instead of 0.5) lowers the AUC by 0.039 and adds 0.03 nats of log loss.

    The canary is nearly always aborted before the last look.
    """  # noqa: E501
    ends = [run(seed, canary_noise=1.0) for seed in range(60)]
    assert sum(end[0] == "worse" and end[1] < POLICY.looks[-1] for end in ends) >= 54
    assert not any(end[0] == GROW for end in ends)


def test_model_that_is_only_calibrated_worse_is_aborted():
    ends = [run(seed, canary_shift=0.6, canary_noise=0.5) for seed in range(20)]
    assert sum(end[0] == "worse" for end in ends) >= 19


def test_better_model_grows():
    ends = [run(seed, stable_noise=0.8, canary_noise=0.3) for seed in range(60)]
    assert sum(end[0] == GROW for end in ends) >= 59


def test_equal_model_is_not_held_for_ever():
    ends = [run(seed) for seed in range(60)]
    assert sum(end[0] == GROW for end in ends) >= 50


def test_more_pairs_than_look_change_nothing():
    pairs = score_pairs(1, 2999)
    assert (
        evaluate(pairs, HEALTHY, POLICY).by_pairs.auc
        == evaluate(pairs.first(2000), HEALTHY, POLICY).by_pairs.auc
    )


def test_canary_waits_until_first_look_and_reports_missing_pairs():
    found = evaluate(score_pairs(1, 499), HEALTHY, POLICY)
    assert (found.action, found.by_pairs.pairs_needed) == (HOLD, 1)
    assert found.by_pairs.auc is None
    empty = score_pairs(1, 20).first(0)
    assert evaluate(empty, HEALTHY, POLICY).by_pairs.pairs_needed == 500


def test_canary_undecided_at_last_look_is_rolled_back():
    strict = CanaryPolicy(min_pairs=500, max_looks=2, auc_margin=1e-6, log_loss_margin=1e-6)
    found = evaluate(score_pairs(4, 999), HEALTHY, strict)
    assert (found.action, found.by_pairs.pairs_needed) == (HOLD, 1)
    found = evaluate(score_pairs(4, 1000), HEALTHY, strict)
    assert (found.action, found.by_pairs.pairs_needed) == (ABORT, None)
    assert result_of(found.by_pairs, "looks without a decision") == "fail"
    assert result_of(found.by_pairs, "AUC against stable") == "inconclusive"


@pytest.mark.parametrize(
    "change",
    [
        {"labels": np.zeros(1000, np.uint8)},
        {"labels": np.ones(1000, np.uint8)},
        {"groups": np.zeros(1000, np.int64)},
    ],
    ids=["no click", "only clicks", "one request"],
)
def test_policy_never_decides_on_number_that_does_not_exist(change):
    pairs = score_pairs(1, 1000, canary_noise=3.0)
    assert evaluate(pairs, HEALTHY, POLICY).action == ABORT
    undefined = Pairs(**{**vars(pairs), **change})
    assert measure_differences(undefined) is None
    found = evaluate(undefined, HEALTHY, POLICY)
    assert (found.action, found.by_pairs.pairs_needed) == (HOLD, 1000)
    assert found.by_pairs.auc is None


def test_unreadable_servers_hold_what_would_grow_but_not_what_must_end():
    good, bad = (
        score_pairs(5, 4000, stable_noise=0.9, canary_noise=0.2),
        score_pairs(5, 4000, canary_noise=2.0),
    )
    assert evaluate(good, HEALTHY, POLICY).action == GROW
    assert evaluate(good, None, POLICY).action == HOLD
    assert evaluate(bad, None, POLICY).action == ABORT


@pytest.mark.parametrize("arm", ["stable", "canary"])
def test_too_few_requests_are_no_evidence_about_errors(arm):
    counts = dataclasses.replace(
        HEALTHY, **{"canary": ArmCounts(0, 50, 0), arm: ArmCounts(1, 50, 1e9)}
    )
    assert evaluate(score_pairs(1, 0 + 100), counts, POLICY).action == HOLD


def test_failures_beyond_margin_abort_before_any_pair():
    counts = BothCounts(ArmCounts(9900, 100, 9.9e6), ArmCounts(900, 100, 9e5))
    found = evaluate(score_pairs(1, 100).first(0), counts, POLICY)
    assert found.action == ABORT
    (failures, _) = found.by_counts.checks
    assert (failures.name, failures.value, failures.result) == ("failure rate", 0.1, "fail")
    assert failures.limit == pytest.approx(0.01 + POLICY.error_margin)


def test_canary_that_fails_as_often_as_stable_is_not_blamed():
    counts = BothCounts(ArmCounts(8000, 2000, 8e6), ArmCounts(800, 205, 8e5))
    assert check_counts(counts, POLICY).action == GROW


def test_latency_over_bound_aborts_and_all_failures_leave_no_latency():
    slow = BothCounts(ArmCounts(1000, 0, 1e6), ArmCounts(1000, 0, 1.6e6))
    found = check_counts(slow, POLICY)
    assert found.action == ABORT
    assert found.latency_ratio == pytest.approx(1.6)
    assert result_of(found, "latency ratio") == "fail"
    few = dataclasses.replace(slow, canary=ArmCounts(999, 0, 1.6e6))
    assert check_counts(few, POLICY).action == HOLD, (
        "one stall can change the mean of so few requests"
    )
    nearly = dataclasses.replace(slow, canary=ArmCounts(1000, 0, 1.5e6))
    assert check_counts(nearly, POLICY).action == GROW
    neither = BothCounts(ArmCounts(0, 1000, 0), ArmCounts(0, 1000, 0))
    assert check_counts(neither, POLICY).action == HOLD


def test_answers_from_cache_are_no_measure_of_model():
    """The cache of the stable arm answers nine of ten requests, and the canary's cache is empty.

    The models themselves are equally fast.
    """
    stable = ArmCounts(10_000, 0, 1_500_000, cache_hits=9_000)
    canary = ArmCounts(2000, 0, 3_000_000)
    found = check_counts(BothCounts(stable, canary), CanaryPolicy())
    assert found.action == GROW
    assert found.latency_ratio == pytest.approx(1.0)
    slow = dataclasses.replace(canary, infer_us=6_000_000)
    found = check_counts(BothCounts(stable, slow), CanaryPolicy())
    assert found.action == ABORT
    assert found.latency_ratio == pytest.approx(2.0)
    assert result_of(found, "latency ratio") == "fail"
    cached = dataclasses.replace(stable, cache_hits=9_950)
    assert check_counts(BothCounts(cached, canary), CanaryPolicy()).action == HOLD


def test_errors_tested_at_every_request_alarm_as_rarely_as_stated():
    random, alarms, level, allowed = np.random.default_rng(8), 0, 0.05, 0.1
    for _ in range(200):
        failures = np.cumsum(random.random(400) < allowed)
        alarms += any(
            sequential_binomial(int(k), n, allowed) < level for n, k in enumerate(failures, start=1)
        )
    assert alarms <= 200 * level + 2.33 * math.sqrt(200 * level * (1 - level))
    assert sequential_binomial(80, 400, allowed) < level, "a doubled error rate must be found"


@pytest.mark.parametrize(
    "change",
    [
        {"shares": ()},
        {"shares": (0.5, 0.1)},
        {"shares": (0.1, 1.0)},
        {"shares": (0.0, 0.1)},
        {"min_pairs": 0},
        {"max_looks": 0},
        {"alpha": 0.0},
        {"alpha": 0.5},
        {"error_margin": 0.0},
        {"max_latency_ratio": 1.0},
    ],
    ids=str,
)
def test_rules_that_cannot_work_are_refused(change):
    with pytest.raises(ContractError, match=next(iter(change))):
        CanaryPolicy(**change)
