"""Tests that rows do not change from the client through log, monitor and lake to extraction."""

import asyncio

import numpy as np
import pytest

from demo.plan import DemoSettings, Services, plan_for_simulator
from demo.runner import LocalFolders
from evergreen.config.features import MAX_CATEGORY, MISSING_CATEGORY
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from evergreen.contracts.records import CONVERSION, PredictionBatch
from evergreen.storage.uris import local_path
from inference_client.publisher import Outcome, RecordPublisher
from inference_client.timing import Timing
from monitoring.uploader import Uploader
from tests.support.lakes import extract_by_command, rows_in
from tests.support.log_benches import open_log
from tests.support.monitors import Bench
from tests.support.monitors import clicks as clicked

BEGIN = 1_767_225_590.123456  # ten seconds before a UTC midnight, so that the rows are in two day partitions  # noqa: E501
WINDOW = 30.0
ROWS = 8
EXTREME_VALUES = (0.1, 1e-45, 3.4e38, -0.0, 16_777_217.0, -3.0)


def _prediction(number: int) -> PredictionBatch:
    random = np.random.default_rng(number)
    dense = random.normal(0, 1e4, (ROWS, criteo.NUM_DENSE)).astype(np.float32)
    dense[0, : len(EXTREME_VALUES)] = EXTREME_VALUES
    dense[random.random(dense.shape) < 0.2] = np.nan
    categorical = random.integers(0, 2**32, (ROWS, criteo.NUM_CATEGORICAL), dtype=np.int64)
    categorical[1, :3] = (0, MAX_CATEGORY, MISSING_CATEGORY)
    categorical[random.random(categorical.shape) < 0.2] = MISSING_CATEGORY
    return PredictionBatch(
        request_id=f"request {number}",
        time=BEGIN + number,
        model_version=1 + number % 2,
        dense=dense,
        categorical=categorical,
        scores=random.random(ROWS).astype(np.float32),
    )


@pytest.fixture(scope="module")
def predictions():
    return [_prediction(number) for number in range(20)]


@pytest.fixture(scope="module")
def extracted(tmp_path_factory, predictions):
    """RawDataset that extraction makes from the archived records of the client."""
    folder = tmp_path_factory.mktemp("log to lake")
    bench = Bench(
        folder,
        recommender=CRITEO_RECOMMENDER,
        attribution_window_seconds=WINDOW,
        archive_roll_rows=50,
    )
    bench.clock.now = BEGIN
    bench.start()
    publisher = RecordPublisher(
        bench.log, features=CRITEO, source="test", timing=Timing(clock=bench.clock)
    )
    for prediction in predictions:
        publisher.add(
            prediction,
            [Outcome(request_id=prediction.request_id, row=2, time=prediction.time + 5.0)],
        )
    for _ in range(50):
        asyncio.run(publisher.flush())
        bench.turn(1, 3.0)
    # Neither redelivered messages nor events that label no row have an effect.
    bench.tick(
        predictions[3], clicked("conversions", [("request 5", 6, bench.clock.now)], CONVERSION)
    )
    bench.monitor.stop()
    Uploader(bench.settings.archive, folder / "lake", clock=bench.clock).run_once()
    bench.close()
    return extract_by_command(
        folder, folder / "lake", holdout_fraction=0.3, recommender=CRITEO_RECOMMENDER
    )


@pytest.fixture(scope="module")
def rows(extracted):
    """The extracted rows by request identifier and row, read by pyarrow alone."""
    read = rows_in(extracted.train_uri, extracted.holdout_uri)
    found = {(row[raw_rows.REQUEST_ID], row[raw_rows.ROW]): row for row in read}
    assert len(found) == len(read)
    return found


def test_every_row_arrives_once_in_its_day_with_its_click(extracted, rows, predictions):
    clicked = {(p.request_id, 2) for p in predictions}
    assert {identity for identity, row in rows.items() if row[raw_rows.LABEL] == 1} == clicked
    assert set(rows) == {(p.request_id, row) for p in predictions for row in range(ROWS)}
    assert (extracted.num_malformed, extracted.num_duplicates) == (0, 0)
    days = {path.name for path in (local_path(extracted.source_uri)).glob("day=*")}
    assert days == {"day=2025-12-31", "day=2026-01-01"}


def test_logged_values_scores_versions_and_times_equal_those_of_prediction(rows, predictions):
    for prediction in predictions:
        for row in range(ROWS):
            read, sent = rows[prediction.request_id, row], prediction.dense[row]
            numbers = [read[name] for name in criteo.DENSE]
            assert [value is None for value in numbers] == np.isnan(sent).tolist()
            present = np.array([value for value in numbers if value is not None], np.float32)
            assert present.tobytes() == sent[~np.isnan(sent)].tobytes()
            categories = [
                MISSING_CATEGORY if read[name] is None else read[name]
                for name in criteo.CATEGORICAL
            ]
            assert categories == prediction.categorical[row].tolist()
            assert np.float32(read[raw_rows.SCORE]) == prediction.scores[row]
            assert read[raw_rows.MODEL_VERSION] == prediction.model_version
            assert round(read[raw_rows.EVENT_TIME].timestamp() * 1e6) == round(
                prediction.time * 1e6
            )


@pytest.mark.parametrize("name", ["a demo", "100%25 true", "what? #1"])
def test_demo_log_is_one_file_to_client_and_monitor_for_any_folder_name(tmp_path, name):
    settings = DemoSettings(folder=tmp_path / name)
    settings.folder.mkdir()
    folders = LocalFolders(root=settings.folder)
    url = Services(
        settings=settings,
        plan=plan_for_simulator(settings),
        folders=folders,
        triton_url="",
        metrics_url="",
    ).log_url
    for log in (open_log(url), open_log(url)):
        log.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (settings.folder / "click_log.sqlite").exists()
