"""The step: a window becomes a dataset, whole or not at all."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.extraction.extract import ExtractionSettings, data_digest, extract
from components.extraction.lake import Lake
from components.extraction.source import find_source
from components.extraction.times import TimeSpan, parse_time
from components.runtime.errors import ContractError
from components.storage.uris import local_path

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
ALL = TimeSpan()


@pytest.fixture
def lake(tmp_path, raw_table, write_lake):
    return Lake(folder=write_lake(tmp_path / "la ke", raw_table(1000, start=START.timestamp(), seconds=2 * 86_400)))


@pytest.fixture
def run_step(tmp_path):
    def run(source, window: TimeSpan = ALL, **settings):
        folder = tmp_path / "wo rk" / "run" / "extraction"
        return extract(source, window, folder, ExtractionSettings(**settings), source_uri="file:///lake")

    return run


def read_uri(uri: str):
    paths = sorted(local_path(uri).iterdir())
    return [row for path in paths for row in pq.read_table(path, partitioning=None).to_pylist()]


@pytest.mark.parametrize(("fraction", "num_holdout"), [(0.1, 100), (0.25, 250), (1e-6, 1), (0.999999, 999)])
def test_the_newest_rows_are_held_out(lake, run_step, raw_table, fraction, num_holdout):
    dataset = run_step(lake, holdout_fraction=fraction)
    train, holdout = read_uri(dataset.train_uri), read_uri(dataset.holdout_uri)
    assert len(holdout) == dataset.num_holdout_rows == num_holdout
    assert len(train) == dataset.num_train_rows == 1000 - num_holdout
    times = [row[criteo.EVENT_TIME] for row in train + holdout]
    assert times == sorted(times)
    assert dataset.first_event_time == times[0].isoformat()
    assert dataset.last_event_time == times[-1].isoformat()
    expected = raw_table(1000, start=START.timestamp(), seconds=2 * 86_400).to_pylist()
    assert train + holdout == expected


def test_the_manifest_states_window_and_digest(lake, run_step):
    window = TimeSpan(parse_time("start", "2026-03-01T06:00:00Z"), parse_time("end", "2026-03-02"))
    dataset = run_step(lake, window)
    assert (dataset.window_start, dataset.window_end) == ("2026-03-01T06:00:00+00:00", "2026-03-02T00:00:00+00:00")
    assert dataset.first_event_time == "2026-03-01T06:00:00+00:00"
    assert dataset.num_train_rows + dataset.num_holdout_rows == 375
    assert dataset.digest == data_digest(local_path(dataset.train_uri).parent)
    assert (dataset.num_malformed, dataset.malformed_uri, dataset.num_duplicates) == (0, None, 0)


def test_the_same_rows_have_the_same_digest_and_others_another(lake, run_step):
    first = run_step(lake)
    assert run_step(lake).digest == first.digest
    assert run_step(lake, TimeSpan(None, parse_time("end", "2026-03-02T12:00:00"))).digest != first.digest


def test_a_retried_task_replaces_what_it_finds(lake, run_step, tmp_path):
    run = tmp_path / "wo rk" / "run"
    (run / "extraction" / "train").mkdir(parents=True)
    (run / "extraction" / "train" / "part-00009.parquet").write_bytes(b"half")
    (run / f".extraction.{'0123abcd' * 4}" / "all").mkdir(parents=True)
    assert len(read_uri(run_step(lake).train_uri)) == 900
    assert [path.name for path in run.iterdir()] == ["extraction"]


@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_window_too_small_to_split_is_refused(lake, run_step, tmp_path, num_rows):
    start = parse_time("start", "2026-03-01")
    window = TimeSpan(start, start + num_rows * 172_800_000)
    with pytest.raises(ContractError, match=rf"holds {num_rows} rows, expected at least 10"):
        run_step(lake, window)
    assert not list((tmp_path / "wo rk" / "run").iterdir())


def test_an_empty_window_names_itself_and_what_the_lake_holds(lake, run_step):
    with pytest.raises(ContractError) as caught:
        run_step(lake, TimeSpan(parse_time("start", "2027-01-01"), parse_time("end", "2027-01-02")))
    assert str(caught.value) == (
        "window [2027-01-01T00:00:00+00:00, 2027-01-02T00:00:00+00:00) holds no rows, expected at least 10; "
        f"lake {lake.folder} holds days 2026-03-01 to 2026-03-02"
    )


def test_malformed_rows_are_published_with_the_dataset(tmp_path, criteo_rows, write_text, run_step):
    rows = criteo_rows(200)
    rows[42][14] = "zz"
    path = write_text(tmp_path / "day_1.gz", rows)
    dataset = run_step(find_source(path))
    assert dataset.num_train_rows + dataset.num_holdout_rows == 199
    assert dataset.num_malformed == 1
    assert dataset.malformed_uri is not None
    (line,) = local_path(dataset.malformed_uri).read_text().splitlines()
    assert json.loads(line) == {
        "file": str(path),
        "line": 43,
        "reason": "C1 is 'zz', expected 1 to 8 hex digits or nothing",
        "text": "\t".join(rows[42]),
    }


def test_too_many_malformed_rows_leave_nothing_behind(tmp_path, criteo_rows, write_text, run_step):
    rows = criteo_rows(200)
    for row in rows[::50]:
        row[0] = "click"
    source = find_source(write_text(tmp_path / "day_1.gz", rows))
    with pytest.raises(ContractError, match=r"day_1.gz: 4 of 200 rows are malformed \(2.00%\)"):
        run_step(source)
    assert not list((tmp_path / "wo rk" / "run").iterdir())
    assert run_step(source, max_malformed_fraction=0.02).num_malformed == 4


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_holdout_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(ContractError, match=f"holdout_fraction is {fraction}, expected"):
        ExtractionSettings(holdout_fraction=fraction)
