"""Tests of health and readiness: a monitor without progress is reported."""

import pytest

from monitoring.web.exposition import Exposition, Snapshot
from tests.support.clocks import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def exposition(clock):
    return Exposition(stall_seconds=10.0, clock=clock)


def test_stalled_or_ended_loop_is_unhealthy(exposition, clock):
    clock.now += 10
    assert exposition.unhealthy() is None
    clock.now += 1
    assert exposition.unhealthy() == "the loop is silent for 11 s"
    exposition.show(Snapshot())
    assert exposition.unhealthy() is None
    exposition.end("OSError: disk full")
    exposition.show(Snapshot())
    assert exposition.unhealthy() == "the loop has ended: OSError: disk full"


def test_monitor_is_ready_after_its_first_complete_turn(exposition):
    assert exposition.unready() == "no iteration of the loop has ended yet"
    exposition.show(Snapshot(time=1.0))
    assert exposition.unready() is None


def test_idle_log_is_ready_and_dead_subscriber_is_not(exposition):
    exposition.show(Snapshot(time=1e9, last_record_time=1.0, log_read_up_to=1e9))
    assert exposition.unready() is None
    exposition.show(
        Snapshot(time=1e9, last_record_time=1.0, log_problem="the stream ended: NotFound")
    )
    assert exposition.unready() == "the log cannot deliver: the stream ended: NotFound"
    assert exposition.unhealthy() is None, "a restart of the monitor would not help"


def test_interrupted_turn_is_alive_and_not_ready_until_complete_turn(exposition, clock):
    exposition.show(Snapshot(time=1.0))
    clock.now += 9
    exposition.record_failed_iteration("log is busy")
    clock.now += 9
    assert exposition.unhealthy() is None
    assert exposition.unready() == "the last iteration failed: log is busy"
    exposition.show(Snapshot(time=2.0))
    assert exposition.unready() is None
