"""The round benchmark's figures: every second between trigger and serving is in one step or between the steps."""

from datetime import datetime, timedelta, timezone

import pytest

from benchmarks.round import STARTS, RoundSeconds, report, round_seconds
from components.store.runs import StepNote

BEGIN = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


def at(seconds):
    return BEGIN + timedelta(seconds=seconds)


def note(step, begins, seconds):
    return StepNote(step=step, started_at=at(begins).isoformat(), seconds=seconds)


def test_seconds_of_steps_and_between_them_add_up_to_trigger_to_serving():
    notes = [note("extraction", 1, 2.0), note("training", 4, 5.0), note("deployment", 10, 4.0)]
    found = round_seconds(10, notes, triggered=BEGIN, serving=at(12.5))
    # The server is ready in the middle of deployment's own seconds.
    assert found.steps == pytest.approx({"extraction": 2, "training": 5, "deployment": 2.5, STARTS: 3})
    assert found.serving == 12.5
    assert sum(found.steps.values()) == pytest.approx(found.serving)


@pytest.mark.parametrize(("begins", "seconds"), [(-1, 2.0), (1, None)])
def test_notes_of_another_round_or_of_a_step_at_work_are_refused(begins, seconds):
    with pytest.raises(ValueError, match="note of training begins at"):
        round_seconds(10, [note("training", begins, seconds)], triggered=BEGIN, serving=at(9))


@pytest.mark.parametrize(("seconds", "said"), [(24.9, "met"), (25.1, "TARGET MISSED")])
def test_fixed_cost_is_held_against_its_target_by_the_median(capsys, seconds, said):
    rounds = [RoundSeconds(1000, s, {"training": s}) for s in (1.0, seconds, 99.0)]
    report({1000: rounds, 10_000: [RoundSeconds(10_000, 30.0, {"training": 30.0})]})
    assert (
        f"round of 1,000 rows, seconds: {seconds} (1.0 to 99.0), target at most 25: {said}" in capsys.readouterr().out
    )
