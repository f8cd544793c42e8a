"""Tests of each policy by tables of cases, and of several policies together."""

import json
from dataclasses import replace

import pytest

from evergreen.config.monitor import POLICY_NAMES, PolicySettings
from monitoring.policies.policies import (
    POLICIES,
    DataDriftPolicy,
    SchedulePolicy,
    ThresholdPolicy,
    make_policies,
)
from monitoring.policies.policy import Action, Baseline, Decision, FeatureDrift, combine
from monitoring.policies.rate_limit import OBSERVED_NUMBERS
from tests.support.evidence import KPIS, evidence_of, rows_of


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_answers_bare_evidence_with_reports_and_json_state(name):
    (policy,) = make_policies(PolicySettings(policies=name, auc_threshold=0.74))
    decision, state = policy.decide(evidence_of(rows=rows_of([1, 0], [0.5, 0.4])), {})
    assert decision.policy == policy.name == name
    assert set(OBSERVED_NUMBERS) <= set(decision.numbers)
    assert decision.numbers["version"] == 1
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    assert decision.action in (Action.OK, Action.UNDECIDABLE)


# -- threshold


SETTINGS = PolicySettings(auc_threshold=0.74, consecutive_breaches=1)
LOW = replace(KPIS, auc=0.712, auc_low=0.704, auc_high=0.720)
HIGH = KPIS
UNDEFINED = replace(KPIS, auc=None, auc_low=None, auc_high=None, clicks=0)


def evaluator(kpis=LOW, state=None, settings=SETTINGS, *, total=0):
    return ThresholdPolicy(settings).decide(evidence_of(kpis, matured_total=total), state or {})


@pytest.mark.parametrize(
    ("kpis", "changes", "action", "reason"),
    [
        (
            LOW,
            {},
            "retrain",
            "auc 0.712 (95 % 0.704..0.720) < 0.740 over 20000 rows, 4100 clicks, model version 1",
        ),
        (HIGH, {}, "ok", ">= 0.740"),
        (replace(LOW, auc=0.74, auc_high=0.75), {}, "ok", ">= 0.740"),
        (replace(LOW, auc_high=0.74), {}, "undecidable", "straddles 0.740"),
        (UNDEFINED, {}, "undecidable", "auc undefined over 20000 rows, 0 clicks"),
        (replace(LOW, clicks=199), {}, "undecidable", "199 clicks and 19801 others, needs 200"),
        (replace(LOW, clicks=19_801), {}, "undecidable", "199 others, needs 200"),
        (replace(LOW, clicks=200), {}, "retrain", "200 clicks"),
        (replace(LOW, auc_low=None, auc_high=None), {}, "undecidable", "too few requests"),
        (LOW, {"consecutive_breaches": 2}, "breach", "breach 1 of 2"),
        (LOW, {"min_rows_since_breach": 500}, "breach", "0 of 500 rows since"),
    ],
)
def test_decision_names_action_and_reason(kpis, changes, action, reason):
    decision, _ = evaluator(kpis, settings=replace(SETTINGS, **changes))
    assert decision.action.value == action
    assert reason in decision.reason
    assert decision.numbers["auc"] == kpis.auc
    assert decision.numbers["rows"] == kpis.rows


def test_confirmation_needs_breaches_in_row_and_rows_since_first():
    settings, state, actions = (
        replace(SETTINGS, consecutive_breaches=2, min_rows_since_breach=100),
        None,
        [],
    )
    for kpis, total in [(LOW, 10), (HIGH, 20), (LOW, 30), (LOW, 40), (LOW, 129), (LOW, 130)]:
        decision, state = evaluator(kpis, state, settings, total=total)
        actions.append(decision.action.value)
    assert actions == ["breach", "ok", "breach", "breach", "breach", "retrain"]
    assert decision.numbers["rows_since_breach"] == 100


def test_undecidable_window_neither_confirms_nor_clears_breach():
    settings = replace(SETTINGS, consecutive_breaches=2)
    _, state = evaluator(LOW, None, settings)
    _, state = evaluator(replace(LOW, auc_high=0.75), state, settings)
    assert evaluator(LOW, state, settings)[0].action is Action.RETRAIN


def test_breaches_of_old_version_do_not_count_against_new_one():
    settings = replace(SETTINGS, consecutive_breaches=2)
    _, state = evaluator(LOW, None, settings)
    assert evaluator(replace(LOW, version=2), state, settings)[0].action is Action.BREACH


# -- data drift


def bucket(*columns, version=1, end=100.0):
    distances = {column: 0.3 for column in columns} | {"I1": 0.01}
    return FeatureDrift(
        bucket_end=end, version=version, rows=1000, drifted=columns, distances=distances
    )


def drifts(*points, **changes):
    policy, state, actions = DataDriftPolicy(PolicySettings(**changes)), {}, []
    for i, buckets in enumerate(points):
        decision, state = policy.decide(evidence_of(drift=buckets, matured_total=1000 * i), state)
        state = json.loads(json.dumps(state))
        actions.append(decision.action.value)
    return actions, decision


def test_drift_over_several_buckets_requests_run_and_repeats_request():
    bad, good = (bucket("C1"),), (bucket(),)
    actions, decision = drifts((), bad, (), bad, good, bad, bad, bad, (), drift_buckets=3)
    assert actions == [
        "undecidable",
        "breach",
        "breach",
        "breach",
        "ok",
        "breach",
        "breach",
        "retrain",
        "retrain",
    ]
    assert "1 of 2 columns drifted over 1000 rows (C1 0.300)" in decision.reason
    assert decision.numbers["drifted_columns"] == 1
    assert decision.numbers["compared_columns"] == 2
    assert decision.numbers["rows_since_breach"] == 3000


def test_buckets_that_close_together_count_each():
    assert drifts((bucket("C1"), bucket("C1", end=200.0)), drift_buckets=2)[0] == ["retrain"]
    actions, decision = drifts((bucket("C1"), bucket(end=200.0)), drift_buckets=1)
    assert actions == ["ok"]
    assert decision.numbers["rows_since_breach"] == 0


def test_column_that_drifted_without_distance_is_named():
    lost = FeatureDrift(bucket_end=100.0, version=1, rows=1000, drifted=("C9",), distances={})
    assert "1 of 0 columns drifted over 1000 rows (C9), model" in drifts((lost,))[1].reason


def test_bucket_counts_only_with_configured_number_of_drifted_columns():
    assert drifts((bucket("C1"),), (bucket("C1", "C2"),), drift_buckets=1, drift_columns=2)[0] == [
        "ok",
        "retrain",
    ]


def test_drift_of_other_version_is_removed():
    policy = DataDriftPolicy(PolicySettings(drift_buckets=2))
    _, state = policy.decide(evidence_of(drift=(bucket("C1"),)), {})
    other = replace(KPIS, version=2)
    decision, _ = policy.decide(evidence_of(other, drift=(bucket("C1", version=2),)), state)
    assert decision.action is Action.BREACH


def test_drift_continues_over_release_that_was_not_trained_on_newer_rows():
    policy = DataDriftPolicy(PolicySettings(drift_buckets=2))
    _, state = policy.decide(evidence_of(drift=(bucket("C1", end=100.0),)), {})
    for trained_until, action in (
        (99.0, Action.RETRAIN),
        (100.0, Action.BREACH),
        (None, Action.BREACH),
    ):
        successor = evidence_of(
            replace(KPIS, version=2),
            lineage=(1, 2),
            drift=(bucket("C1", version=2, end=200.0),),
            baseline=Baseline(trained_until=trained_until),
        )
        assert policy.decide(successor, state)[0].action is action


def test_breaches_continue_over_release_that_was_not_trained_on_newer_rows():
    settings = replace(SETTINGS, consecutive_breaches=2)
    _, state = ThresholdPolicy(settings).decide(evidence_of(LOW, time=100.0), {})
    for trained_until, action in ((99.0, "retrain"), (100.0, "breach"), (None, "breach")):
        successor = evidence_of(
            replace(LOW, version=2),
            lineage=(1, 2),
            time=200.0,
            baseline=Baseline(trained_until=trained_until),
        )
        assert ThresholdPolicy(settings).decide(successor, state)[0].action.value == action


def test_window_of_earlier_version_counts_if_version_was_not_trained_on_it():
    _, state = ThresholdPolicy(SETTINGS).decide(evidence_of(LOW, time=100.0), {})
    for trained_until, action, reason in (
        (
            99.0,
            "retrain",
            "no row of model version 2 has matured yet; it was trained on rows up to 1970-01-01 "
            "00:01:39",
        ),
        (100.0, "undecidable", "it was trained on rows from after the first breach"),
        (None, "undecidable", "its training rows are unknown"),
    ):
        waiting = evidence_of(
            LOW,
            version=2,
            lineage=(1, 2),
            time=200.0,
            baseline=Baseline(trained_until=trained_until),
        )
        decision, _ = ThresholdPolicy(SETTINGS).decide(waiting, state)
        assert (decision.action.value, reason in decision.reason) == (action, True), decision.reason
        assert (decision.numbers["version"], decision.numbers["window_version"]) == (2, 1)


# -- schedule


def test_schedule_requests_run_once_version_has_served_for_long_enough():
    policy = SchedulePolicy(PolicySettings(max_serving_seconds=3600.0))
    for time, action in ((4599.0, Action.OK), (4600.0, Action.RETRAIN), (9999.0, Action.RETRAIN)):
        decision, _ = policy.decide(evidence_of(time=time, serving_since=1000.0), {})
        assert decision.action is action
    assert "model version 1 has served 8999 s of at most 3600 s" in decision.reason
    assert decision.numbers["rows_since_breach"] == 0


# -- several policies together


def reason_of(policy, action):
    return Decision(policy=policy, action=action, reason=policy, numbers={"version": 1})


@pytest.mark.parametrize(
    ("actions", "first"),
    [
        ((Action.OK, Action.RETRAIN, Action.RETRAIN), 1),
        ((Action.BREACH, Action.RETRAIN), 1),
        ((Action.OK, Action.BREACH), 1),
        ((Action.UNDECIDABLE, Action.OK), 0),
        ((Action.OK, Action.UNDECIDABLE), 0),
    ],
)
def test_any_retrain_wins_and_first_gives_reason(actions, first):
    decisions = tuple(reason_of(f"p{i}", action) for i, action in enumerate(actions))
    assert combine(decisions) is decisions[first]


def test_policies_are_those_that_settings_may_name():
    assert tuple(POLICIES) == POLICY_NAMES
