"""What a monitor at work puts on show, by the names that dashboards ask for."""

from __future__ import annotations

from monitoring.deciding.policy import Action
from monitoring.monitor import Monitor
from monitoring.showing.exposition import Exposition
from tests.support.monitors import START, WINDOW, prediction, publish
from tests.support.snapshots import samples


def test_decisions_are_reported_by_plain_names(bench):
    b = bench(decide_seconds=1.0)
    b.start()
    exposition = Exposition()
    monitor = Monitor(b.settings, subscriber=b.log, store=b.store, trigger=None, clock=b.clock, exposition=exposition)
    publish(b.log, *(prediction(f"r{i}", time=START + i) for i in range(5)))
    b.clock.now = START + WINDOW + 20.0
    monitor.tick()
    (decision,) = exposition.snapshot.decisions
    assert decision.action is Action.UNDECIDABLE
    found = samples(exposition.snapshot)
    assert found["ctr_monitor_decision", ("action", "undecidable"), ("policy", "threshold")] == 1
