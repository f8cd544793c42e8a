"""Tests that the monitor's intake, archive and drift work with any recommender's columns."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from evergreen.config.data import ColumnNames
from evergreen.config.features import MISSING_CATEGORY, CategoricalOptions, Features, ListOptions
from evergreen.config.monitor import DriftSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.raw_rows import category_matrix, lake_types, raw_types
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import PredictionBatch, Predictions
from evergreen.rows.archived_rows import arrow_schema
from evergreen.runtime.errors import ContractError
from evergreen.statistics.metrics import user_quality
from evergreen.statistics.profile_counter import ProfileCounter
from evergreen.storage.folder import FolderObjects
from monitoring.backtest.backtest import evaluate_requests, read_requests
from monitoring.backtest.incident import record, replay
from monitoring.drift.comparison import compare
from monitoring.drift.sketch import Layout, Sketch
from monitoring.monitor import Monitor
from monitoring.state.admission import AdmittedVersions
from monitoring.state.archive import build_row_table
from monitoring.state.join import IntakeRules, read_records
from monitoring.state.rules_file import write_rules
from monitoring.web.metrics import metrics_page
from testing.recommenders import SHOP, accept_into
from tests.support.errors import raises
from tests.support.monitors import START, WINDOW, Bench, clicks, prediction, publish

BOTH = Features(numeric=("price",), categorical=("item", "shop"))
LISTS = Features(
    numeric=("price",),
    categorical=("item",),
    lists=("genres", "seen"),
    list_options={"genres": ListOptions(max=3), "seen": ListOptions(max=2, table="item")},
)
EDGES = pytest.mark.parametrize(
    "features",
    [
        Features(numeric=(), categorical=("item", "shop")),
        Features(numeric=("price", "age"), categorical=()),
    ],
    ids=["no numeric", "no categorical"],
)
"""Recommenders that lack numeric or categorical columns."""


def batch_of(features, rows=4, *, seed=0, **changes):
    random = np.random.default_rng(seed)
    values = {
        "request_id": f"r-{seed}",
        "time": START,
        "model_version": 1,
        "dense": random.integers(0, 9, (rows, len(features.numeric))).astype(np.float32),
        "categorical": random.integers(0, 5, (rows, len(features.position_names))),
        "scores": random.random(rows).astype(np.float32),
    }
    for start, stop, _ in features.positions.lists:
        beyond = np.arange(stop - start) >= random.integers(0, stop - start + 1, (rows, 1))
        values["categorical"][:, start:stop][beyond] = MISSING_CATEGORY
    return PredictionBatch(**{**values, **changes})


def reference_of(batch, features):
    """Return the reference that validation computes for `batch`. Each row is its own request."""
    counter, rows = ProfileCounter(features), []
    for at in range(len(batch.scores)):
        arrays = {
            name: getattr(batch, name)[at : at + 1] for name in ("dense", "categorical", "scores")
        }
        rows.append(replace(batch, request_id=f"r-{at}", **arrays))
    requests = Predictions.of(rows)
    for record_batch in build_row_table(
        requests, np.ones(requests.num_rows, np.uint8), features
    ).to_batches():
        counter.add(record_batch)
    return counter.reference()


@EDGES
def test_record_with_known_columns_is_accepted_and_others_are_counted(features):
    shop = Recommender(name="shop", features=features)
    form = RecordFormat(features)
    message = form.encode(batch_of(features, recommender="shop", recommender_digest=shop.digest))
    rules = IntakeRules(
        form, "shop", 86_400.0, AdmittedVersions(frozenset, lambda: START, state=None)
    )
    found = read_records([message], rules, now=START)
    assert (found.predictions.dense.shape, found.bad) == ((4, len(features.numeric)), [])
    wide = Features(numeric=(*features.numeric, "more"), categorical=features.categorical)
    for recommender, error in (
        ("shop", r"features has the fields \[\d+\], expected"),
        ("books", "of recommender 'books'"),
    ):
        other = RecordFormat(wide).encode(batch_of(wide, recommender=recommender))
        ((position, refused),) = read_records([other], rules, now=START).bad
        assert position == 0
        assert re.search(error, str(refused))


@EDGES
def test_archive_names_recommenders_columns(features):
    batch = batch_of(features)
    table = build_row_table(Predictions.of([batch]), np.ones(4, np.uint8), features)
    assert table.schema.equals(arrow_schema(raw_types(features)))
    for i, name in enumerate(features.numeric):
        assert table[name].to_pylist() == batch.dense[:, i].tolist()
    for i, name in enumerate(features.categorical):
        assert table[name].to_pylist() == batch.categorical[:, i].tolist()
    np.testing.assert_array_equal(
        category_matrix(table.to_batches()[0], features), batch.categorical
    )


def test_backtest_skips_rows_with_strings_that_person_added_to_lake(tmp_path):
    features = replace(BOTH, categorical_options={"item": CategoricalOptions(type="string")})
    batch, folder = batch_of(features), tmp_path / "day=2025-10-09"
    folder.mkdir()
    served = build_row_table(Predictions.of([batch]), np.ones(4, np.uint8), features)
    brought = {
        **dict.fromkeys(served.column_names, [None]),
        "item": ["red shoe"],
        "request_id": ["q"],
    }
    pq.write_table(served, folder / "served.parquet")
    pq.write_table(
        pa.table(brought, arrow_schema(lake_types(features))), folder / "brought.parquet"
    )
    (found,) = read_requests(FolderObjects(tmp_path), features=features)
    np.testing.assert_array_equal(found.predictions.categorical, batch.categorical)


@EDGES
def test_cells_of_every_column_hold_each_row_once_and_changed_one_drifts(features):
    trained, changed = batch_of(features, 4000), batch_of(features, 4000, seed=1)
    array = changed.categorical if features.categorical else changed.dense
    array[:, -1] = 1
    layout = Layout(reference_of(trained, features))
    assert layout.columns == features.names
    assert layout.fits(Predictions.of([trained]))
    other = batch_of(Features(numeric=("a", "b", "c"), categorical=("d",)))
    assert not layout.fits(Predictions.of([other]))
    sketch = Sketch(layout)
    for at in range(4000):  # With one row per request, no two rows share a user.
        rows = slice(at, at + 1)
        arrays = {name: getattr(changed, name)[rows] for name in ("dense", "categorical", "scores")}
        sketch.add(Predictions.of([batch_of(features, 1, request_id=f"r-{at}", **arrays)]))
    assert [sketch.cells[layout.slice_of(name)].sum() for name in layout.columns] == [4000] * len(
        layout.columns
    )
    compared = compare(sketch, DriftSettings())
    assert [column.feature for column in compared] == list(features.names)
    distances = [column.effect for column in compared]
    assert np.argmax(distances) == len(distances) - 1
    assert max(distances) > 10 * max([0.001, *distances[:-1]])


def lists_of(lengths, elements, *, seed):
    """Yield 4,000 requests of four rows with lists.

    The length of each list is drawn from `lengths`, and its elements are drawn from `elements`.
    """
    random = np.random.default_rng(seed)
    for at in range(4_000):
        batch = batch_of(LISTS, seed=seed + at, request_id=f"r-{at}")
        drawn = batch.categorical[:, 1:4]
        drawn[:] = random.choice(elements, drawn.shape)
        drawn[np.arange(3) >= random.choice(lengths, (4, 1))] = MISSING_CATEGORY
        yield batch


@cache
def layout_of(lengths, elements):
    """Return the layout of the statistics that validation counts for generated lists."""
    return Layout(counted(lists_of(lengths, elements, seed=1)))


def counted(batches):
    counter, requests = ProfileCounter(LISTS), Predictions.of([*batches])
    for record_batch in build_row_table(
        requests, np.ones(requests.num_rows, np.uint8), LISTS
    ).to_batches():
        counter.add(record_batch)
    return counter.reference()


@pytest.mark.parametrize(
    ("lengths", "elements", "drifted"),
    [
        ([0, 1, 3], [1, 2, 2], set()),
        ([0, 1, 1, 3], [1, 2, 2], {"genres/length"}),
        ([0, 1, 3], [1, 2], {"genres"}),
    ],
    ids=["nothing", "lengths", "elements"],
)
def test_lengths_and_elements_of_lists_drift_separately(lengths, elements, drifted):
    layout = layout_of((0, 1, 3), (1, 2, 2))
    sketch, cut = Sketch(layout), Sketch(layout)
    for batch in lists_of(lengths, elements, seed=90_000):
        sketch.add(Predictions.of([batch]))
    compared = {column.feature: column for column in compare(sketch, DriftSettings())}
    assert set(compared) == {"price", "genres/length", "seen/length", "item", "genres", "seen"}
    assert {name for name, column in compared.items() if column.drifted} == drifted
    held = 4_000 * 4 * np.mean(lengths)
    assert sketch.cells[layout.slice_of("genres")].sum() == pytest.approx(held, rel=0.03)
    assert compared["genres"].effect == pytest.approx(1 / 6 if "genres" in drifted else 0, abs=0.02)
    assert compared["genres"].design_effect == pytest.approx(1, abs=0.3)
    cut.merge(Sketch.restore(layout, sketch.state_dict()))
    assert compare(cut, DriftSettings()) == tuple(compared.values())


def test_identical_elements_of_request_count_as_one():
    requests = list(lists_of([3], [1, 2], seed=90_000))
    for at, batch in enumerate(requests):
        batch.categorical[:, 1:4] = 1 + at % 2
    sketch = Sketch(Layout(counted(requests)))
    for batch in requests:
        sketch.add(Predictions.of([batch]))
    (genres,) = (
        column for column in compare(sketch, DriftSettings()) if column.feature == "genres"
    )
    assert genres.design_effect == pytest.approx(12)  # four rows of three elements each
    assert not genres.drifted


def test_state_folder_with_rows_of_other_columns_is_refused_by_name(tmp_path):
    bench = Bench(tmp_path)
    bench.start()
    shop = Recommender(name="shop", features=BOTH)
    with raises(ContractError, "'genres/0'", "expected only", ["price", "item", "shop"]):
        Monitor(
            bench.settings, subscriber=bench.log, store=bench.store, trigger=None, recommender=shop
        )
    bench.close()


def test_new_column_is_archived_with_rows_of_clients_that_send_it(tmp_path):
    bench, cost = Bench(tmp_path), np.arange(8, dtype=np.float32)
    own = SHOP.features.numeric
    more = replace(SHOP, features=replace(SHOP.features, numeric=("cost", *own[::-1])))
    bench.start()
    publish(bench.log, prediction("before"))
    bench.turn(1, 0)
    bench.start(more)
    new = prediction("new")
    form = RecordFormat(more.features)
    publish(bench.log, replace(new, dense=np.column_stack([cost, new.dense[:, ::-1]])), form=form)
    publish(bench.log, prediction("old client"))
    bench.turn(2, WINDOW)
    bench.monitor.stop()
    rows = {}
    for row in bench.archived:
        rows.setdefault(row["request_id"], []).append(row)
    assert {name: [row["cost"] for row in found] for name, found in rows.items()} == {
        "before": [None] * 8,
        "new": cost.tolist(),
        "old client": [None] * 8,
    }
    for name, found in rows.items():
        sent = [row[~np.isnan(row)].tolist() for row in prediction(name).dense]
        assert [[row[i] for i in own if row[i] is not None] for row in found] == sent
    bench.close()


def test_drift_compares_columns_by_name_and_is_undefined_if_one_is_lost():
    features = BOTH
    rows = Features(numeric=("age", "price"), categorical=("shop", "item"), lists=("genres",))
    trained, sent = batch_of(features, 40), batch_of(rows, 40)
    layout = Layout(reference_of(trained, features), rows=rows)
    dense, ids = layout.columns_of(sent.dense, sent.categorical)
    assert [layout.fits(Predictions.of([sent])), layout.fits(Predictions.of([trained]))] == [
        True,
        False,
    ]
    np.testing.assert_array_equal(dense, sent.dense[:, 1:])
    np.testing.assert_array_equal(ids, sent.categorical[:, [1, 0]])
    lost = Layout(reference_of(trained, features), rows=replace(rows, numeric=("age", "cost")))
    assert not lost.fits(Predictions.of([sent]))


def test_metrics_of_two_recommenders_are_same_series_with_other_label(tmp_path):
    series = {}
    for name in ("books", "shop"):
        (tmp_path / name).mkdir()
        bench = Bench(tmp_path / name)
        monitor = bench.start(replace(SHOP, name=name))
        monitor.tick()
        families = text_string_to_metric_families(
            metrics_page(monitor._exposition.snapshot).decode()
        )
        found = [sample for family in families for sample in family.samples]
        assert {sample.labels.pop("recommender") for sample in found} == {name}
        series[name] = {(sample.name, *sample.labels.items()) for sample in found}
        bench.close()
    assert series["books"] == series["shop"]
    assert len(series["shop"]) > 30


def test_rows_of_one_user_are_clustered_after_kill_backtest_and_incident(tmp_path):
    shop, form = (
        Recommender(name="shop", features=BOTH, data=ColumnNames(user="shop")),
        RecordFormat(BOTH),
    )
    rules = {
        "policies": "threshold",
        "auc_threshold": 0.7,
        "min_clicks": 1,
        "window_rows": 60,
        "decide_seconds": 5.0,
    }
    b = Bench(tmp_path, archive_roll_rows=50, **rules)
    accept_into(b.settings.store, shop)
    b.start(shop)
    sent = [batch_of(BOTH, 4, seed=i, time=START + i) for i in range(40)]
    for i, batch in enumerate(sent):
        batch.categorical[0, 1] = MISSING_CATEGORY
        publish(b.log, batch, clicks(f"o{i}", [(f"r-{i}", i % 4, START + i + 1)]), form=form)
        b.tick(at=START + i + 1)
        if i % 15 == 7:
            b.start(shop)
    b.tick(at=b.clock.now + WINDOW + 5)
    b.monitor.stop()
    lines = (b.settings.state / "decisions.jsonl").read_text().splitlines()
    archive, decisions = FolderObjects(b.settings.archive), b.settings.decisions
    replayed = {
        user: [
            each.line() for each in evaluate_requests(read_requests(archive, user=user), decisions)
        ]
        for user in ("shop", None)
    }
    assert lines == replayed["shop"]
    assert lines != replayed[None]
    kpis = list(evaluate_requests(read_requests(archive, user="shop"), decisions))[-1].kpis
    users, labels = (
        np.array([each.categorical[1:, 1] for each in sent[-15:]]),
        np.zeros((15, 4), int),
    )
    labels[np.arange(15), np.arange(25, 40) % 4] = 1
    scores = np.array([each.scores[1:] for each in sent[-15:]])
    assert (
        kpis.gauc == user_quality(labels[:, 1:].ravel(), scores.ravel(), users=users.ravel()).gauc
    )
    write_rules(b.settings.state, decisions)
    record(tmp_path / "it", state=b.settings.state, archive=archive, store=b.settings.store)
    assert replay(tmp_path / "it").first_difference is None
    b.close()
