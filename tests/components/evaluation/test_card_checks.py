"""The checks on a model's card are those that decided, with their numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from components.evaluation.gate import judge
from evergreen.config.gate import GateSettings
from evergreen.contracts.manifests import AucLead, ModelQuality
from evergreen.reports.model_card import gate_checks, headline
from evergreen.statistics.metrics import calibration

SETTINGS = GateSettings(min_auc=0.6, max_auc_loss=0.01)


def scored(n, *, candidate=1.0, champion=1.0, shift=0.0, worse_slice=False):
    """Labels, both models' scores, and a slice in which the candidate may know nothing."""
    random = np.random.default_rng(3)
    labels = (random.random(n) < 0.3).astype(np.int8)
    is_slice = np.arange(n) % 4 == 0
    separation = np.where(is_slice & worse_slice, -1.0, candidate)
    logits = [0.3 * random.normal(size=n) + each * (labels - 0.3) - 0.85 for each in (separation, champion)]
    return (
        labels,
        [1 / (1 + np.exp(-each)) for each in (logits[0] + shift, logits[1])],
        {"all rows": is_slice | True, "C1: 7": is_slice},
    )


def card_of(labels, scores, slices):
    """The gate's answer, and what the card has of it."""
    judged = judge(labels, *scores, groups=np.arange(len(labels)), slices=slices, settings=SETTINGS)
    auc, lead = judged.estimates.candidate, judged.estimates.difference
    quality = ModelQuality(calibration=calibration(labels, scores[0]))
    if auc is not None:
        quality = ModelQuality(
            auc=auc.auc, auc_low=auc.low, auc_high=auc.high, calibration=calibration(labels, scores[0])
        )
    difference = None
    if len(scores) > 1:
        difference = AucLead(auc=lead.auc, low=lead.low, high=lead.high) if lead else AucLead()
    verdict = SimpleNamespace(
        reason=judged.reason, candidate=quality, difference=difference, num_rows=len(labels), decision=judged.decision
    )
    return judged, SimpleNamespace(verdict=verdict, gate=vars(SETTINGS))


@pytest.mark.parametrize(
    ("rows", "decision", "deciding"),
    [
        (scored(20_000, candidate=1.2), "pass", None),
        (scored(20_000, candidate=0.5), "fail", "AUC against the champion"),
        (scored(20_000, candidate=0.05, champion=0.05), "fail", "AUC"),
        (scored(100, candidate=0.3, champion=0.3), "inconclusive", "AUC against the champion"),
        (scored(20), "inconclusive", "requests with clicks"),
        (scored(20_000, candidate=1.3, shift=2.0), "fail", "expected / observed clicks"),
        (scored(20_000, candidate=2.0, worse_slice=True), "fail", "slices with over 2 % more log loss"),
    ],
    ids=["pass", "worse", "below floor", "undecided", "few clicks", "miscalibrated", "slice"],
)
def test_worst_check_is_decision_and_deciding_one_is_named(rows, decision, deciding):
    judged, card = card_of(*rows)
    checks = gate_checks(card)
    results = [check.result for check in checks]
    worst = next((each for each in ("fail", "inconclusive") if each in results), "pass")
    assert (judged.decision, worst) == (decision, decision)
    if deciding:
        assert deciding in [check.name for check in checks if check.result == decision]


def test_numbers_are_gates_and_headline_counts_what_passed():
    judged, card = card_of(*scored(20_000, candidate=1.2))
    auc, lead, slices, clicks = gate_checks(card)
    alone, paired = judged.estimates.candidate, judged.estimates.difference
    assert (auc.value, auc.interval) == (alone.auc, (alone.low, alone.high))
    assert (lead.value, lead.interval) == (paired.auc, (paired.low, paired.high))
    assert (auc.limit, lead.limit, slices.value) == ("at least 0.6", "at least -0.01", "0 of 2")
    assert clicks.value == card.verdict.candidate.calibration
    words = headline(card)
    assert words.startswith(f"AUC {alone.auc:.4f} [")
    assert f"{paired.auc:+.4f} against the champion; passed 4 of 4 checks on 20,000 held-out rows" in words


def test_first_model_has_no_row_about_champion():
    labels, scores, _ = scored(5000)
    _, card = card_of(labels, scores[:1], None)
    assert [check.name for check in gate_checks(card)] == ["AUC", "expected / observed clicks"]
    assert "champion" not in headline(card)


def test_auc_without_interval_is_inconclusive():
    labels = np.array([0, 1] * 200, np.int8)
    judged, card = card_of(labels, [labels * 0.8 + 0.1], None)
    assert judged.decision == "inconclusive"
    assert (gate_checks(card)[0].name, gate_checks(card)[0].result) == ("AUC", "inconclusive")
