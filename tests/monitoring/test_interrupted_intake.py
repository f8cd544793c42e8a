"""A log that fails in the middle of a turn: what is stored is known to judge and page all the same."""

from __future__ import annotations

import pytest

from components.runtime.errors import TemporaryError
from tests.support.monitors import prediction, publish


@pytest.mark.parametrize("step", ["acknowledge", "dead_letter"])
def test_what_was_stored_is_known_although_the_log_failed_before_the_turn_was_over(bench, monkeypatch, step):
    b = bench()
    monitor, done = b.start(), getattr(b.log, step)

    def lose_the_answer(*arguments):
        monkeypatch.setattr(b.log, step, done)
        done(*arguments)
        raise TemporaryError("cut off")

    monkeypatch.setattr(b.log, step, lose_the_answer)
    publish(b.log, prediction("a", version=7))
    b.log.publish([("poison", b"no record")])
    with pytest.raises(TemporaryError, match="cut off"):
        monitor.tick()
    monitor.tick()
    assert b.store.counters["predicted"] == 8
    assert [event["version"] for event in b.events if event["kind"] == "version_seen"] == [7]
    assert monitor.serving_version == 7
