"""Tests that evidence is preserved at a release, with and without drift."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from evergreen.config.monitor import PolicySettings
from evergreen.config.release import BakingSettings
from monitoring.policies.policies import POLICIES
from monitoring.policies.policy import Action
from testing.release_streams import START, Releases, decisions, without_change

WINDOW, CHANGED_AT = 1800.0, 4200.0
FALL = Releases(
    every=1800.0,
    seconds=4 * 3600.0,
    window=WINDOW,
    rows_per_second=4.0,
    changed_at=CHANGED_AT,
    gate_half_width=0.005,
)
EDGE = PolicySettings(sequential_alpha=0.05, sequential_tolerance=0.0)
"""Limiting case of the bound: the tolerance is 0, and the gate's AUC equals the stream's AUC."""


def runs(points):
    return [point for point in points if point.decision.action is Action.RETRAIN]


@pytest.mark.parametrize("minutes", [60, 30, 20])
def test_drop_is_found_however_often_models_are_released(minutes):
    """This is a regression test. Releases every 30 minutes once prevented 72 alarms."""
    releases = replace(FALL, every=60.0 * minutes, can_recover=False)
    points = list(decisions(np.random.default_rng(1), releases))
    assert len(points) == (releases.seconds - WINDOW) // releases.decide + 1, (
        "rows mature at every decision point"
    )
    first = runs(points)[0]
    assert 0 < first.time - START - CHANGED_AT <= 600.0
    assert {point.version for point in points} >= set(
        range(2, int(releases.seconds // releases.every))
    )


def test_retrain_decision_names_versions_whose_rows_are_evidence():
    releases = replace(FALL, every=1200.0, can_recover=False)
    (first, *_) = runs(decisions(np.random.default_rng(1), releases))
    scored_by = releases.version_at(CHANGED_AT)
    assert first.version > scored_by, "the version that serves has no matured row yet"
    assert (
        f"shown by rows of model version {scored_by} from 2026-01-01 01:1" in first.decision.reason
    )
    assert releases.trained_until(first.version) == 68 * 60.0
    trained = "which was trained on rows up to 2026-01-01 01:08:00 UTC"
    assert f"model version {first.version} serves, {trained}" in first.decision.reason
    assert first.decision.numbers["version"] == first.version


def test_only_version_trained_on_rows_after_change_ends_evidence():
    """Evidence against older versions is dropped once a release was trained on changed rows."""
    releases = replace(FALL, every=360.0)
    points = list(decisions(np.random.default_rng(2), releases))
    alarmed = {point.version for point in runs(points)}
    assert alarmed
    assert not [version for version in alarmed if releases.recovers_from(version)]
    after = [point for point in points if releases.recovers_from(point.version)]
    waiting = [point for point in after if point.decision.action is Action.UNDECIDABLE]
    assert "it was trained on rows from after the change" in waiting[0].decision.reason
    assert after[-1].decision.action is Action.OK, (
        "rows of versions trained after the change must count again"
    )


def test_second_change_is_found_on_rows_of_versions_trained_after_first():
    releases = replace(FALL, every=600.0, seconds=8 * 3600.0, changed_again_at=4.5 * 3600.0)
    found = runs(decisions(np.random.default_rng(3), releases))
    times = [point.time - START for point in found]
    assert min(times) < 2 * 3600.0
    later = [point for point in found if point.time - START > 4 * 3600.0]
    assert 0 < later[0].time - START - 4.5 * 3600.0 < 900.0


@pytest.mark.parametrize("policies", ["threshold", "data_drift", "schedule"])
def test_other_policies_decide_too_without_matured_row_of_serving_version(policies):
    settings = PolicySettings(
        policies=policies, auc_threshold=0.7, min_clicks=50, max_serving_seconds=900.0
    )
    releases = replace(FALL, every=1200.0, can_recover=False)
    points = list(decisions(np.random.default_rng(1), releases, settings, window_rows=2_000))
    assert len(points) > 200
    if policies == "threshold":
        assert 0 < runs(points)[0].time - START - CHANGED_AT < 900.0
    if policies == "schedule":
        ages = [point.decision.numbers["serving_seconds"] for point in points]
        assert (min(ages) >= 0.0, max(ages) <= 1200.0) == (True, True)


def test_threshold_requests_no_run_once_version_was_trained_after_breach():
    settings = PolicySettings(policies="threshold", auc_threshold=0.7, min_clicks=50)
    releases = replace(FALL, every=600.0)
    points = list(decisions(np.random.default_rng(1), releases, settings, window_rows=2_000))
    alarmed = {point.version for point in runs(points)}
    assert alarmed
    assert not [version for version in alarmed if releases.recovers_from(version)]
    assert points[-1].decision.action is Action.OK


def test_no_text_of_decision_has_negative_age_or_exceeds_page_width():
    settings = PolicySettings(policies=",".join(POLICIES), auc_threshold=0.7, min_clicks=50)
    for every in (360.0, 1800.0, 5400.0):
        releases = replace(FALL, every=every)
        for point in decisions(
            np.random.default_rng(1), releases, settings, baking=BakingSettings()
        ):
            for each in point.decisions:
                assert " -" not in each.reason, each.reason
                assert len(each.reason) < 400, each.reason


def alarm_share(releases: Releases, *, streams: int, seed: int) -> int:
    """Return the number of streams in which a policy requests a run, with the settings `EDGE`."""
    return sum(
        bool(runs(decisions(np.random.default_rng((seed, number)), releases, EDGE)))
        for number in range(streams)
    )


NULL = replace(without_change(FALL), seconds=3 * 3600.0, gate_half_width=0.0, rows_per_second=2.0)


@pytest.mark.parametrize("windows", [0.2, 1.0, 5.0])
def test_at_most_alpha_of_unchanged_streams_alarm_whatever_is_released(windows):
    """`make benchmark-policies` simulates 1,000 streams.

    All versions of a stream share one alpha, also in `make benchmark-policies`.
    """
    assert alarm_share(replace(NULL, every=windows * WINDOW), streams=20, seed=7) <= 3, (
        "P(more than 3 of 20 at 5 %) = 0.016"
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("windows", [0.2, 1.0, 5.0])
def test_at_most_alpha_of_many_streams_without_change_alarm(windows):
    streams = 300
    alarms = alarm_share(replace(NULL, every=windows * WINDOW), streams=streams, seed=8)
    assert (
        stats.binomtest(alarms, streams).proportion_ci(method="wilson").low <= EDGE.sequential_alpha
    )
