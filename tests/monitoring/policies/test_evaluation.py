"""Tests that decisions depend only on records, not on batches, order or restarts."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergreen.config.monitor import EvaluationSettings, PolicySettings
from evergreen.config.release import BakingSettings
from evergreen.runtime.errors import ContractError
from monitoring.metrics.window import MAX_VERSIONS
from monitoring.policies.evaluation import MAX_LINEAGE, Evaluator, serving_ahead
from monitoring.policies.policies import POLICIES, make_policies
from monitoring.policies.policy import Action, Baseline, Decision, FeatureDrift
from monitoring.rows import MaturedRequests
from tests.support.errors import raises
from tests.support.monitors import START, matured

WINDOW, GRACE = 7.0, 2.0
SETTINGS = EvaluationSettings(
    window_rows=60, attribution_window_seconds=WINDOW, decide_seconds=4.0, drift_grace_seconds=GRACE
)
AHEAD = serving_ahead(SETTINGS)
POLICY = PolicySettings(
    policies=",".join(POLICIES), auc_threshold=0.74, min_clicks=2, consecutive_breaches=2
)


def baseline(version: int) -> Baseline | None:
    return Baseline(auc=0.8, low=0.78, high=0.82, trained_until=START - 60.0 + 40.0 * version)


def make_evaluator(state=None, policies=POLICY, settings=SETTINGS) -> Evaluator:
    return Evaluator(settings, make_policies(policies), baseline=baseline, state=state)


def simulated_requests(seed: int, num: int = 60):
    """Return requests over 90 s: a canary, then version 2, then a rollback.

    Version 2 is rolled back for three seconds in between, which is shorter than an attribution
    window.
    """
    random = np.random.default_rng(seed)
    made = []
    for i in range(num):
        # The times include whole seconds, so that many times are equal or exactly at a decision
        # point.
        time = START + (float(random.integers(90)) if i % 3 else float(random.random() * 90))
        in_the_middle = START + 30 <= time < START + 60 and not START + 40 <= time < START + 43
        is_canary = bool(random.random() < 0.3) and not in_the_middle
        labels = (random.random(1 + i % 5) < 0.3).astype(np.uint8)
        scores = random.random(len(labels)).astype(np.float32)
        made.append(
            (
                matured(f"r{i}", time, 2 if is_canary or in_the_middle else 1, labels, scores),
                is_canary,
            )
        )
    return made


DRIFTS = [
    FeatureDrift(
        bucket_end=START + end,
        version=1,
        rows=50,
        drifted=("C1",),
        distances={"C1": 0.5, "I1": 0.1},
    )
    for end in (12.0, 24.0, 36.0)
]


def note(evaluator, request, *, is_canary=False):
    evaluator.record_predictions(request.times, request.versions, canary=np.array([is_canary]))


def note_all(evaluator, made):
    """Record the predictions of all requests in `made` in one call."""
    if made:
        together = MaturedRequests.joined([request for request, _ in made])
        canary = np.array([is_canary for _, is_canary in made])
        evaluator.record_predictions(together.times, together.versions, canary=canary)


def evaluate_in_bites(made, seed: int, *, bites: int, restarts: bool) -> list[str]:
    """Return the lines of a monitor that gets the shuffled records in batches.

    Predictions arrive late, but within the grace period. The evaluator decides on each batch as
    soon as the watermark permits.
    """
    random = np.random.default_rng(seed)
    arrival = {request.ids[0]: request.times[0] + random.uniform(0, GRACE) for request, _ in made}
    evaluator, lines = make_evaluator(), []
    ends = sorted(random.uniform(START, START + 120, bites)) + [START + 200.0]
    began = START - 100.0
    for end in ends:
        new = [
            made[i]
            for i in random.permutation(len(made))
            if began < arrival[made[i][0].ids[0]] <= end
        ]
        note_all(evaluator, new)
        for drift in DRIFTS:
            if began - GRACE < drift.bucket_end <= end - GRACE:
                evaluator.record_drift(drift)
        shuffled = [made[i][0] for i in random.permutation(len(made))]
        if due := [
            request for request in shuffled if began - WINDOW < request.times[0] <= end - WINDOW
        ]:
            evaluator.observe(MaturedRequests.joined(due))
        lines += [each.line() for each in evaluator.decide_up_to(end - WINDOW)]
        if restarts and evaluator.decided_until is not None:
            state = json.loads(json.dumps(evaluator.state_dict()))
            evaluator = make_evaluator(state)
            held = [
                made[i][0]
                for i in random.permutation(len(made))
                if made[i][0].times[0] <= end - WINDOW
            ]
            if held:
                evaluator.restore(MaturedRequests.joined(held))
            ahead = evaluator.decided_until + AHEAD
            note_all(
                evaluator,
                [
                    each
                    for each in made
                    if each[0].times[0] > ahead and arrival[each[0].ids[0]] <= end
                ],
            )
        began = end
    assert evaluator.num_passed_over == 0
    return lines


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 30), st.booleans())
def test_decision_lines_do_not_depend_on_batches_order_or_restarts(
    traffic_seed, seed, bites, restarts
):
    made = simulated_requests(traffic_seed)
    expected = evaluate_in_bites(made, 0, bites=0, restarts=False)
    assert len(expected) > 5
    assert evaluate_in_bites(made, seed, bites=bites, restarts=restarts) == expected


def requests(*times, version=1, rows=4):
    return [
        matured(f"v{version}-{time}", START + time, version, [1, 0] * (rows // 2), np.zeros(rows))
        for time in times
    ]


def fed(evaluator, *groups, canary=()):
    for group in groups:
        for request in group:
            note(evaluator, request, is_canary=int(request.versions[0]) in canary)
            evaluator.observe(request)
    return evaluator


def test_decision_points_are_multiples_of_span_at_which_rows_matured():
    evaluator = fed(make_evaluator(), requests(0.0, 0.1, 4.0, 30.0))
    points = [
        (each.time - START, each.decision.numbers["rows"])
        for each in evaluator.decide_up_to(START + 31.9)
    ]
    assert points == [(0.0, 4), (4.0, 12)], "rows of second 30 belong to the point at 32"
    assert evaluator.decided_until == START + 28.0
    assert [each.time - START for each in evaluator.decide_up_to(START + 32.0)] == [32.0]


def test_version_one_attribution_window_minus_grace_ahead_is_evaluated():
    evaluator = fed(make_evaluator(), requests(0.0, 2.0, 8.5), requests(9.0, 20.0, version=2))
    evaluated = [(each.time - START, each.version) for each in evaluator.decide_up_to(START + 40.0)]
    assert evaluated == [(0.0, 1), (4.0, 2), (12.0, 2), (20.0, 2)], (
        "version 2 is evaluated at second 4, while version 1's rows mature"
    )
    evaluator = fed(make_evaluator(), requests(0.0, 2.0, 8.5), requests(9.5, 20.0, version=2))
    evaluated = [(each.time - START, each.version) for each in evaluator.decide_up_to(START + 40.0)]
    assert evaluated == [(0.0, 1), (4.0, 1), (12.0, 2), (20.0, 2)], (
        "predictions of the last two seconds may not have arrived"
    )


def test_rollback_is_evaluated_on_older_version_again():
    evaluator = fed(
        make_evaluator(), requests(0.0), requests(20.0, 21.0, version=2), requests(40.0)
    )
    assert evaluator.decided_until is None
    points = evaluator.decide_up_to(START + 60.0)
    assert [each.version for each in points] == [1, 2, 2, 1]
    assert points[-1].state["matured_total"] == 16
    assert evaluator.decide_up_to(START + 10.0) == []
    assert evaluator.decided_until == START + 60.0
    (schedule,) = [each for each in points[1].decisions if each.policy == "schedule"]
    assert schedule.numbers["serving_seconds"] == points[1].time + AHEAD - (START + 20.0), (
        "the age counts up to the newest prediction"
    )


class Looking:
    """A policy that passes its evidence to a function of the test."""

    name = "looking"

    def __init__(self, look):
        self._look = look

    def decide(self, evidence, state):
        self._look(evidence)
        numbers = {"version": evidence.version}
        return Decision(policy=self.name, action=Action.OK, reason="", numbers=numbers), state


def reasons(points, policy):
    return {
        point.time - START: each
        for point in points
        for each in point.decisions
        if each.policy == policy
    }


def test_ages_are_never_negative_after_rollback_and_return_in_one_window():
    """Version 2 serves from second 23 on.

    A former error counted rows of version 2 already from second 20 on. The reported age was "-1254
    s".
    """
    policies = make_policies(POLICY, BakingSettings(bake_rows=1_000, bake_seconds=60.0))
    evaluator = Evaluator(
        SETTINGS,
        policies,
        baseline=lambda version: replace(baseline(version), previous_version=1),
    )
    fed(
        evaluator,
        requests(0.0, 8.0, 16.0),
        requests(20.0, 21.0, version=2),
        requests(22.0),
        requests(23.0, 40.0, version=2),
    )
    points = evaluator.decide_up_to(START + 60.0)
    baked = reasons(points, "baking")
    assert baked[20.0].reason.startswith(
        "passed 1 of 1 checks: model version 2, 4 matured rows since its release of 1000, 0 s"
    )
    assert baked[40.0].reason.startswith(
        "passed 1 of 1 checks: model version 2, 16 matured rows since its release of 1000, 20 s"
    )
    assert all(
        each.numbers["serving_seconds"] >= 0.0 for each in reasons(points, "schedule").values()
    )


def test_age_of_version_is_not_negative_after_clock_was_ahead_for_while():
    evaluator = fed(make_evaluator(), requests(0.0))
    evaluator.decide_up_to(START)
    (ahead,) = requests(100_000.0, version=2)
    note(evaluator, ahead)
    evaluator.decide_up_to(START + 100_004.0)
    evaluator.decide_up_to(START + 4.0)
    (point,) = fed(evaluator, requests(8.0, version=2)).decide_up_to(START + 8.0)
    assert reasons([point], "schedule")[8.0].numbers["serving_seconds"] == 4.0, (
        "the age counts from the correction of the clock"
    )


def test_rows_of_earlier_versions_are_evidence_and_of_later_ones_are_not():
    seen = []

    def look(evidence):
        rows = {version: len(each.labels) for version, each in evidence.rows_of.items()}
        seen.append(
            (evidence.time - START, evidence.version, evidence.lineage, rows, evidence.kpis.version)
        )

    evaluator = Evaluator(SETTINGS, [Looking(look)], baseline=baseline)
    fed(
        evaluator,
        requests(0.0),
        requests(9.0, 12.0, version=2),
        requests(20.0, 24.0),
        requests(40.0, 44.0, version=3),
    )
    evaluator.decide_up_to(START + 60.0)
    assert seen == [
        (0.0, 1, (1,), {1: 4}, 1),
        (12.0, 2, (1, 2), {2: 8}, 2),
        (20.0, 1, (1,), {1: 4}, 1),
        (24.0, 1, (1,), {1: 4}, 1),
        (40.0, 3, (1, 3), {3: 4}, 3),
        (44.0, 3, (1, 3), {3: 4}, 3),
    ]
    seen.clear()
    evaluator = Evaluator(SETTINGS, [Looking(look)], baseline=baseline)
    fed(evaluator, requests(0.0, 4.0, 8.0), requests(8.5, version=2), requests(9.0))
    evaluator.decide_up_to(START + 60.0)
    assert seen[1:] == [
        (4.0, 1, (1,), {1: 4}, 1),
        (8.0, 1, (1,), {1: 4}, 1),
        (12.0, 1, (1,), {1: 4}, 1),
    ]


def test_version_that_served_between_two_decision_points_is_in_lineage():
    evaluator = fed(
        make_evaluator(), requests(0.0), requests(9.0, version=2), requests(10.0, version=3)
    )
    points = evaluator.decide_up_to(START + 40.0)
    assert [each for each, _ in evaluator.state_dict()["lineage"]] == [1, 2, 3]
    assert points[-1].state["matured_total"] == 12


def test_predecessor_is_measured_once_first_own_row_matures():
    """The metrics of the previous version include rows that it served after the drift."""
    seen = {}

    def look(evidence):
        seen[evidence.time - START] = evidence.predecessor

    evaluator = Evaluator(
        SETTINGS,
        [Looking(look)],
        baseline=lambda version: Baseline(previous_version=version - 1 or None),
    )
    clicked = matured("late", START + 7.0, 1, [1, 1, 1, 1], np.zeros(4))
    fed(evaluator, requests(0.0, 4.0), [clicked], requests(8.5, 12.0, version=2))
    evaluator.decide_up_to(START + 60.0)
    assert (seen[4.0], seen[8.0]) == (None, None)
    assert seen[12.0].click_rate == pytest.approx(8 / 12)


def test_state_of_evaluation_is_bounded_for_many_versions_in_log():
    evaluator = make_evaluator()
    for version in range(1, 1_001):
        note(evaluator, *requests(0.04 * version, version=version))
    evaluator.observe(*requests(0.0))
    evaluator.decide_up_to(START + 60.0)
    assert len(evaluator.state_dict()["lineage"]) <= MAX_LINEAGE


def test_canary_is_not_evaluated_and_its_rows_are_in_no_others_window():
    evaluator = fed(make_evaluator(), requests(0.0, 8.0), requests(1.0, 9.0, version=2), canary={2})
    evaluated = evaluator.decide_up_to(START + 60.0)
    assert [(each.version, each.decision.numbers["rows"]) for each in evaluated] == [(1, 4), (1, 8)]


def test_request_after_its_decision_point_is_skipped_also_after_restart():
    evaluator = fed(make_evaluator(), requests(0.0, 8.0))
    evaluator.decide_up_to(START + 12.0)
    (late,) = requests(3.0)
    evaluator.observe(late)
    assert evaluator.num_passed_over == 1
    restarted = make_evaluator(json.loads(json.dumps(evaluator.state_dict())))
    restarted.restore(MaturedRequests.joined([*requests(0.0, 8.0), late]))
    lines = []
    for each in (evaluator, restarted):
        (point,) = fed(each, requests(14.0)).decide_up_to(START + 16.0)
        assert point.decision.numbers["rows"] == 12
        lines.append(point.line())
    assert lines[0] == lines[1]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_prediction_after_its_point_changes_no_serving_version_or_time(is_restarted):
    """A disconnected client reports version 1 long after version 2 began to serve.

    The start of version 2 must not change.
    """
    evaluator = fed(make_evaluator(), requests(0.0), requests(20.0, 30.0, 40.0, version=2))
    evaluator.decide_up_to(START + 40.0)
    note(evaluator, *requests(1.0))
    if is_restarted:
        evaluator = make_evaluator(json.loads(json.dumps(evaluator.state_dict())))
        note(evaluator, *requests(2.0))
    (point,) = fed(evaluator, requests(47.0, version=2)).decide_up_to(START + 48.0)
    assert point.version == 2
    assert point.state["lineage"][-1] == [2, round((START + 20.0) * 1e6)]
    note(evaluator, *requests(1.0))
    evaluator.decide_up_to(START + 60.0)
    assert evaluator.serving_version == 2


def test_prediction_newer_than_all_counts_at_next_point_after_its_own():
    evaluator = fed(make_evaluator(), requests(0.0, 40.0 + AHEAD - 2))
    evaluator.decide_up_to(START + 40.0)
    note(evaluator, *requests(40.0 + AHEAD - 1, version=2))
    evaluator.decide_up_to(START + 44.0)
    assert evaluator.serving_version == 2


def test_baseline_is_read_once_per_version_and_survives_restart():
    requested = []

    def read_baseline(version):
        requested.append(version)
        return Baseline(auc=0.8, low=0.7, high=0.9)

    policies = make_policies(PolicySettings())
    evaluator = Evaluator(SETTINGS, policies, baseline=read_baseline)
    fed(evaluator, requests(0.0, 5.0)).decide_up_to(START + 8.0)
    evaluator = Evaluator(
        SETTINGS,
        policies,
        baseline=read_baseline,
        state=json.loads(json.dumps(evaluator.state_dict())),
    )
    fed(evaluator, requests(9.0)).decide_up_to(START + 12.0)
    assert requested == [1]


def test_returning_version_finds_its_window_and_baseline_among_few():
    read = []
    smallest = EvaluationSettings(window_rows=1, attribution_window_seconds=0.0)
    evaluator = Evaluator(
        replace(smallest, window_rows=60), make_policies(PolicySettings()), baseline=read.append
    )
    versions = range(1, MAX_VERSIONS + 1)
    for number, version in enumerate([*versions, 1, 99]):
        fed(evaluator, requests(20.0 * number, version=version))
    points = evaluator.decide_up_to(START + 20.0 * len(versions) + 30.0)
    assert read == [*versions, 99], "each baseline must be read once"
    assert (points[-2].version, points[-2].kpis.rows) == (1, 8)
    assert len(points[-1].state["baselines"]) == MAX_VERSIONS


def test_buckets_closed_up_to_one_window_after_decision_point_count_at_it():
    evaluator = fed(make_evaluator(), requests(3.0))
    evaluator.record_drift(replace(DRIFTS[0], bucket_end=START + 4.0 + WINDOW - GRACE))
    (point,) = evaluator.decide_up_to(START + 4.0)
    (drift,) = [each for each in point.decisions if each.policy == "data_drift"]
    assert drift.numbers["drifted_columns"] == 1


def test_policies_that_are_unknown_or_named_twice_are_refused():
    for text in ("", "threshold,tarot", "threshold,threshold"):
        with raises(ContractError, "policies is"):
            PolicySettings(policies=text)
