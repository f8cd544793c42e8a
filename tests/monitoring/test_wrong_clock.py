"""Tests of clocks that were 400 days fast for five seconds."""

import pytest

from tests.support.monitors import START, WINDOW, clicks, prediction, traffic

AHEAD = 400 * 86_400.0
HOUR = 3600.0


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("whose", ["all clocks", "the monitor's clock"])
def test_hour_after_clock_was_corrected_nothing_waits_for_wrong_time(started, whose, restart):
    b = started(policies="threshold", auc_threshold=0.74, min_clicks=20, window_rows=1000)
    traffic(b, "before", auc="good")
    b.monitor.tick()
    wrong = b.clock.now + AHEAD
    client = wrong if whose == "all clocks" else b.clock.now
    events = [("ahead", 1, client + 1), ("nobody", 0, client)]
    b.tick(prediction("ahead", 4, time=client), clicks("o", events), at=wrong)
    b.tick(at=wrong + 5.0)
    now = b.clock.now = START + 100.0
    if restart:
        b.start()
    b.tick(prediction("after", 4, time=now, version=2), at=now)
    b.tick(prediction("later", 4, time=now + HOUR - 100.0, version=2), at=now + HOUR - 100.0)
    assert b.monitor.serving_version == 2
    assert b.monitor._exposition.snapshot.last_record_time == now + HOUR - 100.0
    traffic(b, "new", auc="bad", version=2)
    b.monitor.tick()
    b.tick(at=b.clock.now + WINDOW)
    assert '"version":2' in (b.settings.state / "decisions.jsonl").read_text()
    assert [kpis.version for kpis in b.monitor._exposition.snapshot.windows][-1] == 2
    b.tick(at=b.clock.now + 700.0)
    assert b.store.num_pending_rows == 0
    b.monitor.stop()
    # Every row is in the archive, in quarantine or in a dead letter. No row has a future day.
    apart, dead = int(b.store.counters.get("set_apart", 0)), b.log.list_dead_letters()
    assert len(b.archived) + apart == 400 + 4 + 4 + 400 + (4 if whose == "all clocks" else 0)
    assert [letter.message_id for letter in dead] == (
        [] if whose == "all clocks" else ["ahead", "o"]
    )
    assert max(row["event_time"].timestamp() for row in b.archived) < b.clock.now
    days = {path.parent.name for path in b.settings.archive.glob("**/part-*")}
    assert max(days) <= "day=2025-11-14"
    if whose == "all clocks":
        assert apart == 4
        (event,) = [each for each in b.events if each["kind"] == "set_apart"]
        assert "4 rows of 1 requests" in event["text"]
    b.start().tick()
    assert int(b.store.counters.get("set_apart", 0)) == apart
