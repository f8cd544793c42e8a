"""Tests of the monitor's drift watch: drift is reported and displayed, also after a kill."""

import json
from dataclasses import replace

import numpy as np
import pytest

from evergreen.contracts import criteo
from evergreen.contracts.manifests import Model
from evergreen.registry.models import model_folder, scores_path
from monitoring.released_models import ReleasedModels
from testing.releases import release
from tests.support.monitors import START, publish

from .conftest import requests_of

FIRST = START - START % 600 + 600
"""Start time of a bucket."""
DRIFT = {
    "drift_bucket_seconds": 600.0,
    "drift_grace_seconds": 0.5,
    "drift_min_rows": 1000,
    "attribution_window_seconds": 30.0,
}


@pytest.fixture
def watched(bench, reference):
    """A monitor of a registry that holds version 1 with its training profile."""
    made = bench(recommender=criteo.CRITEO_RECOMMENDER, **DRIFT)
    store = made.settings.store
    reference.write(model_folder(store, "m1") / Model.REFERENCE)
    reference.scores.write(scores_path(store, "m1"))
    release(store, 1)
    made.clock.now = FIRST
    made.start()
    return made


def predictions(simulator, *, seed, prefix, drifted=False, rows=3000):
    drawn = simulator.draw(rows, np.random.default_rng(seed))
    if drifted:
        drawn.categorical[: rows // 3, criteo.CATEGORICAL.index("C14")] = 31_337
    spread = np.linspace(FIRST + 1, FIRST + 590, rows // 50)
    return [replace(r, time=t) for r, t in zip(requests_of(drawn, prefix=prefix), spread.tolist())]


def pass_bucket(bench):
    bench.tick(at=FIRST + 601)


def drift_events(bench):
    return [event for event in bench.events if event["kind"] == "drift"]


def test_drifted_bucket_is_reported_shown_counted_and_evaluated(watched, simulator):
    watched.tick(*predictions(simulator, seed=1, prefix="a", drifted=True))
    assert drift_events(watched) == []
    pass_bucket(watched)
    (event,) = drift_events(watched)
    assert (event["drifted"], event["version"], event["rows"]) == (["C14"], 1, 3000)
    assert "drift: C14 0.3" in event["text"]
    shown = watched.monitor._snapshot().drift
    assert [row["feature"] for row in shown["columns"]] == [*criteo.FEATURES, "score"]
    assert [row["feature"] for row in shown["columns"] if row["drifted"]] == ["C14"]
    json.dumps(shown, allow_nan=False)
    assert watched.store.counters["drift_bucket"] == watched.store.counters["drifted_bucket"] == 1
    stored = watched.store.read_document("drift")
    assert stored["shown"][0]["bucket_end"] == FIRST + 600


def test_bucket_without_drift_is_shown_and_no_event(watched, simulator):
    publish(watched.log, *predictions(simulator, seed=2, prefix="a"), form=watched.form)
    pass_bucket(watched)
    assert drift_events(watched) == []
    assert watched.monitor._snapshot().drift["rows"] == 3000
    assert watched.store.counters["drift_bucket"] == 1
    assert "drifted_bucket" not in watched.store.counters


@pytest.mark.parametrize("kept", [False, True])
def test_kill_loses_no_prediction_and_counts_none_twice(watched, simulator, kept):
    records = predictions(simulator, seed=3, prefix="a", drifted=True)
    watched.tick(*records[:20])
    if kept:
        watched.tick(at=watched.clock.now + 11)
    publish(watched.log, *records[20:40], *records[:5], form=watched.form)

    def crash(name):
        if name == "intake.stored":
            raise RuntimeError("killed")

    watched.checkpoint = crash
    with pytest.raises(RuntimeError):
        watched.monitor.tick()
    watched.checkpoint = lambda name: None
    watched.clock.now += 6  # The lease of unacknowledged messages must expire.
    watched.start()
    watched.tick(*records[40:])
    watched.start()
    pass_bucket(watched)
    assert watched.monitor._snapshot().drift["rows"] == 3000
    assert drift_events(watched)[0]["drifted"] == ["C14"]
    watched.start()
    watched.monitor.tick()
    assert len(drift_events(watched)) == 1
    assert watched.monitor._snapshot().drift["rows"] == 3000


def test_reports_of_another_revision_are_not_shown_and_watching_goes_on(watched, simulator):
    old = {
        "cursor": 0,
        "watch": None,
        "shown": [{"version": 1, "rows": 5, "columns": [{"column": "C1"}]}],
    }
    watched.store.write_documents({"drift": old}, {})
    watched.start()
    assert watched.monitor._snapshot().drift is None
    publish(watched.log, *predictions(simulator, seed=5, prefix="a"), form=watched.form)
    pass_bucket(watched)
    assert watched.monitor._snapshot().drift["rows"] == 3000


def test_version_without_statistics_is_archived_and_counted(watched, simulator):
    records = [
        replace(record, model_version=9) for record in predictions(simulator, seed=4, prefix="a")
    ]
    publish(watched.log, *records, form=watched.form)
    pass_bucket(watched)
    watched.monitor.stop()
    assert watched.monitor._snapshot().drift is None
    assert watched.store.counters["drift_no_reference_row"] == 3000
    assert watched.store.counters["predicted"] == 3000


def test_store_answers_by_version_and_corrupt_file_is_no_statistics(tmp_path, reference, caplog):
    find = ReleasedModels(tmp_path).reference
    assert find(1) is None
    release(tmp_path, 1)
    assert find(1) is None
    path = model_folder(tmp_path, "m1") / Model.REFERENCE
    reference.write(path)
    assert find(1).scores is None
    release(tmp_path, 2, "m2")
    reference.write(model_folder(tmp_path, "m2") / Model.REFERENCE)
    reference.scores.write(scores_path(tmp_path, "m2"))
    assert find(2).scores is not None
    release(tmp_path, 3, "m3")
    broken = model_folder(tmp_path, "m3") / Model.REFERENCE
    broken.parent.mkdir(parents=True)
    broken.write_text("{}")
    assert find(3) is None
    assert "version 3" in caplog.text
