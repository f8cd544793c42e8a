"""Tests of the data drift policy: monitor, backtest and replay make the same decisions."""

import json
from dataclasses import replace

import numpy as np
import pytest

from demo.simulation.simulator import Simulator
from evergreen.contracts import criteo
from evergreen.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from monitoring.backtest.incident import STATISTICS, main, replay
from testing.recommenders import accept_into
from tests.monitoring.backtest.conftest import Ran, backtested, run_over, write_references
from tests.monitoring.drift.conftest import reference_of, requests_of
from tests.support.monitors import START, WINDOW, Bench, clicks

SECONDS, ROWS = 400, 25
CHANGED_AT, RELEASED_AT = START + 150.0, START + 320.0
SETTINGS = {
    "policies": "threshold,data_drift",
    "window_rows": 3000,
    "min_clicks": 50,
    "auc_threshold": 0.5,
    "decide_seconds": 5.0,
    "drift_bucket_seconds": 30.0,
    "drift_min_rows": 500,
    "drift_buckets": 2,
    "drift_grace_seconds": 5.0,
    "cooldown_seconds": 1000.0,
}


@pytest.fixture(scope="module")
def stream():
    """Yields each second and its records: four requests of 25 rows.

    After the drift, a third of the rows have the same value of C14.
    """
    simulator, random = Simulator.create(11), np.random.default_rng(3)
    drawn = simulator.draw(SECONDS * 4 * ROWS, np.random.default_rng(2))
    times = np.sort(START + SECONDS * random.random(SECONDS * 4))
    changed = np.repeat(times >= CHANGED_AT, ROWS) & (np.arange(len(drawn.label)) % 3 == 0)
    drawn.categorical[changed, criteo.CATEGORICAL.index("C14")] = 31_337
    made: list[list] = [[] for _ in range(SECONDS)]
    for i, (request, time) in enumerate(zip(requests_of(drawn, size=ROWS), times.tolist())):
        batch = replace(request, time=time, model_version=2 if time >= RELEASED_AT else 1)
        records = [batch]
        rows = np.flatnonzero(drawn.label[i * ROWS : (i + 1) * ROWS])
        if len(rows):
            records.append(
                clicks(
                    f"c-{i}",
                    [(batch.request_id, int(row), time + 20 * random.random()) for row in rows],
                )
            )
        made[int(time - START)] += records
    return made


def run_monitor(folder, stream, *, every: int) -> Ran:
    bench = Bench(folder, recommender=CRITEO_RECOMMENDER, **SETTINGS)
    write_references(
        bench.settings.store,
        reference_of(Simulator.create(11).draw(40_000, np.random.default_rng(1))),
    )
    accept_into(bench.settings.store, CRITEO_RECOMMENDER)
    ran = run_over(bench, enumerate(stream), SECONDS, every=every)
    bench.close()
    return ran


@pytest.fixture(scope="module")
def ran(tmp_path_factory, stream):
    return run_monitor(tmp_path_factory.mktemp("drifted"), stream, every=3)


def test_lines_of_monitor_equal_backtest_and_name_drifted_column(ran):
    lines = [json.loads(line) for line in ran.lines]
    drifts = [
        each for line in lines for each in line["decisions"] if each["policy"] == "data_drift"
    ]
    assert {each["action"] for each in drifts} == {"ok", "breach", "retrain", "undecidable"}
    # There is no decision until the first bucket of a new version has closed.
    assert {each["numbers"]["version"] for each in drifts if each["action"] == "undecidable"} == {2}
    fired = next(
        line["time"]
        for line in lines
        if line["policy"] == "data_drift" and line["action"] == "retrain"
    )
    # The alarm is two complete buckets after the bucket of the drift. Drift is detected before the
    # rows have matured.
    assert CHANGED_AT - WINDOW < fired < CHANGED_AT + 95.0
    assert any("C14" in each["reason"] for each in drifts)
    assert {line["version"] for line in lines} == {1, 2}
    assert backtested(ran.bench.settings, CRITEO) == ran.lines


def test_predictions_within_grace_period_count_in_their_bucket(ran, tmp_path, stream):
    late = run_monitor(tmp_path, [[], [], [], *stream], every=1)
    assert late.lines == ran.lines
    assert backtested(late.bench.settings, CRITEO) == ran.lines


@pytest.mark.parametrize(
    ("start", "end"), [(0.0, START + 1000.0), (START + 113.0, START + 288.0)], ids=["all", "part"]
)
def test_incident_carries_statistics_and_replays_without_store(ran, tmp_path, start, end):
    store = ran.bench.settings.store
    flags = {
        "state": ran.state,
        "archive": ran.archive,
        "store": store,
        "out": tmp_path / "incident",
    }
    flags |= {"start": start, "end": end}
    assert (
        main(
            [
                "record",
                *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
            ]
        )
        == 0
    )
    assert (tmp_path / "incident" / STATISTICS / "1").is_dir()
    replayed = replay(tmp_path / "incident")
    assert list(replayed.lines) == [
        line for line in ran.lines if start < json.loads(line)["time"] <= end
    ]
    assert replayed.first_difference is None
