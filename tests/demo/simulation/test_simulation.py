"""Tests of the click simulator: shape, click probabilities, drift and files."""

import json
import subprocess
import sys
from datetime import date

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from demo.simulation.simulator import Drift, Simulator, write_lake
from demo.simulation.tables import CATEGORY_COLUMNS, DENSE_COLUMNS
from evergreen.config.features import MAX_CATEGORY, MISSING_CATEGORY
from evergreen.contracts import criteo, raw_rows
from evergreen.rows.archived_rows import arrow_schema
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import open_objects
from tests.support.errors import raises

ROWS = 100_000


@pytest.fixture(scope="module")
def simulator():
    return Simulator.create(7)


@pytest.fixture(scope="module")
def drifted(simulator):
    return simulator.drifted(Drift(seed=8))


@pytest.fixture(scope="module")
def rows(simulator):
    return simulator.draw(ROWS, np.random.default_rng(1))


@pytest.fixture(scope="module")
def drifted_rows(drifted):
    return drifted.draw(ROWS, np.random.default_rng(2))


def within(observed: float, share: float, n: int, sigmas: float = 5.0) -> bool:
    """Return whether a share of n rows is within the binomial error of the expected share."""
    return abs(observed - share) <= sigmas * np.sqrt(share * (1 - share) / n) + 1e-12


def test_rows_have_shapes_of_contract(rows):
    assert (rows.dense.dtype, rows.dense.shape) == (np.float32, (ROWS, 13))
    assert (rows.categorical.dtype, rows.categorical.shape) == (np.int64, (ROWS, 26))
    assert rows.categorical.min() == MISSING_CATEGORY
    assert rows.categorical.max() <= MAX_CATEGORY
    assert set(np.unique(rows.label)) == {0, 1}


@pytest.mark.parametrize("name", criteo.DENSE)
def test_integers_have_stated_missing_share_and_quantiles(rows, name):
    column, values = DENSE_COLUMNS[name], rows.dense[:, criteo.DENSE.index(name)]
    assert within(np.isnan(values).mean(), column.missing, ROWS)
    present = values[~np.isnan(values)]
    np.testing.assert_array_equal(present, np.floor(present))
    assert present.min() == column.minimum
    assert present.max() <= column.maximum
    assert (
        within((present > column.median).mean(), 0.5, len(present))
        or abs(np.median(present) - column.median) <= 1
    )
    assert within((present > column.p99).mean(), 0.01, len(present), sigmas=8)


@pytest.mark.parametrize("name", criteo.CATEGORICAL)
def test_categories_have_stated_missing_share_and_head(rows, name):
    column, keys = CATEGORY_COLUMNS[name], rows.categorical[:, criteo.CATEGORICAL.index(name)]
    assert within((keys == -1).mean(), column.missing, ROWS)
    present = keys[keys != -1]
    counts = np.unique(present, return_counts=True)[1]
    assert within(counts.max() / len(present), column.top_share, len(present)), (
        "several categories have nearly the largest share"
    )
    assert len(counts) <= column.cardinality


def test_long_tails_occur_mostly_once_and_small_columns_never(rows):
    head = rows.categorical[:6400]
    for name, distinct_low, once_low in (("C3", 3600, 0.7), ("C16", 3000, 0.7), ("C9", 2, 0.0)):
        counts = np.unique(head[:, criteo.CATEGORICAL.index(name)], return_counts=True)[1]
        assert len(counts) >= distinct_low
        assert (counts == 1).mean() >= once_low


@pytest.mark.parametrize("click_rate", [0.25, 0.032])
def test_click_rate_and_best_auc_are_as_asked(click_rate):
    rows = Simulator.create(11, click_rate=click_rate, bayes_auc=0.8).draw(
        ROWS, np.random.default_rng(3)
    )
    assert within(rows.label.mean(), click_rate, ROWS, sigmas=6)
    assert roc_auc_score(rows.label, rows.probability) == pytest.approx(0.80, abs=0.012)


def test_labels_follow_stated_probability(rows):
    """Each decile of the rows by probability has the expected number of clicks."""
    for part in np.array_split(np.argsort(rows.probability), 10):
        assert within(rows.label[part].mean(), rows.probability[part].mean(), len(part))


def test_after_drift_best_auc_and_click_rate_stay(rows, drifted_rows):
    assert roc_auc_score(drifted_rows.label, drifted_rows.probability) == pytest.approx(
        roc_auc_score(rows.label, rows.probability), abs=0.02
    )
    assert drifted_rows.label.mean() == pytest.approx(rows.label.mean(), abs=0.01)


def test_new_categories_take_stated_share_of_stated_columns(simulator, rows, drifted_rows):
    drift = Drift(seed=8)
    for i, name in enumerate(criteo.CATEGORICAL):
        known = simulator.tables.categories[i].keys
        new = ~np.isin(drifted_rows.categorical[:, i], known)
        expected = drift.new_category_share if name in drift.new_category_columns else 0.0
        assert within(new.mean(), expected, ROWS), name
        if expected:
            assert len(np.unique(drifted_rows.categorical[new, i])) == drift.new_categories


def test_simulator_travels_as_json(simulator, drifted, tmp_path):
    path = tmp_path / "a folder" / "simulator.json"
    twice = drifted.drifted(Drift(seed=9, columns=("C1",)))
    twice.save(path)
    assert Simulator.load(path) == twice
    assert path.stat().st_size < 2_000


def test_same_parameters_give_same_rows_in_another_process(drifted, tmp_path):
    drifted.save(tmp_path / "simulator.json")
    code = (
        "import sys, numpy as np, hashlib; from pathlib import Path\n"
        "from demo.simulation.simulator import Simulator\n"
        "rows = Simulator.load(Path(sys.argv[1])).draw(500, np.random.default_rng(4))\n"
        "print(hashlib.sha256(b''.join(a.tobytes() for a in rows)).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "simulator.json")],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": ".", "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.pop("bias"), "bias is missing, expected a value"),
        (lambda d: d.update(colour=1), "colour"),
        (lambda d: d["drifts"][0].update(columns=["C27"]), "C27"),
    ],
    ids=["missing", "unknown", "column"],
)
def test_corrupt_simulator_is_refused(drifted, tmp_path, change, text):
    path = tmp_path / "simulator.json"
    drifted.save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ContractError, match=text):
        Simulator.load(path)


@pytest.mark.parametrize("settings", [{"click_rate": 1.0}, {"bayes_auc": 0.5}])
def test_impossible_simulators_are_refused(settings):
    with pytest.raises(ContractError, match=str(next(iter(settings.values())))):
        Simulator.create(1, **settings)


def test_lake_contains_raw_schema_day_by_day(simulator, tmp_path):
    report = write_lake(
        simulator, str(tmp_path / "lake"), rows=3001, days=3, last_day=date(2026, 3, 1), seed=7
    )
    assert report.days == ["2026-02-27", "2026-02-28", "2026-03-01"]
    keys, clicks = set(), 0
    for day in report.days:
        (path,) = (tmp_path / "lake" / f"day={day}").iterdir()
        table = pq.ParquetFile(path).read()
        assert table.schema.equals(arrow_schema(criteo.RAW_TYPES))
        assert {str(t.as_py().date()) for t in table[raw_rows.EVENT_TIME]} == {day}
        assert table[raw_rows.EVENT_TIME].to_pylist() == sorted(
            table[raw_rows.EVENT_TIME].to_pylist()
        )
        assert table[raw_rows.MODEL_VERSION].null_count == len(table)
        keys |= set(zip(table[raw_rows.REQUEST_ID].to_pylist(), table[raw_rows.ROW].to_pylist()))
        clicks += sum(table[raw_rows.LABEL].to_pylist())
        assert 0.4 < table["I1"].null_count / len(table) < 0.5
    assert len(keys) == report.rows == 3001
    assert clicks == report.clicks


def test_lake_in_bucket_equals_lake_in_folder_and_no_day_is_overwritten(
    simulator, tmp_path, cloud_storage
):
    arguments = {"rows": 900, "days": 3, "last_day": date(2026, 1, 4), "seed": 7}
    expected = write_lake(simulator, str(tmp_path / "lake"), **arguments)
    assert write_lake(simulator, "gs://models/lake", **arguments) == expected
    objects = open_objects("gs://models/lake")
    stored = {each.name: objects.read(each.name).content for each in objects.list()}
    written = {
        path.relative_to(tmp_path / "lake").as_posix(): path
        for path in (tmp_path / "lake").rglob("*.parquet")
    }
    assert stored == {name: path.read_bytes() for name, path in written.items()}
    assert len(stored) == 3
    with raises(ContractError, "gs://models/lake", "2026-01-02", "already"):
        write_lake(simulator, "gs://models/lake", **arguments)
