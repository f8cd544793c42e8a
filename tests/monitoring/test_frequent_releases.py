"""Tests of a running monitor with releases at shorter intervals than the attribution window."""

import re
from dataclasses import replace
from datetime import datetime, timezone

import numpy as np
import pytest

from evergreen.contracts.manifests import ModelQuality
from evergreen.registry.models import verdict_paths
from monitoring.web.page import History, status_page
from testing.releases import passing_verdict, release, store_model
from tests.support.html_pages import health_of
from tests.support.monitors import START, WINDOW, Bench, clicks, prediction, publish

EVERY = 20.0
"""Seconds between two releases. Labels are final after a minute."""
CHANGED_AT = 90.0
SECONDS = 260


def release_version(store, version: int, *, trained_until: float) -> None:
    model_id = f"m{version}"
    store_model(
        store,
        model_id,
        watermark=datetime.fromtimestamp(trained_until, timezone.utc).isoformat(),
    )
    release(store, version, model_id, previous_version=version - 1 or None)
    path = verdict_paths(store, model_id)[0]
    quality = ModelQuality(auc=0.9, auc_low=0.88, auc_high=0.92)
    passing_verdict(model_id, path, num_rows=1_000, candidate=quality).write(path)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Returns the banners of the status page, one per second, and the bench that runs the monitor.

    After the drift, scores do not predict clicks.
    """
    bench = Bench(
        tmp_path_factory.mktemp("frequent"),
        drift_grace_seconds=2.0,
        decide_seconds=2.0,
        window_rows=600,
    )
    for version in range(1, int(SECONDS // EVERY) + 2):
        release_version(
            bench.settings.store, version, trained_until=START + (version - 1) * EVERY - WINDOW
        )
    random, banners = np.random.default_rng(3), []
    monitor = bench.start()
    for second in range(SECONDS):
        for number in range(2):
            time, version = START + second + 0.4 * number, int(second // EVERY) + 1
            labels = random.random(8) < 0.3
            separation = 0.25 * labels if second < CHANGED_AT else 0.0
            scores = np.clip(0.4 + separation + 0.12 * random.normal(size=8), 0, 1)
            name = f"r{second}-{number}"
            publish(
                bench.log, replace(prediction(name, 8, time=time, version=version, scores=scores))
            )
            if labels.any():
                events = [(name, row, time + 5.0) for row in np.flatnonzero(labels).tolist()]
                publish(bench.log, clicks(f"c-{name}", events))
        bench.tick(at=START + second + 1.0)
        page = status_page(monitor._exposition, History([], []), now=bench.clock.now)
        banners.append(health_of(page))
    yield banners, bench
    bench.close()


def test_banner_is_grey_until_labels_are_final_and_then_names_versions(seen):
    banners, _ = seen
    assert {state for state, _ in banners[: int(WINDOW)]} == {"wait"}
    assert "Nothing has been evaluated yet: no label is final." in banners[int(WINDOW) - 5][1]
    before = banners[int(WINDOW + CHANGED_AT) - 15]
    assert before[0] == "good"
    assert "No row of version 7 has matured yet; rows up to" in before[1]
    assert "were evaluated, the newest of version 4." in before[1]


def test_drop_starts_run_whose_reason_names_versions_that_scored_rows(seen):
    banners, bench = seen
    decisions = [event for event in bench.events if event["kind"] == "decision"]
    assert len(decisions) == 1
    delay = decisions[0]["time"] - START - CHANGED_AT - WINDOW
    assert 0.0 < delay < 40.0
    assert re.search(r"shown by rows of model versions? [45]", decisions[0]["text"])
    assert re.search(
        r"model version [89] serves, which was trained on rows up to", decisions[0]["text"]
    )
    (request,) = bench.trigger.requests
    assert request.observed["window_version"] in (5, 6, 7)
    state, text = banners[int(decisions[0]["time"] - START)]
    assert state == "bad"
    assert "Drift of version" in text
