"""Tests of the rows that are evidence about the serving version."""

import json

import numpy as np
import pytest

from evergreen.config.monitor import PolicySettings
from monitoring.metrics.window import MAX_VERSIONS
from monitoring.policies.betting import FRACTIONS, EValue, Trail, factors
from monitoring.policies.lineage_evidence import LineageEvidence
from monitoring.policies.policies import SequentialPolicy
from monitoring.policies.policy import NO_ROWS, Action, Baseline, without_oldest
from testing.click_streams import ClickTraffic, draw
from tests.support.evidence import evidence_of

AUC, FALLEN = 0.80, 0.62
SETTINGS = PolicySettings(sequential_tolerance=0.0)
TRAFFIC = ClickTraffic(0.25, 400)
SPAN = 10.0


class Line:
    """A policy that gets successive decision points.

    The policy's state is written as JSON and read back between two decision points.
    """

    def __init__(self, learned: dict[int, float | None]) -> None:
        self.policy, self.state, self.time = SequentialPolicy(SETTINGS), {}, 0.0
        self.learned, self.random, self.total = learned, np.random.default_rng(5), 0

    def see(self, line, aucs, *, points=1):
        """Return the decision on the last version of the lineage `line`.

        At each decision point, version `v` has 400 new rows with an AUC of `aucs[v]`.
        """
        for _ in range(points):
            self.time += SPAN
            rows = {
                version: draw(self.random, TRAFFIC, rows=400, auc=auc)
                for version, auc in sorted(aucs.items())
            }
            self.total += 400 * len(rows)
            known = {
                version: Baseline(
                    auc=AUC, low=AUC, high=AUC, trained_until=self.learned.get(version)
                )
                for version in {*rows, line[-1]}
            }
            evidence = evidence_of(
                version=line[-1],
                time=self.time,
                rows_of=rows,
                lineage=tuple(line),
                baselines=known,
                matured_total=self.total,
            )
            decision, state = self.policy.decide(evidence, self.state)
            self.state = json.loads(json.dumps(state, sort_keys=True, allow_nan=False))
        return decision


def test_rows_of_earlier_versions_raise_alarm_for_one_without_matured_row():
    seen = Line({1: -50.0, 2: -30.0, 3: 5.0})
    assert seen.see([1, 2, 3], {1: 0.85}, points=10).action is Action.OK
    decision = seen.see([1, 2, 3], {2: FALLEN}, points=10)
    assert decision.action is Action.RETRAIN
    assert "shown by rows of model version 2 from" in decision.reason
    assert decision.numbers["evidence"] >= decision.numbers["evidence_needed"] == 100.0


def test_bets_continue_over_release():
    """The rows of one version alone do not suffice for an alarm.

    The rows of two consecutive versions together suffice.
    """
    apart = [Line({1: -50.0, 2: -40.0}), Line({1: -50.0, 2: -40.0})]
    halves = [each.see([1, 2], {version: 0.76}, points=3) for version, each in zip((1, 2), apart)]
    assert [each.action for each in halves] == [Action.OK, Action.OK]
    together = Line({1: -50.0, 2: -40.0})
    together.see([1, 2], {1: 0.76}, points=3)
    assert together.see([1, 2], {2: 0.76}, points=3).numbers["evidence"] > 2 * max(
        each.numbers["evidence"] for each in halves
    )


def test_rows_of_rolled_back_version_are_no_evidence_about_live_one():
    seen = Line({1: -50.0, 2: -40.0, 3: -30.0})
    seen.see([1], {1: AUC}, points=5)
    assert seen.see([1, 2], {2: FALLEN}, points=10).action is Action.RETRAIN
    back = seen.see([1], {1: AUC})
    assert (back.action, back.numbers["evidence"] < 2.0) == (Action.OK, True)
    assert seen.see([1, 3], {1: AUC}).action is Action.OK, (
        "rows of version 1 are no evidence about version 3"
    )
    assert seen.see([1, 2], {1: AUC}).action is Action.RETRAIN, "the alarm of version 1 must remain"


def test_rollback_decision_counts_rows_of_both_versions():
    seen = Line({4: -50.0, 5: -40.0})
    seen.see([4], {4: AUC}, points=3)
    seen.see([4, 5], {5: AUC}, points=3)
    seen.see([4], {4: AUC})
    before = seen.see([4, 5], {5: AUC}).numbers
    after = seen.see([4, 5], {4: FALLEN, 5: FALLEN}, points=6)
    assert before["evaluated_clicks"] < after.numbers["evaluated_clicks"]
    assert after.action is Action.RETRAIN
    assert "rows of model versions 4 and 5 from" in after.reason


@pytest.mark.parametrize(
    ("trained", "action"), [(95.0, Action.RETRAIN), (300.0, Action.UNDECIDABLE)]
)
def test_release_ends_alarm_only_if_its_model_was_trained_on_changed_rows(trained, action):
    seen = Line({1: -50.0, 2: trained})
    seen.see([1], {1: AUC}, points=10)
    assert seen.see([1], {1: FALLEN}, points=15).action is Action.RETRAIN
    decision = seen.see([1, 2], {1: FALLEN})
    assert decision.action is action
    if action is Action.UNDECIDABLE:
        assert decision.reason.startswith(
            "no row of model version 2 has matured yet; it was trained on rows from after"
        )
        decision = seen.see([1, 2], {1: FALLEN, 2: AUC}, points=20)
        assert decision.action is Action.OK
        assert decision.reason.endswith("model version 2"), "the other version's rows do not count"
    else:
        assert seen.see([1, 2], {2: AUC}).action is Action.RETRAIN, "the alarm must remain"


def test_alarm_stays_as_raised_until_version_was_trained_on_change():
    seen = Line({1: -50.0, 2: -40.0})
    raised = seen.see([1], {1: FALLEN}, points=15)
    for line, rows in (([1], {1: AUC}), ([1, 2], {2: AUC})):
        later = seen.see(line, rows, points=20)
        assert later.action is Action.RETRAIN
        assert later.numbers["evidence"] == raised.numbers["evidence"]
        assert later.numbers["rows_since_breach"] > raised.numbers["rows_since_breach"]


def test_older_model_that_is_promoted_after_change_is_under_alarm_at_once():
    seen = Line({1: -50.0, 2: 300.0, 3: -50.0})
    seen.see([1], {1: AUC}, points=10)
    seen.see([1], {1: FALLEN}, points=15)
    assert seen.see([1, 2], {2: AUC}, points=3).action is Action.OK
    for rows in ({2: AUC}, {3: AUC}):
        decision = seen.see([1, 2, 3], rows)
        assert decision.action is Action.RETRAIN
        assert "shown by rows of model version 1 from" in decision.reason


def test_version_with_unknown_training_rows_is_evaluated_on_its_own_only():
    seen = Line({1: -50.0, 2: None})
    assert seen.see([1], {1: FALLEN}, points=15).action is Action.RETRAIN
    waiting = seen.see([1, 2], {1: FALLEN})
    assert waiting.action is Action.UNDECIDABLE
    assert "its training rows are unknown" in waiting.reason
    assert waiting.numbers["evidence"] is None
    own = seen.see([1, 2], {1: FALLEN, 2: AUC}, points=3)
    assert (own.action, own.numbers["evidence"] < 2.0) == (Action.OK, True)


def test_maximum_number_of_versions_suffices_for_releases_of_one_window():
    trained = {version: 30.0 * version - 1000.0 for version in range(1, 31)}
    seen = Line(trained)
    for version in range(1, 20):
        decision = seen.see(list(range(1, version + 10)), {version: AUC})
    assert decision.numbers["evaluated_clicks"] > 1_000
    assert len(seen.state["processes"]) == len(seen.state["rounds"]) == MAX_VERSIONS
    assert seen.see(list(range(1, 31)), {19: FALLEN}, points=12).action is Action.RETRAIN


def test_dropped_state_of_versions_does_not_depend_on_order_of_keys():
    known = {str(version): version for version in (10, 9, 2, 1, 30, 4, 5, 6, 7, 8)}
    remaining = without_oldest(known, needed=[2])
    assert sorted(remaining.values()) == [2, 5, 6, 7, 8, 9, 10, 30]
    assert without_oldest(dict(sorted(known.items())), needed=[2]) == remaining


def test_decision_point_without_round_changes_no_evidence():
    seen = Line({1: -50.0})
    seen.see([1], {1: AUC}, points=3)
    of_line = LineageEvidence(seen.state, enough=100.0)
    before = of_line.state_dict()["processes"]
    of_line.update(evidence_of(version=1, rows_of={1: NO_ROWS}, time=99.0), {1: AUC})
    assert of_line.state_dict()["processes"] == before


# -- when a change began


def test_trail_starts_again_where_its_product_falls_to_one():
    trail = Trail()
    for number, (factor, expected) in enumerate(
        [
            (0.5, (1.0, None, None)),
            (4.0, (4.0, 10.0, None)),
            (5.0, (20.0, 10.0, 30.0)),
            (2.0, (40.0, 10.0, 30.0)),
            (0.01, (1.0, None, None)),
            (3.0, (3.0, 50.0, None)),
        ]
    ):
        trail = trail.after(factor, since=10.0 * number, until=10.0 * number + 10.0, enough=20.0)
        assert (trail.value, trail.since, trail.shown_at) == expected
    assert (
        Trail()
        .after(1e300, since=0.0, until=1.0, enough=2.0)
        .after(1e9, since=1.0, until=2.0, enough=2.0)
        .value
        < 1e301
    )


def test_e_value_is_multiplied_by_products_of_factors():
    lambdas = [fraction / 0.2 for fraction in FRACTIONS]
    payoffs = [0.2, -0.8, 0.1, 0.05]
    by_hand = [np.prod([1.0 - each * payoff for payoff in payoffs]) for each in lambdas]
    assert factors(payoffs, lambdas) == pytest.approx(by_hand, rel=1e-12)
    # The factors of the first round get the weight `start` in equal parts. The expected e-value is
    # `start` times the mean of the factors, plus the remaining weight.
    mixture = EValue({})
    mixture.update(payoffs[1:2], [1.0], lambdas, enough=1e9)
    start, rest = 1.0 - 1.0 / np.log2(3), 1.0 / np.log2(3)
    assert mixture.value == pytest.approx(rest + start * np.mean(factors(payoffs[1:2], lambdas)))


def test_estimated_time_of_change_is_near_change():
    for seed in range(3):
        seen = Line({1: -50.0})
        seen.random = np.random.default_rng(seed)
        seen.see([1], {1: AUC}, points=30)
        assert seen.see([1], {1: FALLEN}, points=15).action is Action.RETRAIN
        alarm = seen.state["processes"]["1"]["alarm"]
        assert 250.0 <= alarm["since"] <= 340.0, alarm
        assert alarm["since"] < alarm["shown_at"] <= 450.0
