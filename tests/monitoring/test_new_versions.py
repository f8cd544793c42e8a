"""Tests of a baking version in the running monitor: findings, notification and cooldown."""

import shutil
from dataclasses import replace
from datetime import datetime, timezone

import numpy as np
import pytest

from evergreen.contracts.baking import BAD
from evergreen.contracts.manifests import ModelQuality, Verdict
from evergreen.registry.models import verdict_paths
from evergreen.registry.promotion_journal import (
    RELEASE,
    ROLLBACK,
    append_promotion,
    baking,
    read_entries,
    read_findings,
)
from monitoring.retraining import new_versions
from testing.releases import make_live, passing_verdict, release
from tests.support.crashes import Kill
from tests.support.monitors import DRIFT, WINDOW, Bench, prediction, publish, traffic
from tests.support.record_messages import encode

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def two_versions(bench, tmp_path):
    """A monitor of a registry in which version 2 just replaced version 1.

    The gate measured an AUC of 0.9 for each version.
    """
    b: Bench = bench(
        **{**DRIFT, "consecutive_breaches": 8}, bake_rows=8000, bake_seconds=0.0, max_auc_loss=0.1
    )
    quality = replace(ModelQuality(), auc=0.9, auc_low=0.89, auc_high=0.91)
    for version in (1, 2):
        made = release(
            b.settings.store, version, f"m{version}", previous_version=version - 1 or None
        )
        verdict: Verdict = passing_verdict(
            f"m{version}", tmp_path / "none", num_rows=1, candidate=quality
        )
        verdict.write(verdict_paths(b.settings.store, f"m{version}")[0])
        make_live(b.settings.store, made)
    b.start()
    return b


def take_back(b: Bench) -> None:
    """Write what the controller writes for a rollback."""
    line = baking(b.settings.store)
    time = datetime.fromtimestamp(b.clock.now, timezone.utc).isoformat()
    back = replace(
        line,
        time=time,
        action=ROLLBACK,
        version=1,
        previous_version=2,
        model_id="m1",
        reason="it is bad",
    )
    append_promotion(b.settings.store, replace(back, blocked_model_id="m2"))


def test_version_bad_on_live_traffic_is_named_once_and_starts_no_run(two_versions):
    b = two_versions
    traffic(b, "before", auc="good")
    b.turn(2, WINDOW)
    assert read_findings(b.settings.store, 2) is None
    for number in range(12):
        traffic(b, f"after-{number}", auc="bad", version=2)
        b.turn(2, WINDOW)
        if number == 1:
            b.start()  # the monitor is restarted once
    found = read_findings(b.settings.store, 2)
    assert (found.state, "the AUC is below 0.79" in found.reason) == (BAD, True), found
    assert b.kinds().count("bad_release") == 1
    assert b.trigger.requests == [], "the rollback must come before a run"
    take_back(b)
    b.turn(3, 20.0)
    assert b.kinds().count("rolled_back") == 1
    b.start()
    b.turn(2, 20.0)
    assert b.kinds().count("rolled_back") == 1
    # The previous version is equally bad by now. A run is requested only after the cooldown of the
    # rollback.
    assert (
        b.monitor.actions.retraining.past_runs.blocked_by
        == "cooldown after a new version was rolled back"
    )
    for number in range(14):
        traffic(b, f"again-{number}", auc="bad", version=1)
        b.turn(2, 1.0)
    assert (b.trigger.requests, b.kinds().count("held")) == ([], 1)


def test_version_without_some_probabilities_is_named_before_any_label(two_versions):
    b = two_versions
    for number in range(60):
        scores = np.linspace(0.1, 0.9, 8)
        publish(b.log, prediction(f"good-{number}", version=2, scores=scores))
        scores[:4] = np.nan
        publish(b.log, prediction(f"bad-{number}", version=2, scores=scores))
        b.turn(1, 1.0)
    found = read_findings(b.settings.store, 2)
    assert found.state == BAD
    # The rollback follows after 50 requests, which took more than half a minute.
    assert found.reason == (
        "200 of 600 rows have a score that is not a probability, expected at most 0.10%: model "
        "version 2"
    )
    assert found.numbers["unusable_requests"] == 50
    assert b.kinds().count("bad_release") == 1
    assert b.store.counters["dead_letter"] == 60, "malformed messages must become dead letters"
    b.turn(2, WINDOW)
    assert b.store.counters["matured"] == 60 * 8, "the other rows must mature"


@pytest.mark.parametrize(
    ("requests", "distinct", "rows", "seconds"),
    [(60, 60, 4, 0.02), (60, 49, 4, 1.0), (60, 60, 1, 1.0), (3, 3, 2000, 100.0)],
    ids=["a burst", "the same requests again", "few rows", "few requests"],
)
def test_few_forged_requests_roll_nothing_back(two_versions, requests, distinct, rows, seconds):
    b = two_versions
    forged = [
        prediction(f"forged-{number}", rows, version=2, scores=np.full(rows, np.nan))
        for number in range(distinct)
    ]
    for number in range(requests):
        b.log.publish([(f"message {number}", encode(forged[number % distinct]))])
        b.turn(1, seconds)
    b.start()
    b.turn(2, 1.0)
    assert read_findings(b.settings.store, 2) is None
    assert b.store.counters["dead_letter"] == requests


def test_versions_that_do_not_bake_hide_no_row_of_baking_version(two_versions):
    b = two_versions
    for number in range(60):
        for version in (2, *range(100, 110)):
            publish(
                b.log,
                prediction(f"bad-{version}-{number}", version=version, scores=np.full(8, np.nan)),
            )
        b.turn(1, 1.0)
    assert read_findings(b.settings.store, 2).state == BAD
    assert read_findings(b.settings.store, 100) is None


def test_monitor_killed_before_it_writes_finding_reports_it_again(two_versions):
    b = two_versions
    nan = np.full(8, np.nan)
    publish(b.log, *(prediction(f"bad-{number}", version=2, scores=nan) for number in range(49)))
    b.turn(1, 31.0)
    publish(b.log, prediction("bad", version=2, scores=nan))
    with Kill(0).watch(new_versions, "write_findings") as kill:
        b.turn(1, 1.0)
    assert kill.is_dead
    b.start()
    b.turn(2, 1.0)
    assert (b.kinds().count("bad_release"), read_findings(b.settings.store, 2).state) == (2, BAD)


def test_one_request_without_score_among_thousands_rolls_nothing_back(two_versions):
    b = two_versions
    publish(b.log, *(prediction(f"r-{number}", 64, version=2) for number in range(60)))
    publish(b.log, prediction("odd", 2, version=2, scores=[0.5, np.nan]))
    b.turn(2, 1.0)
    assert read_findings(b.settings.store, 2) is None


def test_version_that_does_not_bake_has_no_findings(two_versions):
    b = two_versions
    take_back(b)
    publish(b.log, prediction("bad", version=2, scores=np.full(8, np.nan)))
    b.turn(2, 1.0)
    assert read_findings(b.settings.store, 2) is None


def test_monitor_with_new_state_does_not_report_an_earlier_rollback(two_versions):
    b = two_versions
    b.turn(1, 20.0)
    take_back(b)
    shutil.rmtree(b.settings.state)
    b.start()
    b.turn(3, 20.0)
    assert b.kinds().count("rolled_back") == 0
    assert not b.monitor.actions.retraining.past_runs.blocked_by


def test_two_rollbacks_with_the_same_time_are_both_reported(two_versions):
    """If the clock was set back, a journal line gets the time of the previous line."""
    b = two_versions
    b.turn(1, 20.0)
    take_back(b)
    b.turn(2, 20.0)
    first = read_entries(b.settings.store)[-1]
    again = replace(first, action=RELEASE, version=3, previous_version=1, blocked_model_id=None)
    append_promotion(b.settings.store, again)
    append_promotion(b.settings.store, replace(first, previous_version=3))
    assert len({line.time for line in read_entries(b.settings.store)[-3:]}) == 1
    b.turn(2, 20.0)
    assert b.kinds().count("rolled_back") == 2


def test_restarted_monitor_shows_the_last_decision(two_versions):
    b = two_versions
    traffic(b, "before", auc="good")
    b.turn(2, WINDOW)
    before = b.monitor._snapshot()
    assert before.decision is not None
    b.start()
    after = b.monitor._snapshot()
    assert (after.decision, after.decided_at, after.decisions) == (
        before.decision,
        before.decided_at,
        before.decisions,
    )
