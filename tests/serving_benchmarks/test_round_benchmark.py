"""The round benchmark's figures: every second between trigger and serving is in one step or between the steps."""

from datetime import datetime, timedelta, timezone

import pytest

from benchmarks.round import STARTS, round_seconds
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
