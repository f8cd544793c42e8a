"""Tests that the served graph is calibrated after training on weighted rows.

In the file of the first day, only one in ten rows without a click remains, with a weight of 10. The
second day's rows come from an archive, so they have no weights.
"""

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv

from cli.ingest import main as ingest
from evergreen.config.data import WEIGHT
from evergreen.recommender_file.form import parse_recommender
from evergreen.storage.uris import local_path
from testing.recommenders import accept_into
from tests.support.lakes import table_in

pytestmark = pytest.mark.timeout(300)

FILE = """\
format: evergreen/recommender/1
name: shop
data: {weight: counts}
features: {numeric: [price], categorical: [item]}
gate: {min_auc: 0.55, max_auc_loss: 1, max_slice_loss: 9, max_calibration_factor: 1.5}
"""
ITEMS = np.random.default_rng(0).normal(-3.2, 0.8, 20)
ROWS, LATER_ROWS = 60_000, 3_000


def drawn(n, seed):
    """Draw prices, items, probabilities and clicks."""
    source = np.random.default_rng(seed)
    price, item = source.integers(0, 9, n), source.integers(0, 20, n)
    probability = 1 / (1 + np.exp(-ITEMS[item] - 0.1 * (price - 4)))
    return price, item, probability, (source.random(n) < probability).astype(np.int32)


def rows_on(day, drawn, *, prefix):
    """Return rows in the lake's form.

    Each row is its own request, and the requests are spread evenly over the day.
    """
    price, item, _, click = drawn
    seconds = np.arange(len(click)) * 80_000 // len(click) + 86_400 * day
    columns = {"label": click, "price": price.astype(np.float32), "item": item}
    columns["request_id"] = [f"{prefix}{i}" for i in range(len(click))]
    columns["row"] = np.zeros(len(click), np.int32)
    return pa.table(
        {**columns, "event_time": pa.array(seconds * 1_000_000).cast(pa.timestamp("us", tz="UTC"))}
    )


def test_sampled_rows_with_weights_give_click_rate_of_all_rows(chain_of):
    chain = chain_of(
        recommender=parse_recommender(FILE, source="shop.yaml"),
        gate={},
        training={"learning_rate": 0.01, "batch_size": 64, "seed": 7},
    )
    accept_into(chain.root / "store", chain.recommender)
    rows = drawn(ROWS, 1)
    click = rows[-1]
    sampled = (click == 1) | (np.random.default_rng(2).random(ROWS) < 0.1)
    file = (
        rows_on(20_000, rows, prefix="q")
        .append_column("counts", [10.0 - 9 * click])
        .filter(sampled)
    )
    write_csv(file, chain.root / "clicks.csv")
    store, lake = str(chain.root / "store"), chain.root / "lake"
    assert (
        ingest(["--store", store, "--data", str(chain.root / "clicks.csv"), "--lake", str(lake)])
        == 0
    )
    # Half of the rows without a click are dropped.
    chain.settings["preprocessing"] = {"negative_rate": 0.5}
    first = chain.turn("sampled")
    labels, weights = (
        each.to_numpy() for each in table_in(first.preprocessing.train_uri, "label", WEIGHT).columns
    )
    assert weights.tolist() == (10 - 9 * labels).tolist()
    unsampled = drawn(20_000, 3)
    check_click_rate(
        first,
        unsampled,
        num_clicks=int(click.sum()),
        num_others=int((sampled & (click == 0)).sum()) / 2,
    )
    # The gate also applies row weights to its log loss and its clicks.
    assert first.evaluation.decision == "pass"
    assert 0.9 < first.evaluation.candidate.calibration < 1.1
    assert first.evaluation.candidate.log_loss < 0.25
    assert first.training.progressive["log_loss"] < 0.35  # this log loss is over downsampled rows

    rows = drawn(LATER_ROWS, 4)
    (lake / "day=2024-10-05").mkdir()
    pq.write_table(rows_on(20_001, rows, prefix="r"), lake / "day=2024-10-05" / "archived.parquet")
    chain.settings["preprocessing"] = {}
    second = chain.turn("archived")
    assert second.training.parent_model_id == first.training.model_id
    rows_read = table_in(second.extraction.train_uri, "label", "request_id", WEIGHT)
    labels, requests, weights = (each.to_numpy() for each in rows_read.columns)
    is_archived = np.char.startswith(requests.astype(str), "r")
    assert 0 < is_archived.sum() < len(labels)
    assert weights.tolist() == np.where(is_archived | (labels == 1), 1, 10).tolist()
    assert table_in(second.preprocessing.train_uri)[WEIGHT].to_pylist() == weights.tolist()
    check_click_rate(second, unsampled, num_clicks=int(rows[-1].sum()), num_others=LATER_ROWS)


def check_click_rate(turn, unsampled, *, num_clicks, num_others):
    """Assert that the mean prediction is within four standard errors of the click rate.

    The model's mean is estimated from half of the rows.
    """
    price, item, probability, _ = unsampled
    session = onnxruntime.InferenceSession(str(local_path(turn.deployment.graph_uri)))
    inputs = {
        "dense": price[:, None].astype(np.float32),
        "categorical": item[:, None].astype(np.int64),
    }
    ratio = session.run(None, inputs)[0].mean() / probability.mean()
    assert abs(ratio - 1) < 4 * np.sqrt(2 / num_clicks + 2 / num_others)
