"""Tests that a recommender file can add columns between two runs.

The second run continues the first model, and trains on the new columns.

The new columns have every kind of options, for example buckets, an indicator and a shared table. On
rows with new columns, the released graph must give the same scores as evaluation.
"""

import random
from datetime import datetime, timedelta, timezone

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

from cli.ingest import main as ingest
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.recommender_file.form import parse_recommender
from evergreen.storage.uris import local_path
from testing.recommenders import accept_into
from tests.support.lakes import table_in

pytestmark = pytest.mark.timeout(300)

FILE = """\
format: evergreen/recommender/1
name: shop
data: {label: clicked, request_id: shown, event_time: ts}
features:
  numeric: {numeric}
  categorical: {categorical}
  lists: {lists}
"""
FIRST = {"numeric": "[price]", "categorical": "[item]", "lists": "{}"}
SECOND = {
    "numeric": "{rate: {indicator: true, transform: [standardize]}, price: {},"
    " age: {transform: [clip(0), quantile_buckets(8)], embed: 6}}",
    "categorical": "{city: {}, item: {}, place: {served_as: 7, embed: 4}}",
    "lists": "{tags: {max: 2, keep: oldest, embed: 4}, last: {table: item, max: 3, pool: sum}}",
}
MODEL = {"training": {"learning_rate": 0.02, "batch_size": 64, "seed": 7}}


def clicks(day, n):
    """Return rows whose clicks depend on the item, and from day two also on new columns."""
    source = random.Random(day)
    for i in range(n):
        time = datetime(2026, 5, day, tzinfo=timezone.utc) + timedelta(seconds=i)
        row = {
            "shown": f"q{day}-{i}",
            "ts": time.isoformat(),
            "price": i % 9,
            "item": source.randrange(20),
        }
        odds = 0.1 + 0.3 * (row["item"] % 2)
        if day > 1:
            row |= {
                "rate": source.gauss(0, 1),
                "city": source.randrange(4),
                "place": source.randrange(6, 9),
            }
            row |= {
                "age": source.uniform(-1, 90),
                "tags": words(source, 4, 5),
                "last": words(source, 20, 6),
            }
            odds += 0.25 * (row["rate"] > 0) + 0.25 * (row["city"] == 1)
        yield {**row, "clicked": int(source.random() < odds)}


def words(source, num_categories, most):
    """Return a list as text with at most `most` categories."""
    return "|".join(str(source.randrange(num_categories)) for _ in range(source.randrange(most)))


@pytest.fixture
def rounds(chain_of):
    """Two runs with different columns, and the rows of the second run by request."""
    chain = chain_of(**MODEL)
    for day, n, columns in ((1, 2000, FIRST), (2, 4000, SECOND)):
        text = FILE
        for kind, value in columns.items():
            text = text.replace(f"{{{kind}}}", value)
        chain.recommender = parse_recommender(text, source="shop.yaml")
        accept_into(chain.root / "store", chain.recommender)
        rows = list(clicks(day, n))
        pacsv.write_csv(pa.Table.from_pylist(rows), path := chain.root / f"{day}.csv")
        flags = [
            "--store",
            str(chain.root / "store"),
            "--data",
            str(path),
            "--lake",
            str(chain.root / "lake"),
        ]
        assert ingest(flags) == 0
        chain.turn(f"round-{day}")
    return chain.rounds, {row["shown"]: row for row in rows}


def positions_of(row):
    """Return the categories of a row in the form in which they are served.

    The category of column `place` is 7 in all rows.
    """
    tags, last = ([int(word) for word in row[name].split("|") if word] for name in ("tags", "last"))
    found = [row["city"], row["item"], row["place"]]
    return [*found, *[*tags[:2], -1, -1][:2], *[*last[-3:], -1, -1, -1][:3]]


def test_run_adds_columns_and_each_model_is_evaluated_on_its_own_columns(rounds):
    (first, second), rows = rounds
    assert second.training.parent_model_id == first.training.model_id
    before, now = (
        FeatureWorkflow.load(local_path(turn.preprocessing.workflow_uri))
        for turn in (first, second)
    )
    assert [now.means[1], now.stds[1]] == [before.means[0], before.stds[0]]
    shared = before.vocabularies[0]
    assert now.vocabularies[1][: len(shared)].tolist() == shared.tolist()
    assert sorted(now.vocabularies[0].tolist()) == [0, 1, 2, 3]

    table = table_in(second.extraction.holdout_uri)
    inputs = {
        "dense": table["price"].to_numpy().reshape(-1, 1).astype(np.float32),
        "categorical": table["item"].to_numpy().reshape(-1, 1),
    }
    graph = onnxruntime.InferenceSession(str(local_path(first.deployment.graph_uri)))
    with np.load(local_path(second.evaluation.scores_uri)) as scores:
        np.testing.assert_array_equal(graph.run(None, inputs)[0].ravel(), scores["champion"])
        held_out = [rows[request] for request in table["request_id"].to_pylist() if request in rows]
        assert len(held_out) > 300
        served = {
            "dense": np.array(
                [[row["rate"], row["price"], row["age"]] for row in held_out], np.float32
            ),
            "categorical": np.array([positions_of(row) for row in held_out]),
        }
        is_new = np.array([request in rows for request in table["request_id"].to_pylist()])
        graph = onnxruntime.InferenceSession(str(local_path(second.deployment.graph_uri)))
        for place in (served["categorical"][:, 2], np.arange(len(held_out)) - 1):
            served["categorical"][:, 2] = place
            found = graph.run(None, served)[0].ravel()
            np.testing.assert_allclose(found, scores["candidate"][is_new], rtol=0, atol=1e-5)
    assert second.evaluation.champion.auc > 0.6
    assert second.evaluation.candidate.auc > second.evaluation.champion.auc + 0.04
