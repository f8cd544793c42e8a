"""Tests of shadow scores from the client's record to the lake.

Readers that do not use shadow scores see no difference. Extraction makes the same rows from records
with and without shadow scores.
"""

import dataclasses
from datetime import datetime, timezone

import numpy as np
import pytest

from controller.canary.evidence import read_pairs
from evergreen.contracts import raw_rows
from evergreen.contracts.records import PredictionBatch
from evergreen.storage.uris import open_objects
from monitoring.uploader import Uploader
from tests.support.clocks import Clock
from tests.support.crashes import Kill
from tests.support.lakes import extract_by_command, rows_in
from tests.support.monitors import Bench, clicks, prediction, publish

BEGIN = 1_767_225_590.0  # ten seconds before a UTC midnight
WINDOW, ROWS, NUM_REQUESTS = 30.0, 4, 25


def _record(number: int) -> PredictionBatch:
    """Return a record.

    Every third request is answered by the canary (version 4), and three of four requests have
    shadow scores.
    """
    by_canary, has_shadow = number % 3 == 0, number % 4 != 0
    served = prediction(
        f"request {number:02}",
        ROWS,
        time=BEGIN + number,
        version=4 if by_canary else 3,
    )
    shadow = np.random.default_rng(number).random(ROWS).astype(np.float32)
    return dataclasses.replace(
        served,
        shadow_version=(3 if by_canary else 4) if has_shadow else None,
        shadow_scores=shadow if has_shadow else None,
        canary=by_canary,
    )


RECORDS = [_record(number) for number in range(NUM_REQUESTS)]
PLAIN = [
    dataclasses.replace(r, shadow_version=None, shadow_scores=None, canary=False) for r in RECORDS
]


def _archived(folder, records):
    """Run a monitor over `records` and return its folder. Row 1 of each record is clicked."""
    bench = Bench(
        folder,
        attribution_window_seconds=WINDOW,
        archive_roll_rows=16,
    )
    bench.clock.now = BEGIN
    bench.start()
    shown = clicks("clicks", [(r.request_id, 1, r.time + 1) for r in records])
    publish(bench.log, *records, shown)
    bench.turn(40, 3.0)
    bench.monitor.stop()
    bench.close()
    return bench.folder


@pytest.fixture(scope="module")
def monitor_folders(tmp_path_factory):
    """The folders of two monitors.

    Their records are equal, but only one monitor has shadow scores.
    """
    with_shadow, without = (
        tmp_path_factory.mktemp("with shadow"),
        tmp_path_factory.mktemp("without"),
    )
    return [
        _archived(folder, records) for folder, records in ((with_shadow, RECORDS), (without, PLAIN))
    ]


def _check_evidence(*folders):
    monitor_folders = [open_objects(str(folder)) for folder in folders]
    since = datetime.fromtimestamp(BEGIN + 2, timezone.utc)
    found = read_pairs(monitor_folders, stable=3, canary=4, since=since, max_pairs=1_000)
    expected = [
        (int(i == 1), *(map(float, (served, other) if r.model_version == 3 else (other, served))))
        for r in RECORDS[2:]
        if r.shadow_scores is not None
        for i, (served, other) in enumerate(zip(r.scores, r.shadow_scores))
    ]
    assert (
        list(zip(found.labels.tolist(), found.stable.tolist(), found.canary.tolist())) == expected
    )
    assert len(np.unique(found.groups)) * ROWS == len(expected)


def test_evidence_covers_every_pair_before_during_and_after_upload(monitor_folders):
    folder, _ = monitor_folders
    archive, lake = folder / "archive", folder / "lake"
    _check_evidence(archive, lake)

    with Kill("uploader.marked") as kill:
        Uploader(archive, lake, clock=Clock(BEGIN), checkpoint=kill.reach).run_once()
    assert kill.is_dead
    assert len(list(lake.glob("day=*/*.parquet"))) == 1
    _check_evidence(archive, lake)
    Uploader(archive, lake, clock=Clock(BEGIN)).run_once()
    assert not list(archive.glob("day=*/*.parquet"))
    _check_evidence(lake)


def test_extraction_gives_same_rows_with_and_without_shadow_scores(monitor_folders):
    folder, without = monitor_folders
    for each in (folder, without):
        Uploader(each / "archive", each / "lake", clock=Clock(BEGIN)).run_once()
    rows, expected = (
        rows_in(raw.train_uri, raw.holdout_uri)
        for raw in (
            extract_by_command(each, each / "lake", holdout_fraction=0.3)
            for each in (folder, without)
        )
    )
    assert rows == expected
    assert len(rows) == NUM_REQUESTS * ROWS
    assert not {raw_rows.SHADOW_VERSION, raw_rows.SHADOW_SCORE} & set(rows[0])
