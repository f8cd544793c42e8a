"""Tests of the warning that a column reveals the label.

The warning does not change the gate's decision.
"""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from components.evaluation.__main__ import main
from components.evaluation.leaks import column_aucs, describe_leak
from evergreen.config.features import CategoricalOptions, Features, ListOptions
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import RawDataset, Verdict
from evergreen.registry.runs import read_notes
from evergreen.storage.uris import local_path
from testing.validation_models import make_dataset

FEATURES = Features(
    numeric=("price", "stay"),
    categorical=("city", "outcome", "place"),
    categorical_options={"place": CategoricalOptions(served_as=1)},
    lists=("tags",),
    list_options={"tags": ListOptions(max=2)},
)


def clean_columns(n: int, seed: int) -> dict:
    random = np.random.default_rng(seed)
    labels = (random.random(n) < 0.3).astype(np.int32)
    return {
        "label": labels,
        # The column is weakly related to the label, like a column without a leak.
        "price": (random.normal(size=n) + 0.5 * labels).astype(np.float32),
        "stay": random.normal(size=n).astype(np.float32),
        "city": random.integers(0, 40, n),
        "outcome": random.integers(0, 9, n),
        "place": random.integers(1, 10, n),
        "tags": [random.integers(0, 9, length).tolist() for length in random.integers(0, 4, n)],
    }


@pytest.fixture
def make_raw(tmp_path):
    """Writes training and holdout rows.

    `leak` is a function that computes one column from the labels.
    """

    def make(column: str = "", leak=None, *, excluded=()) -> RawDataset:
        for seed, (name, n) in enumerate({"train": 6000, "holdout": 1500}.items()):
            columns = clean_columns(n, seed)
            if column:
                columns[column] = leak(columns["label"], np.random.default_rng(seed + 10))
            folder = tmp_path / name
            folder.mkdir()
            kinds = {"price": pa.float32(), "stay": pa.float32(), "tags": pa.list_(pa.int64())}
            arrays = {
                key: pa.array(values, kinds.get(key, pa.int64())) for key, values in columns.items()
            }
            table = pa.table(arrays)
            for part in range(3):
                at = n // 3
                pq.write_table(
                    table.slice(part * at, at),
                    folder / f"part-{part}.parquet",
                    row_group_size=at // 2,
                )
        return replace(
            make_dataset(tmp_path, 6000),
            train_uri=(tmp_path / "train").as_uri(),
            holdout_uri=(tmp_path / "holdout").as_uri(),
            excluded_columns=list(excluded),
            recommender=Recommender(name="shop", features=FEATURES),
        )

    return make


def holdout(raw: RawDataset) -> dict:
    return pq.read_table(local_path(raw.holdout_uri)).to_pydict()


def filled_by_clicks(labels, random):
    return [float(random.random()) if label else None for label in labels]


def only_in_middle(labels, random):
    others = random.choice([1, 2, 4, 5], len(labels))
    return np.where(labels == 1, 3, others)


def any_id_of_clicks(labels, random):
    return [
        int(value) if label else None
        for label, value in zip(labels, random.integers(0, 10**9, len(labels)))
    ]


def parity(labels, random):
    return random.integers(0, 50, len(labels)) * 2 + labels


def some_missing(large_or_small):
    """Return a function that computes continuous values. Half of the clicks have no value.

    The other clicks have the largest values, or the smallest values if `large_or_small` is -1.
    """

    def values(labels, random):
        drawn = large_or_small * (labels * 10 + random.random(len(labels)))
        return [
            None if label and random.random() < 0.5 else float(value)
            for label, value in zip(labels, drawn)
        ]

    return values


LEAKS = {
    "larger for clicks": ("stay", lambda labels, random: labels * 10 + random.random(len(labels))),
    "smaller for clicks": (
        "price",
        lambda labels, random: 5 - labels * 10 + random.random(len(labels)),
    ),
    "filled by clicks": ("stay", filled_by_clicks),
    "filled where nobody clicked": (
        "stay",
        lambda labels, random: filled_by_clicks(1 - labels, random),
    ),
    "large or missing for clicks": ("stay", some_missing(1)),
    "small or missing for clicks": ("stay", some_missing(-1)),
    "neither large nor small": ("price", only_in_middle),
    "a category": ("outcome", parity),
    "an absent category": ("city", any_id_of_clicks),
    "a list": ("tags", lambda labels, random: [[4, 7] if label else [] for label in labels]),
    "a list without order": (
        "tags",
        lambda labels, random: [[int(each)] for each in parity(labels, random)],
    ),
}


@pytest.mark.parametrize("kind", LEAKS)
def test_column_that_decides_label_alone_is_named(make_raw, kind):
    column, leak = LEAKS[kind]
    aucs = column_aucs(make_raw(column, leak))
    assert [name for name, auc in aucs.items() if auc > 0.99] == [column]
    assert f"{column} ({aucs[column]:.4f}) predicts the label alone" in describe_leak(0.997, aucs)


def test_clean_columns_have_their_own_aucs_and_none_is_named(make_raw):
    raw = make_raw()
    aucs, rows = column_aucs(raw), holdout(raw)
    own = roc_auc_score(rows["label"], rows["price"])
    assert list(aucs) == sorted(aucs, key=aucs.get, reverse=True)
    assert set(aucs) == {"price", "stay", "city", "outcome", "tags"}
    assert aucs["price"] == pytest.approx(own, abs=0.01)
    assert max(aucs.values()) < 0.7
    sentence = describe_leak(0.9934, aucs)
    assert "auc 0.9934 is above 0.99" in sentence
    assert (
        f"no column predicts the label alone, price comes closest with {aucs['price']:.4f}"
        in sentence
    )


def test_rates_are_learned_from_training_rows_alone(make_raw):
    """A value that occurs only in holdout rows is not evidence of a leak."""
    fresh = make_raw(
        "outcome", lambda labels, random: labels + random.integers(10**6, 10**9, len(labels)) * 2
    )
    assert column_aucs(fresh)["outcome"] == pytest.approx(0.5, abs=0.03)


def test_column_left_out_of_run_is_not_measured(make_raw):
    column, leak = LEAKS["larger for clicks"]
    assert column not in column_aucs(make_raw(column, leak, excluded=[column]))


def leaking_round(make_round, leak: str):
    """Return a run whose candidate ranks almost all rows correctly.

    If `leak` is given, one column contains the label.
    """
    made = make_round()
    scores = made.scores(made.planted)
    # An AUC of exactly 1 has no interval.
    noisy = scores + np.random.default_rng(3).normal(0, 0.05 * scores.std(), len(scores))
    made.labels = (noisy > np.quantile(noisy, 0.7)).astype(np.int32)
    folder, start = local_path(made.raw.holdout_uri), 0
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path)
        labels = made.labels[start : start + len(table)]
        changed = {"label": pa.array(labels, pa.int32())}
        if leak:
            kind = table.schema.field(leak).type
            changed[leak] = pa.array(labels * 3 + 1).cast(kind)
        for name, values in changed.items():
            table = table.set_column(table.column_names.index(name), name, values)
        pq.write_table(table, path)
        start += len(table)
    encoded = local_path(made.training_set.holdout_uri)
    start = 0
    for name in (encoded / "_file_list.txt").read_text().splitlines()[1:]:
        path = encoded / name.rpartition("/")[2]
        table = pq.read_table(path)
        labels = pa.array(made.labels[start : start + len(table)].astype(np.float32))
        pq.write_table(table.set_column(table.column_names.index("label"), "label", labels), path)
        start += len(table)
    made.change("raw", train_uri=made.raw.holdout_uri)
    return made


@pytest.mark.parametrize("leak", ["age", "user"])
def test_gate_passes_and_warns_of_leaking_column_in_verdict_page_and_note(make_round, leak):
    made = leaking_round(make_round, leak)
    assert main(made.flags()) == 0
    verdict = Verdict.read(made.path("verdict"))
    assert (verdict.decision, verdict.accepted) == ("pass", True)
    assert 0.99 < verdict.candidate.auc < 1
    (warning,) = verdict.warnings
    assert f"{leak} (1.0000) predicts the label alone" in warning
    assert "`evergreen run --from-scratch`" in warning
    assert next(iter(verdict.column_aucs)) == leak
    assert json.loads(made.path("verdict").read_text())["column_aucs"][leak] == 1.0
    (note,) = read_notes(made.store, made.run)
    assert note.reason == f"{verdict.reason}; WARNING: {warning}"
    page = made.path("report.html").read_text()
    assert f"{leak} (1.0000) predicts the label alone" in page
    assert "each column alone, on the held-out rows" in page


def test_gate_says_that_no_single_column_explains_such_auc(make_round):
    made = leaking_round(make_round, "")
    assert main(made.flags()) == 0
    (warning,) = Verdict.read(made.path("verdict")).warnings
    assert "no column predicts the label alone" in warning


def test_believable_auc_is_no_warning_and_measures_no_column(make_round):
    made = make_round()
    assert main(made.flags()) == 0
    verdict = Verdict.read(made.path("verdict"))
    assert (verdict.warnings, verdict.column_aucs) == ([], {})
    assert verdict.sentence == verdict.reason
    assert "WARNING" not in made.path("report.html").read_text()
