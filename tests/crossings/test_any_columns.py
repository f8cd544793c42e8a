"""Any number of columns of any kind goes through all six steps, twice, for each network: drawn recommenders.

Deployment proves each served graph against the training side's scores and refuses it otherwise; that the scores follow
a planted click rate shows that the column was learned.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts.features import CategoricalOptions, Features, NumericOptions
from components.contracts.metrics import roc_auc
from components.contracts.recommender import Recommender
from components.contracts.serving import PROBABILITY_OUTPUT, named_inputs
from components.models.configs import NETWORKS
from components.storage.uris import local_path
from tests.support.numeric_columns import OPTIONS

pytestmark = pytest.mark.timeout(300)

ROWS = 1600
ONE_KIND = {"no categories": (3, 0), "no numbers": (0, 3), "one number": (1, 0), "one category": (0, 1)}


def drawn_features(num_numeric, num_categorical, seed=0):
    """Features of these numbers with names and options of every kind."""
    random = np.random.default_rng(seed)
    numeric = tuple(f"number {i}" for i in range(num_numeric))
    categorical = tuple(f"kind.{i}" for i in range(num_categorical))
    kinds = [NumericOptions(), *OPTIONS.values()]
    return Features(
        numeric=numeric,
        categorical=categorical,
        numeric_options={name: kinds[random.integers(len(kinds))] for name in numeric[1:]},
        categorical_options={name: CategoricalOptions(type="string") for name in categorical[::2]},
    )


def write_days(lake, features, first_day, seed):
    """Two days of rows in the lake's form; the first column decides about clicks."""
    random = np.random.default_rng(seed)
    for day in range(2):
        start = datetime(2026, 1, first_day + day, tzinfo=timezone.utc)
        count = ROWS // 2
        cause = random.integers(0, 6, count)
        columns = {"label": pa.array((random.random(count) < np.where(cause % 2, 0.7, 0.1)).astype(np.int32))}
        for place, name in enumerate(features.numeric):
            values = np.where(cause % 2, 9.0, 0.5) if place == 0 else random.normal(size=count)
            columns[name] = pa.array(values, pa.float32(), mask=random.random(count) < 0.1)
        for place, name in enumerate(features.categorical):
            values = cause if place == 0 and not features.numeric else random.integers(-3, 2**60, count) % 50 - 3
            words = [f"word {value}" for value in values] if features.type_of(name) == "string" else values.tolist()
            columns[name] = pa.array(words, mask=random.random(count) < 0.1)
        columns["request_id"] = pa.array([f"{first_day + day}-{row}" for row in range(count)])
        columns["row"] = pa.array(np.zeros(count, np.int32))
        columns["event_time"] = pa.array([start + timedelta(seconds=40 * row) for row in range(count)])
        folder = lake / f"day={start.date()}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / "part.parquet")


def turned_twice(chain, features, network):
    chain.settings = {**chain.settings, "model": {"kind": network, "embedding_dim": 4, "tower": [16, 8]}}
    for turn, first_day in (("round-1", 1), ("round-2", 3)):
        write_days(chain.root / "lake", features, first_day, seed=first_day)
        chain.turn(turn)
    return chain.rounds


def judge(rounds, features):
    first, second = rounds
    assert second.training.parent_model_id == first.training.model_id
    assert second.deployment.version == 2
    with np.load(local_path(second.evaluation.scores_uri)) as scores:
        labels = pa.concat_tables(
            [pq.read_table(path) for path in sorted(local_path(second.extraction.holdout_uri).glob("*.parquet"))]
        )["label"].to_numpy()
        # Of 1,200 rows a hundred columns of noise hide what one says.
        assert roc_auc(labels, scores["candidate"]) > (0.65 if len(features.names) < 20 else 0.4)
    session = onnxruntime.InferenceSession(str(local_path(second.deployment.graph_uri)))
    nothing = np.full((2, len(features.numeric)), np.nan, np.float32), np.full((2, len(features.categorical)), -1)
    (found,) = session.run([PROBABILITY_OUTPUT.name], named_inputs(*nothing))
    assert np.isfinite(found).all()


def marked(numbers, network):
    """Two cases stand for all; the others run by `-m slow`."""
    return pytest.param(
        numbers, network, marks=[] if network == "dcn" and numbers in ((0, 3), (5, 4)) else [pytest.mark.slow]
    )


@pytest.mark.parametrize(
    ("numbers", "network"),
    [
        marked(numbers, network)
        for network in NETWORKS
        for numbers in (*ONE_KIND.values(), (5, 4), (100, 100))
        if (numbers, network) != (ONE_KIND["one category"], "dlrm")
    ],
    ids=str,
)
def test_columns_of_any_number_and_kind_are_learned_and_served(chain_of, numbers, network):
    features = drawn_features(*numbers)
    judge(turned_twice(chain_of(Recommender(name="drawn", features=features)), features, network), features)
