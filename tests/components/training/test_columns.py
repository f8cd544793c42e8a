"""Training takes the columns of the recommender: a small one trains, is kept, read again and continued."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts.features import Features, NumericOptions
from components.contracts.manifests import Model, TrainingSet
from components.contracts.recommender import Recommender
from components.contracts.workflow import FIRST_ID
from components.models.configs import config_from_document
from components.models.inspection import inspect_model
from components.models.scoring import load_scorer
from components.runtime.flags import run_flags
from components.storage.uris import local_path
from components.training.__main__ import main
from tests.support.workflows import workflow_of

FEATURES = Features(
    numeric=("price", "age"),
    categorical=("item", "shop"),
    numeric_options={"age": NumericOptions(indicator=True)},
)

SETTINGS = {
    "model": {"embedding_dim": 4, "tower": [8], "num_cross_layers": 1},
    "training": {"batch_size": 64, "min_batch_size": 64, "learning_rate": 0.01, "passes": 3},
}
SHOP = Recommender(name="shop", features=FEATURES, settings=SETTINGS)


def encoded_set(folder, slot_sizes, *, features=FEATURES, seed=0, recommender=SHOP):
    """4,000 rows whose clicks follow `price`, `item` and that `age` is missing; `age` and `shop` tell nothing."""
    random = np.random.default_rng(seed)
    price, age = random.normal(size=(2, 4_000)).astype(np.float32)
    item, shop = (random.integers(FIRST_ID, size, 4_000) for size in slot_sizes)
    missing = random.integers(0, 2, 4_000).astype(np.float32)
    clicked = random.random(4_000) < 1 / (1 + np.exp(-2 * price - np.where(item % 2, 1.5, -1.5) - 2 * missing))
    values = {"price": price, "age": age, "age/missing": missing, "item": item, "shop": shop}
    types = dict.fromkeys(features.dense_inputs, pa.float32())
    (folder / "train").mkdir(parents=True)
    table = pa.table(
        {"label": pa.array(clicked.astype(np.float32))}
        | {name: pa.array(values[name], types.get(name, pa.int64())) for name in values}
    )
    pq.write_table(table, folder / "train" / "part.parquet")
    (folder / "train" / "_file_list.txt").write_text("1\npart.parquet\n")
    vocabularies = [1000 * i + np.arange(size - FIRST_ID) for i, size in enumerate(slot_sizes)]
    workflow_of(vocabularies, features).save(folder / "workflow")
    return TrainingSet(
        train_uri=(folder / "train").as_uri(),
        holdout_uri=(folder / "train").as_uri(),
        num_train_rows=4_000,
        num_holdout_rows=4_000,
        slot_sizes=slot_sizes,
        new_categories=[0, 0],
        workflow_uri=(folder / "workflow").as_uri(),
        raw_digest=f"digest of {folder.name}",
        last_event_time="2026-01-02T03:04:05+00:00",
        last_learned_time="2026-01-02T03:04:04+00:00",
        parent_model_uri=None,
        recommender=recommender,
    )


@pytest.fixture
def step(tmp_path, validation_report):
    """Runs the command; gives its exit code and the model, if any."""

    def run(training_set, name):
        training_set.write(tmp_path / "training_set.json")
        validation_report.write(tmp_path / "report.json")
        code = main(
            run_flags(
                run=name,
                store=(tmp_path / "store").as_uri(),
                work=str(tmp_path / "work"),
                training_set=tmp_path / "training_set.json",
                validation_report=tmp_path / "report.json",
                output=tmp_path / "model.json",
            )
        )
        return code, Model.read(tmp_path / "model.json") if code == 0 else None

    return run


def test_a_recommender_of_other_columns_is_trained_kept_read_and_continued(step, tmp_path):
    code, first = step(encoded_set(tmp_path / "first", [23, 13]), "r1")
    assert code == 0
    assert first.recommender == SHOP
    assert (first.config["num_dense"], first.config["num_categorical"]) == (3, 2)
    dense = np.array([[2, 0, 0], [2, 0, 0], [-2, 0, 1], [-2, 0, 0], [-2, 0, 0]], np.float32)
    ids = np.array([[5, 3], [6, 3], [5, 3], [5, 3], [6, 3]])
    scorer = load_scorer(local_path(first.uri) / Model.WEIGHTS, config_from_document(first.config), first.slot_sizes)
    likely, less, unlikely, not_missing, least = scorer.probabilities(dense, ids)
    assert likely > less > unlikely > not_missing > least
    found = inspect_model(local_path(first.uri))
    assert not found.faults
    assert [line.split()[:2] for line in found.lines if line.startswith(("item ", "shop "))] == [
        ["item", "23"],
        ["shop", "13"],
    ]
    grown = replace(encoded_set(tmp_path / "second", [25, 13], seed=1), parent_model_uri=first.uri)
    code, second = step(grown, "r2")
    assert code == 0
    assert (second.parent_model_id, second.slot_sizes) == (first.model_id, [25, 13])
    assert second.optimizer_step > first.optimizer_step


def test_a_parent_of_other_columns_of_the_same_number_is_refused(step, tmp_path, capsys):
    _, first = step(encoded_set(tmp_path / "first", [23, 13]), "r1")
    turned = replace(FEATURES, categorical=("shop", "item"))
    other = encoded_set(tmp_path / "other", [23, 13], features=turned, recommender=replace(SHOP, features=turned))
    assert step(replace(other, parent_model_uri=first.uri), "r2") == (2, None)
    assert "['price', 'age', 'shop', 'item'], expected ['price', 'age', 'item', 'shop']" in capsys.readouterr().err


def test_rows_that_lack_a_column_of_the_recommender_are_refused_with_its_name(step, tmp_path, capsys):
    training_set = encoded_set(tmp_path / "set", [23, 13])
    path = tmp_path / "set" / "train" / "part.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["shop"]), path)
    assert step(training_set, "r1") == (2, None)
    assert "has no columns ['shop']" in capsys.readouterr().err
