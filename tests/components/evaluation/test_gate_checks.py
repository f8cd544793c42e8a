"""Tests that the gate's checks, its headline and its page contain the decisive numbers."""

import numpy as np
import pytest

from components.evaluation.gate import decide
from evergreen.config.gate import GateSettings
from evergreen.contracts.checks import headline
from evergreen.reports.page import check_rows
from evergreen.statistics.metrics import calibration

SETTINGS = GateSettings(min_auc=0.6, max_auc_loss=0.01)


def scored(n, *, candidate=1.0, champion=1.0, shift=0.0, worse_slice=False):
    """Return labels, the scores of both models, and a slice of rows.

    If `worse_slice` is true, the candidate's scores are wrong in the slice.
    """
    random = np.random.default_rng(3)
    labels = (random.random(n) < 0.3).astype(np.int8)
    is_slice = np.arange(n) % 4 == 0
    separation = np.where(is_slice & worse_slice, -1.0, candidate)
    logits = [
        0.3 * random.normal(size=n) + each * (labels - 0.3) - 0.85
        for each in (separation, champion)
    ]
    return (
        labels,
        [1 / (1 + np.exp(-each)) for each in (logits[0] + shift, logits[1])],
        {"all rows": is_slice | True, "C1: 7": is_slice},
    )


def decided(labels, scores, slices=None):
    return decide(labels, *scores, groups=np.arange(len(labels)), slices=slices, settings=SETTINGS)


@pytest.mark.parametrize(
    ("rows", "decision", "deciding"),
    [
        (scored(20_000, candidate=1.2), "pass", None),
        (scored(20_000, candidate=0.5), "fail", "AUC against the champion"),
        (scored(20_000, candidate=0.05, champion=0.05), "fail", "AUC"),
        (scored(100, candidate=0.3, champion=0.3), "inconclusive", "AUC against the champion"),
        (scored(20), "inconclusive", "requests with clicks"),
        (scored(20_000, candidate=1.3, shift=2.0), "fail", "calibration"),
        (scored(20_000, candidate=2.0, worse_slice=True), "fail", "slices with more log loss"),
    ],
    ids=["pass", "worse", "below floor", "undecided", "few clicks", "miscalibrated", "slice"],
)
def test_deciding_check_is_named_in_headline(rows, decision, deciding):
    found = decided(*rows)
    assert found.decision == decision
    if deciding:
        assert deciding in [check.name for check in found.checks if check.result == decision]
        assert deciding in headline(found.checks).partition("checks; ")[2]


def test_checks_have_estimates_limits_and_rows_of_page():
    labels, scores, slices = scored(20_000, candidate=1.2)
    found = decided(labels, scores, slices)
    auc, lead, harmed, clicks = found.checks
    alone, paired = found.estimates.candidate, found.estimates.difference
    assert (auc.value, auc.interval) == (alone.auc, (alone.low, alone.high))
    assert (lead.value, lead.interval) == (paired.auc, (paired.low, paired.high))
    assert (auc.limit, lead.limit, harmed.value, harmed.limit) == (0.6, -0.01, 0, 0)
    assert clicks.value == calibration(labels, scores[0])
    assert headline(found.checks) == (
        f"AUC {alone.auc:.4f} [{alone.low:.4f}, {alone.high:.4f}], {paired.auc:+.4f} against the "
        "champion; "
        "passed 4 of 4 checks"
    )
    rows = check_rows(found.checks)
    assert [(row.name, row.value, row.interval) for row in rows] == [
        (check.name, check.value, check.interval) for check in found.checks
    ]
    assert [row.limit for row in rows] == [
        "at least 0.6",
        "at least -0.01",
        "at most 0",
        "within a factor of 1.5",
    ]


def test_first_model_has_no_check_about_champion():
    labels, scores, _ = scored(5000)
    found = decided(labels, scores[:1])
    assert [check.name for check in found.checks] == ["AUC", "calibration"]
    assert "champion" not in headline(found.checks)


def test_auc_without_interval_is_inconclusive():
    labels = np.array([0, 1] * 200, np.int8)
    auc, _ = decided(labels, [labels * 0.8 + 0.1]).checks
    assert (auc.name, auc.value, auc.interval, auc.result) == ("AUC", None, None, "inconclusive")
    assert "the interval is undefined" in auc.detail
