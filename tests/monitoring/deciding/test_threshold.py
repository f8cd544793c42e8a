"""The policy as a table of cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.runtime.errors import ContractError
from monitoring.deciding.decision import Action
from monitoring.deciding.threshold import ThresholdPolicy, ThresholdSettings
from monitoring.measures.kpis import Kpis
from tests.monitoring.deciding.conftest import evidence_of

SETTINGS = ThresholdSettings(consecutive_breaches=1)
LOW = Kpis(
    version=1,
    rows=20_000,
    clicks=4100,
    auc=0.712,
    auc_low=0.704,
    auc_high=0.720,
    log_loss=0.5,
    calibration=1.0,
    ctr=0.2,
)
HIGH = replace(LOW, auc=0.76, auc_low=0.751, auc_high=0.769)


def judge(kpis=LOW, memory=None, settings=SETTINGS, *, total=0):
    return ThresholdPolicy(settings).decide(evidence_of(kpis, matured_total=total), memory or {})


@pytest.mark.parametrize(
    ("kpis", "changes", "action", "reason"),
    [
        pytest.param(
            LOW,
            {},
            Action.RETRAIN,
            "auc 0.712 (95 % 0.704..0.720) < 0.740 over 20000 rows, 4100 clicks, model version 1",
            id="drift",
        ),
        pytest.param(HIGH, {}, Action.OK, ">= 0.740", id="good"),
        pytest.param(replace(LOW, auc=0.74, auc_high=0.75), {}, Action.OK, ">= 0.740", id="exactly at the threshold"),
        pytest.param(replace(LOW, auc_high=0.745), {}, Action.UNDECIDABLE, "straddles 0.740", id="straddles"),
        pytest.param(
            replace(LOW, auc_high=0.745),
            {"require_confidence": False},
            Action.RETRAIN,
            "<",
            id="point estimate",
        ),
        pytest.param(
            replace(LOW, auc=None, auc_low=None, auc_high=None, clicks=0),
            {},
            Action.UNDECIDABLE,
            "auc undefined over 20000 rows, 0 clicks",
            id="no clicks",
        ),
        pytest.param(
            replace(LOW, clicks=199), {}, Action.UNDECIDABLE, "199 clicks and 19801 others, needs 200", id="few clicks"
        ),
        pytest.param(replace(LOW, clicks=19_900), {}, Action.UNDECIDABLE, "100 others, needs 200", id="few non-clicks"),
        pytest.param(
            replace(LOW, auc_low=None, auc_high=None, clicks=1),
            {"min_clicks": 1},
            Action.UNDECIDABLE,
            "needs more rows",
            id="no interval",
        ),
        pytest.param(LOW, {"consecutive_breaches": 2}, Action.BREACH, "breach 1 of 2", id="not confirmed"),
        pytest.param(
            LOW,
            {"min_rows_since_breach": 500},
            Action.BREACH,
            "0 of 500 rows since",
            id="too few new rows",
        ),
    ],
)
def test_decision_names_action_and_reason(kpis, changes, action, reason):
    decision, _ = judge(kpis, settings=replace(SETTINGS, **changes))
    assert decision.action is action
    assert reason in decision.reason
    assert decision.numbers["auc"] == kpis.auc
    assert decision.numbers["rows"] == kpis.rows


def test_confirmation_needs_breaches_in_a_row_and_rows_since_the_first():
    settings, memory, actions = ThresholdSettings(consecutive_breaches=2, min_rows_since_breach=100), None, []
    for kpis, total in [(LOW, 10), (HIGH, 20), (LOW, 30), (LOW, 40), (LOW, 129), (LOW, 130)]:
        decision, memory = judge(kpis, memory, settings, total=total)
        actions.append(decision.action.value)
    assert actions == ["breach", "ok", "breach", "breach", "breach", "retrain"]
    assert decision.numbers["rows_since_breach"] == 100


def test_an_undecidable_window_neither_confirms_nor_clears_a_breach():
    settings = ThresholdSettings(consecutive_breaches=2)
    _, memory = judge(LOW, None, settings)
    _, memory = judge(replace(LOW, auc_high=0.75), memory, settings)
    assert judge(LOW, memory, settings)[0].action is Action.RETRAIN


def test_breaches_of_an_old_version_do_not_count_against_the_new_one():
    settings = ThresholdSettings(consecutive_breaches=2)
    _, memory = judge(LOW, None, settings)
    assert judge(replace(LOW, version=2), memory, settings)[0].action is Action.BREACH


@pytest.mark.parametrize(
    "changes",
    [
        {"auc_threshold": 0.0},
        {"auc_threshold": 1.0},
        {"auc_threshold": float("nan")},
        {"min_clicks": 0},
        {"consecutive_breaches": 0},
        {"min_rows_since_breach": -1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_with_their_value(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ContractError, match=f"{name} is {value}"):
        ThresholdSettings(**changes)
