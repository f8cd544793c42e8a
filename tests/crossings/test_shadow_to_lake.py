"""Shadow scores from the client's record through the monitor's store and archive to the lake, where they are evidence.

And past everything that wants no shadow scores: the rows that extraction makes of the lake are those that it makes of
the same records without them.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo, raw_rows
from components.contracts.criteo import CRITEO_RECOMMENDER
from components.contracts.manifests import RawDataset
from components.contracts.records import CLICK, OutcomeBatch, PredictionBatch, encode, record_id
from components.deployment.canary.evidence import read_pairs
from components.extraction.__main__ import main as extraction
from components.logs.locations import open_publisher, open_subscriber
from components.storage.locations import open_objects
from components.storage.uris import local_path
from monitoring.memory.store import Store
from monitoring.monitor import Monitor
from monitoring.uploader import Uploader
from tests.support.clocks import Clock
from tests.support.crashes import Killed, crash_at
from tests.support.monitors import monitor_settings
from tests.support.recommenders import accept_into, criteo_with

BEGIN = 1_767_225_590.0  # ten seconds before a UTC midnight
WINDOW, ROWS, NUM_REQUESTS = 30.0, 4, 25


def _record(number: int) -> PredictionBatch:
    """Every third request is answered by the canary, 4; of four requests three are scored by the other arm too."""
    random = np.random.default_rng(number)
    by_canary, has_shadow = number % 3 == 0, number % 4 != 0
    return PredictionBatch(
        request_id=f"request {number:02}",
        time=BEGIN + number,
        model_version=4 if by_canary else 3,
        dense=random.normal(0, 9, (ROWS, criteo.NUM_DENSE)).astype(np.float32),
        categorical=random.integers(0, 2**32, (ROWS, criteo.NUM_CATEGORICAL), dtype=np.int64),
        scores=random.random(ROWS).astype(np.float32),
        shadow_version=(3 if by_canary else 4) if has_shadow else None,
        shadow_scores=random.random(ROWS).astype(np.float32) if has_shadow else None,
        canary=by_canary,
    )


RECORDS = [_record(number) for number in range(NUM_REQUESTS)]
PLAIN = [dataclasses.replace(r, shadow_version=None, shadow_scores=None, canary=False) for r in RECORDS]


def _archived(folder, records):
    """Runs the monitor over the log of `records` and a click on row 1 of each; its settings."""
    clock, url = Clock(BEGIN), f"sqlite:///{folder}/log.db?lease_seconds=5"
    settings = monitor_settings(folder, attribution_window_seconds=WINDOW, archive_roll_rows=16)
    reading, store = open_subscriber(url, clock=clock), Store(settings.state / "monitor.db")
    monitor = Monitor(
        settings,
        subscriber=reading,
        store=store,
        trigger=None,
        recommender=CRITEO_RECOMMENDER,
        clock=clock,
    )
    clicks = OutcomeBatch(
        batch_id="clicks",
        time=BEGIN + NUM_REQUESTS,
        event=CLICK,
        request_ids=tuple(r.request_id for r in records),
        rows=np.ones(len(records), np.int32),
        times=np.array([r.time + 1 for r in records]),
    )
    open_publisher(url).publish([(record_id(r), encode(r)) for r in (*records, clicks)])
    for _ in range(40):
        monitor.tick()
        clock.now += 3
    serving = monitor.serving_version
    monitor.stop()
    store.close()
    return settings, serving


def _extracted(folder):
    flags = {
        "run": "r", "store": folder / "store", "work": folder / "work", "lake": folder / "lake",
        "output": folder / "raw.json",
    }  # fmt: skip
    accept_into(folder / "store", criteo_with(extraction={"holdout_fraction": 0.3}))
    assert extraction([f"--{name}={value}" for name, value in flags.items()]) == 0
    raw = RawDataset.read(folder / "raw.json")
    paths = [p for uri in (raw.train_uri, raw.holdout_uri) for p in sorted(local_path(uri).glob("*.parquet"))]
    return [row for path in paths for row in pq.ParquetFile(path).read().to_pylist()]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Records with shadow scores, half-way uploaded, and the same without."""
    with_shadow, without = tmp_path_factory.mktemp("with shadow"), tmp_path_factory.mktemp("without")
    serving = {}
    for folder, records in ((with_shadow, RECORDS), (without, PLAIN)):
        _, serving[folder] = _archived(folder, records)
    return with_shadow, without, serving


def _check_evidence(*folders):
    places = [open_objects(str(folder)) for folder in folders]
    since = datetime.fromtimestamp(BEGIN + 2, timezone.utc)
    found = read_pairs(places, stable=3, canary=4, since=since, most=1_000)
    expected = [
        (int(i == 1), *(map(float, (served, other) if r.model_version == 3 else (other, served))))
        for r in RECORDS[2:]
        if r.shadow_scores is not None
        for i, (served, other) in enumerate(zip(r.scores, r.shadow_scores))
    ]
    assert list(zip(found.labels.tolist(), found.stable.tolist(), found.canary.tolist())) == expected
    assert len(np.unique(found.requests)) * ROWS == len(expected)


def test_evidence_reads_every_pair_before_during_and_after_the_upload(places):
    folder, _, _ = places
    archive, lake = folder / "archive", folder / "lake"
    _check_evidence(archive, lake)

    with pytest.raises(Killed):
        Uploader(archive, lake, clock=Clock(BEGIN), checkpoint=crash_at("uploader.marked")).run_once()
    assert len(list(lake.glob("day=*/*.parquet"))) == 1
    _check_evidence(archive, lake)
    Uploader(archive, lake, clock=Clock(BEGIN)).run_once()
    assert not list(archive.glob("day=*/*.parquet"))
    _check_evidence(lake)


def test_extraction_makes_the_same_rows_of_a_lake_with_shadow_scores(places):
    folder, without, _ = places
    for place in (folder, without):
        Uploader(place / "archive", place / "lake", clock=Clock(BEGIN)).run_once()
    rows = _extracted(folder)
    assert rows == _extracted(without)
    assert len(rows) == NUM_REQUESTS * ROWS
    assert not {raw_rows.SHADOW_VERSION, raw_rows.SHADOW_SCORE} & set(rows[0])


def test_files_without_a_shadow_score_are_what_they_were_before_there_were_any(places):
    _, without, _ = places
    files = [*without.glob("*/day=*/*.parquet")]
    assert files
    assert all(pq.read_schema(path).names == list(criteo.RAW_TYPES) for path in files)


def test_the_canary_is_not_taken_for_the_version_that_serves(places):
    folder, without, serving = places
    assert RECORDS[-1].model_version == 4
    assert serving[without] == 4, "as the newest prediction alone would have it"
    assert serving[folder] == 3
