"""A recommender with lists, a bucketed number and vectors of different widths, from a file to the served graph: all six
steps, in two rounds."""

import csv
import hashlib
import random
from datetime import datetime, timedelta, timezone

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.extraction.ingest import main as ingest
from components.storage.uris import local_path
from pipelines.recommender_file.form import parse_recommender
from tests.support.lakes import table_in
from tests.support.recommenders import accept_into

pytestmark = pytest.mark.timeout(300)

FILE = """\
format: evergreen/recommender/1
name: shop
data: {label: clicked, request_id: shown, event_time: ts}
features:
  numeric: {price: , rate: {transform: [clip(0), quantile_buckets(8)], embed: 6}}
  categorical:
    user: {served_as: 7}
    item: {type: string, embed: 24}
  lists:
    tags: {type: string, max: 3, keep: oldest, embed: 4}
    last: {table: item, max: 4, pool: sum}
"""
PLACES = {"user": 1, "item": 1, "tags": 3, "last": 4}
MODEL = {"training": {"learning_rate": 0.02, "batch_size": 64, "seed": 7}}


def clicks(day, n, *, items):
    """Rows whose clicks depend on what their lists hold, a hot tag, the item among the last ones, and on the rate."""
    source, rows = random.Random(day), []
    for i in range(n):
        last = [f"item {source.randrange(items)}" for _ in range(source.randrange(7))]
        tags = source.sample(["hot", "red", "blue", "07", "7"], source.randrange(5))
        item = source.choice([*last[-4:], f"item {source.randrange(items)}"])
        rate = source.choice([None, source.uniform(-0.1, 1), source.randrange(3) / 4])
        odds = 0.1 + 0.5 * ("hot" in tags[:3]) + 0.3 * (not last) + 0.1 * (0.2 < (rate or 0) < 0.5)
        time = datetime(2026, 5, day, tzinfo=timezone.utc) + timedelta(seconds=i)
        row = {"clicked": int(source.random() < odds), "shown": f"q{day}-{i}", "ts": time.isoformat()}
        row |= {"price": i % 9, "rate": rate}
        rows.append({**row, "user": source.randrange(50), "item": item, "tags": tags, "last": last})
    return rows


def category(word):
    if word == "7":
        return 7
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") >> 12


def places_of(row):
    """The categories of a row, by feature, those that count."""
    words = {"item": [row["item"]], "tags": row["tags"][:3], "last": row["last"][-4:]}
    return {"user": [row["user"]], **{name: [category(word) for word in each] for name, each in words.items()}}


@pytest.fixture
def rounds(chain_of):
    """Both rounds, and all rows by request."""
    chain = chain_of(recommender=parse_recommender(FILE, source="shop.yaml"), **MODEL)
    accept_into(chain.root / "store", chain.recommender)
    rows = {}
    for day, n, items in ((1, 2000, 30), (2, 1500, 40)):
        found = clicks(day, n, items=items)
        rows |= {row["shown"]: row for row in found}
        if day == 1:
            with open(path := chain.root / "clicks.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, found[0])
                writer.writeheader()
                writer.writerows({**row, "tags": "|".join(row["tags"]), "last": "|".join(row["last"])} for row in found)
        else:
            table = pa.Table.from_pylist(found)
            stamps = pa.array([datetime.fromisoformat(row["ts"]) for row in found])
            pq.write_table(table.set_column(2, "ts", stamps), path := chain.root / "clicks.parquet")
        flags = ["--store", str(chain.root / "store"), "--data", str(path), "--lake", str(chain.root / "lake")]
        assert ingest(flags) == 0
        chain.turn(f"round-{day}")
    return chain.rounds, rows


def test_lists_are_learned_and_served_in_two_rounds(rounds):
    turns, rows = rounds
    for turn in turns:
        assert turn.validation.decision != "block"
        assert {entry["feature"] for entry in turn.validation.drift} >= (
            {"tags", "last/length"} if turn is not turns[0] else set()
        )
        held_out = [rows[request] for request in table_in(turn.extraction.holdout_uri)["request_id"].to_pylist()]
        categorical = [
            [each for name, size in PLACES.items() for each in [*found[name], *[-1] * size][:size]]
            for found in map(places_of, held_out)
        ]
        inputs = {
            "dense": np.array([[row["price"], row["rate"]] for row in held_out], np.float32),
            "categorical": np.array(categorical),
        }
        session = onnxruntime.InferenceSession(str(local_path(turn.deployment.graph_uri)))
        with np.load(local_path(turn.evaluation.scores_uri)) as scores:
            np.testing.assert_allclose(session.run(None, inputs)[0].ravel(), scores["candidate"], rtol=0, atol=1e-5)
            inputs["categorical"][:, 0] = np.arange(len(held_out)) - 1  # all are served as user 7
            np.testing.assert_allclose(session.run(None, inputs)[0].ravel(), scores["candidate"], rtol=0, atol=1e-5)
        assert turn.evaluation.candidate.auc > 0.65
        assert len(held_out) > 300
    assert turns[1].training.parent_model_id == turns[0].training.model_id
