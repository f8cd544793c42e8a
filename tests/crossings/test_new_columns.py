"""A file that gets columns between two rounds: the second round goes on from the first, and learns from them."""

import random
from datetime import datetime, timedelta, timezone

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

from components.contracts.workflow import FeatureWorkflow
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
  numeric: {numeric}
  categorical: {categorical}
  lists: {lists}
"""
FIRST = {"numeric": "[price]", "categorical": "[item]", "lists": "{}"}
SECOND = {
    "numeric": "{rate: {indicator: true, transform: [standardize]}, price: {}}",
    "categorical": "[city, item]",
    "lists": "{tags: {max: 2}}",
}
MODEL = {"training": {"learning_rate": 0.02, "batch_size": 64, "seed": 7}}


def clicks(day, n):
    """Rows whose clicks depend on the item, and from the second day on on the columns that are new then."""
    source = random.Random(day)
    for i in range(n):
        time = datetime(2026, 5, day, tzinfo=timezone.utc) + timedelta(seconds=i)
        row = {"shown": f"q{day}-{i}", "ts": time.isoformat(), "price": i % 9, "item": source.randrange(20)}
        odds = 0.1 + 0.3 * (row["item"] % 2)
        if day > 1:
            row |= {"rate": source.gauss(0, 1), "city": source.randrange(4), "tags": source.randrange(3)}
            odds += 0.25 * (row["rate"] > 0) + 0.25 * (row["city"] == 1)
        yield {**row, "clicked": int(source.random() < odds)}


@pytest.fixture
def rounds(chain_of):
    """Both rounds."""
    chain = chain_of(**MODEL)
    for day, n, columns in ((1, 2000, FIRST), (2, 4000, SECOND)):
        text = FILE
        for kind, value in columns.items():
            text = text.replace(f"{{{kind}}}", value)
        chain.recommender = parse_recommender(text, source="shop.yaml")
        accept_into(chain.root / "store", chain.recommender)
        rows = list(clicks(day, n))
        pacsv.write_csv(pa.Table.from_pylist(rows), path := chain.root / f"{day}.csv")
        flags = ["--store", str(chain.root / "store"), "--data", str(path), "--lake", str(chain.root / "lake")]
        assert ingest(flags) == 0
        chain.turn(f"round-{day}")
    return chain.rounds


def test_a_round_goes_on_with_new_columns_and_each_model_is_judged_by_its_own(rounds):
    first, second = rounds
    assert second.training.parent_model_id == first.training.model_id
    before, now = (FeatureWorkflow.load(local_path(turn.preprocessing.workflow_uri)) for turn in rounds)
    assert [now.means[1], now.stds[1]] == [before.means[0], before.stds[0]]
    kept = before.vocabularies[0]
    assert now.vocabularies[1][: len(kept)].tolist() == kept.tolist()
    assert sorted(now.vocabularies[0].tolist()) == [0, 1, 2, 3]

    table = table_in(second.extraction.holdout_uri)
    inputs = {
        "dense": table["price"].to_numpy().reshape(-1, 1).astype(np.float32),
        "categorical": table["item"].to_numpy().reshape(-1, 1),
    }
    graph = onnxruntime.InferenceSession(str(local_path(first.deployment.graph_uri)))
    with np.load(local_path(second.evaluation.scores_uri)) as scores:
        np.testing.assert_array_equal(graph.run(None, inputs)[0].ravel(), scores["champion"])
    assert second.evaluation.champion.auc > 0.6
    assert second.evaluation.candidate.auc > second.evaluation.champion.auc + 0.04
