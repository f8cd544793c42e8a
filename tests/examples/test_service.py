"""Tests of the example service with a test double of a server, and of the simulated shop's log."""

import dataclasses
import zlib

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

from evergreen.config.data import ColumnNames
from evergreen.contracts.criteo import CATEGORICAL, CRITEO, CRITEO_RECOMMENDER
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import CLICK, OutcomeBatch, PredictionBatch
from evergreen.events.sqlite import SqliteLog
from evergreen.recommender_file.form import read_recommender
from examples.service.app import from_environment
from examples.shop.simulator import write_clicks
from testing.paths import REPOSITORY
from testing.recommenders import accept_into
from tests.support.triton_double import GrpcTriton, ScoringDouble, known_scores


@pytest.fixture
def server():
    running = GrpcTriton(ScoringDouble(CRITEO))
    running.scoring.version = 6
    yield running
    running.close()


@pytest.fixture
def items():
    """Categories of a small catalogue, without the user's column."""
    random = np.random.default_rng(1)
    return {name: random.integers(0, 2**32, 40) for name in CATEGORICAL if name != "C1"}


@pytest.fixture
def service(server, items, tmp_path, monkeypatch):
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    monkeypatch.setenv("EVERGREEN_SERVER", server.url)
    accept_into(tmp_path, dataclasses.replace(CRITEO_RECOMMENDER, data=ColumnNames(user="C1")))
    monkeypatch.setenv("EVERGREEN_RECOMMENDER", str(tmp_path))
    monkeypatch.setenv("EVERGREEN_LOG", f"sqlite:///{tmp_path}/log.db")
    monkeypatch.setenv("EVERGREEN_ITEMS", str(tmp_path / "items.parquet"))
    return from_environment()


def test_click_in_log_refers_to_shown_item(service, items, tmp_path):
    with TestClient(service) as web:
        page = web.get("/recommend", params={"user": "ada", "k": 3}).json()
        assert (
            web.post("/click", json={"request_id": page["request_id"], "position": 2}).status_code
            == 202
        )
        assert web.get("/health").json()["problem"] is None
        assert (
            'evergreen_client_log_available{recommender="click_model"} 1'
            in web.get("/metrics").text
        )
    categorical = np.stack([np.full(40, zlib.crc32(b"ada")), *items.values()], axis=1)
    expected = known_scores(np.full((40, 13), np.nan), categorical)
    best = np.argsort(-expected, kind="stable")[:3]
    assert [(item["position"], item["item"]) for item in page["items"]] == list(
        enumerate(best.tolist(), start=1)
    )
    assert page["model_version"] == 6
    log = SqliteLog(tmp_path / "log.db")
    shown, clicked = (RecordFormat(CRITEO).decode(delivery.payload) for delivery in log.pull(10))
    log.close()
    assert isinstance(shown, PredictionBatch)
    assert isinstance(clicked, OutcomeBatch)
    assert (clicked.request_ids, clicked.event) == ((shown.request_id,), CLICK)
    np.testing.assert_array_equal(shown.scores, expected[best])
    np.testing.assert_array_equal(shown.categorical[clicked.rows[0]], categorical[best[1]])


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (None, 422),
        ((grpc.StatusCode.INTERNAL, "broken"), 503),
        ((grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'click_model' is not found"), 502),
    ],
    ids=["input", "later", "never"],
)
def test_failures_have_http_status_of_their_kind(service, server, failure, code):
    server.scoring.always = failure
    with TestClient(service) as web:
        answer = web.get("/recommend", params={"user": "ada", "k": 3 if failure else 0})
        assert (answer.status_code, bool(answer.json()["detail"])) == (code, True)
        assert web.post("/click", json={"request_id": "", "position": 1}).status_code == 422


def test_shop_log_matches_its_recommender(tmp_path):
    found = [
        write_clicks(tmp_path / name, rows=8000, seed=1)
        for name in ("one.parquet", "other.parquet")
    ]
    assert found[0] == found[1]
    assert 0.75 < found[0]["best_auc"] < 0.9
    assert 0.15 < found[0]["clicks"] / found[0]["rows"] < 0.25
    table, other = (pq.read_table(tmp_path / name) for name in ("one.parquet", "other.parquet"))
    assert table.equals(other)
    shop = read_recommender(REPOSITORY / "examples/shop/recommender.yaml")
    assert {*shop.features.names, shop.data.label, shop.data.event_time} <= set(table.column_names)
    assert 0.03 < table["price"].null_count / table.num_rows < 0.07
