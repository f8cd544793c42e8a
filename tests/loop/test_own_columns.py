"""A click log that is not Criteo's, from CSV to a published model: one file describes it, without a line of code."""

import csv
import random
from datetime import datetime, timedelta

import pytest

from components.contracts.manifests import Model


@pytest.fixture
def clicks(tmp_path):
    """6,000 rows of a shop; an item whose number is a multiple of 3 is clicked four times as often as another."""
    draw = random.Random(1)
    with open(tmp_path / "clicks.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ts", "impression", "clicked", "price", "age", "item", "shop"])
        for at in range(6000):
            item = draw.randrange(50)
            clicked = int(draw.random() < (0.4 if item % 3 == 0 else 0.1))
            price = "" if at % 9 == 0 else round(100 * draw.random(), 2)
            time = datetime(2026, 11, 1) + timedelta(seconds=30 * at)
            rows.writerow(
                [time.isoformat(), f"q{at // 5}", clicked, price, draw.randrange(-9, 90), f"item {item}", at % 5]
            )
    return tmp_path / "clicks.csv"


INDICATED = "{indicator: true, transform: [clip(0..90), minmax]}"


def test_a_drafted_file_takes_a_csv_of_other_columns_to_a_model_that_learned_them(clicks, tmp_path, run_to_end):
    folder, draft = tmp_path / "a folder", tmp_path / "shop.yaml"
    store, lake, package = folder / "store", folder / "lake", tmp_path / "pipeline.yaml"
    store.mkdir(parents=True)
    ingest = ["ingest", "--store", str(store), "--data", str(clicks), "--lake", str(lake)]
    for number, words in enumerate(
        (
            ["recommender", "init", str(clicks), "--output", str(draft)],
            ["recommender", "check", str(draft)],
            ["recommender", "accept", str(draft), "--store", str(store), "--why", "the first"],
            [*ingest, "--lake-fraction", "1.0", "--replay", str(folder / "replay.parquet")],
            ["compile", "--output", str(package)],
            ["run", "--package", str(package), "--folder", str(folder), "--set", "gate.min_auc=0.55"],
        )
    ):
        ended = run_to_end(words, output=tmp_path / f"{number}.log", seconds=200)
        assert ended.code == 0, ended.output
        if words[1] == "init":
            draft.write_text(draft.read_text().replace("price: {}", f"price: {INDICATED}"))
    assert "version 1 is published; pass over 600 held-out rows" in ended.output
    (manifest,) = (store / "models").glob(f"*/{Model.MANIFEST}")
    model = Model.read(manifest)
    assert model.recommender.name == "clicks"
    assert model.recommender.features.numeric == ("price", "age")
    assert model.recommender.features.dense_inputs == ("price", "age", "price/missing")
    assert model.recommender.features.categorical == ("item", "shop")
    assert model.recommender.features.type_of("item") == "string"
    assert model.recommender.features.options_of("age").transform == ("standardize",)
    assert model.recommender.settings == {"gate": {"min_auc": 0.55}}
