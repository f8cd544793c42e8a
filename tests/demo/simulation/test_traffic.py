"""Tests of row sources: a simulator, and a file whose columns are permuted on command."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo.simulation.simulator import Drift, Simulator
from demo.simulation.traffic import FileTraffic, SimulatedTraffic
from evergreen.contracts import criteo
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises, raises_text


@pytest.fixture
def data(tmp_path, criteo_table):
    table = criteo_table(300)
    pq.write_table(table, tmp_path / "data.parquet")
    return tmp_path / "data.parquet", table


def take_all(traffic, rows):
    requests = []
    while (request := traffic.take(rows)) is not None:
        requests.append(request)
    return requests


def test_simulated_traffic_is_simulators_and_switches_at_once():
    simulator = Simulator.create(3)
    drifted = simulator.drifted(Drift(seed=4))
    traffic = SimulatedTraffic(simulator, drifted, np.random.default_rng(0))
    old = simulator.tables.categories[1].keys
    assert np.isin(traffic.take(64).features.categorical[:, 1], old).all()
    traffic.drift()
    after = np.concatenate([traffic.take(64).features.categorical[:, 1] for _ in range(20)])
    assert not np.isin(after, old).all()
    assert traffic.drift_note["columns"] == ["C2", "C14", "C17", "C23"]


def test_traffic_without_drifted_simulator_refuses_to_drift():
    traffic = SimulatedTraffic(Simulator.create(3), None, np.random.default_rng(0))
    with raises(ContractError, "--drifted-simulator", "absent"):
        traffic.drift()


def test_file_is_replayed_once_in_order(data):
    path, table = data
    requests = take_all(FileTraffic(path, CRITEO_RECOMMENDER), 64)
    assert [len(r.label) for r in requests] == [64, 64, 64, 64, 44]
    np.testing.assert_array_equal(
        np.concatenate([r.label for r in requests]), table["label"].to_numpy()
    )
    i2 = table["I2"].to_numpy(zero_copy_only=False)
    np.testing.assert_array_equal(np.concatenate([r.features.dense[:, 1] for r in requests]), i2)
    c2 = table["C2"].fill_null(-1).to_numpy()
    np.testing.assert_array_equal(
        np.concatenate([r.features.categorical[:, 1] for r in requests]), c2
    )
    assert all(r.probability is None for r in requests)


def test_drift_permutes_values_of_stated_columns_and_nothing_else(data):
    path, _ = data
    plain = take_all(FileTraffic(path, CRITEO_RECOMMENDER), 300)[0]
    traffic = FileTraffic(path, CRITEO_RECOMMENDER, drift_columns=("C2", "C20"), seed=5)
    traffic.drift()
    drifted = take_all(traffic, 300)[0]
    np.testing.assert_array_equal(plain.label, drifted.label)
    for i, name in enumerate(criteo.CATEGORICAL):
        before, after = plain.features.categorical[:, i], drifted.features.categorical[:, i]
        assert np.array_equal(before, after) == (name not in ("C2", "C20")), name
        np.testing.assert_array_equal(before == -1, after == -1)
        assert len(set(zip(before.tolist(), after.tolist()))) == len(set(before.tolist())), (
            "each value must map to one other value"
        )
        assert set(before.tolist()) == set(after.tolist())
    assert traffic.drift_note["seed"] == 5
    assert traffic.drift_note["columns"] == ["C2", "C20"]


def test_drift_mirrors_numeric_column_and_keeps_its_distribution(data):
    path, _ = data
    plain = take_all(FileTraffic(path, CRITEO_RECOMMENDER), 300)[0].features.dense
    traffic = FileTraffic(path, CRITEO_RECOMMENDER, drift_columns=("I2",))
    traffic.drift()
    drifted = take_all(traffic, 300)[0].features.dense
    np.testing.assert_array_equal(np.delete(plain, 1, axis=1), np.delete(drifted, 1, axis=1))
    np.testing.assert_array_equal(np.isnan(plain[:, 1]), np.isnan(drifted[:, 1]))
    before, after = (column[~np.isnan(column)] for column in (plain[:, 1], drifted[:, 1]))
    order = np.argsort(before, kind="stable")
    assert (np.diff(after[order]) <= 0).all(), "the mirrored values must have the reverse order"
    assert abs(np.median(after) - np.median(before)) <= np.median(before)
    low, high = before <= np.quantile(before, 0.1), before >= np.quantile(before, 0.9)
    assert after[low].min() >= np.quantile(before, 0.7)
    assert after[high].max() <= np.quantile(before, 0.3)


def test_drift_of_no_columns_or_of_none_that_is_feature_is_refused(data):
    with raises_text(ContractError, "no-drift-columns"):
        FileTraffic(data[0], CRITEO_RECOMMENDER).drift()
    with raises(ContractError, "'C222'", "expected C22"):
        FileTraffic(data[0], CRITEO_RECOMMENDER, drift_columns=("C222",))


@pytest.mark.parametrize("most", [64, 3])
def test_rows_of_one_request_id_are_one_request_and_no_others_are(tmp_path, criteo_table, most):
    """Groups of rows with equal ids have 1 to 9 rows.

    Some groups cross a boundary between two batches of the file.
    """
    table, lengths = criteo_table(9000), [1 + i % 9 for i in range(1800)]
    ids = [f"q{at}" for at, length in enumerate(lengths) for _ in range(length)]
    at = table.column_names.index("request_id")
    table = table.set_column(at, "request_id", pa.array(ids[:9000]))
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=1000)
    requests = take_all(
        FileTraffic(tmp_path / "data.parquet", CRITEO_RECOMMENDER, keeps_requests=True), most
    )
    expected = [
        part for length in lengths for part in [most] * (length // most) + [length % most] if part
    ]
    assert [len(request.label) for request in requests] == expected
    np.testing.assert_array_equal(
        np.concatenate([r.label for r in requests]), table["label"].to_numpy()
    )
    i2 = table["I2"].to_numpy(zero_copy_only=False)
    np.testing.assert_array_equal(np.concatenate([r.features.dense[:, 1] for r in requests]), i2)
