"""An exam over generated recommenders, from 1 to 200 columns, also without a kind: from raw rows to the served graph.

Each is encoded by its workflow, trained by the step's own command, exported as deployment exports it and scored by ONNX
Runtime. Truths are the workflow with PyTorch's network and the networks' formulas in float64. That NVTabular encodes
such columns as the workflow does is in `components/preprocessing/test_columns`, what Hypothesis makes of records in
`contracts/test_records`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from components.contracts.features import CategoricalOptions, Features, NumericOptions
from components.contracts.manifests import Model
from components.contracts.recommender import Recommender
from components.contracts.record_format import RecordFormat
from components.contracts.records import PredictionBatch
from components.contracts.serving import named_inputs
from components.deployment.graph.export import export
from components.deployment.graph.parity import open_graph
from components.models.configs import config_from_document
from components.models.files import WEIGHTS_FILE, open_model
from components.models.scoring import load_scorer
from components.runtime.flags import run_flags
from components.storage.uris import local_path
from components.store.models import GRAPH_FILE
from components.training.__main__ import main
from tests.support import networks
from tests.support.training_world import training_set_of
from tests.support.workflows import workflow_of

ROWS = 600
EDGES = [(1, 0), (0, 1), (3, 0), (0, 3), (1, 1), (2, 2), (2, 198)]
"""Numbers of numeric and categorical columns that run by default."""
OPTIONS = [
    NumericOptions(),
    NumericOptions(transform=("quantile_buckets(9)",)),
    NumericOptions(fill=1.5, indicator=True),
    NumericOptions(transform=("clip(-2..2)", "standardize")),
    NumericOptions(transform=("clip(-1..2)", "quantile_buckets(3)")),
    NumericOptions(transform=("minmax",), indicator=True),
    NumericOptions(transform=()),
]
MODELS = {
    "dcn": {"num_cross_layers": 2},
    "dcn v2": {"num_cross_layers": 2, "projection_dim": 2},
    "deepfm": {},
    "dlrm": {},
    "dcn by hugectr": {"num_cross_layers": 2},
}


def drawn_counts(seed):
    """Numbers of columns of a larger exam, up to 200 together."""
    random = np.random.default_rng(seed)
    total = int(random.integers(2, 201))
    return total - (part := int(random.integers(0, total + 1))), part


CASES = [
    *(
        pytest.param(*counts, kind, id=f"{kind} {counts[0]} + {counts[1]}")
        for counts in EDGES
        for kind in (MODELS if sum(counts) < 5 else ["dcn"])
        if kind != "dlrm" or counts[1] + bool(counts[0]) > 1
    ),
    *(
        pytest.param(*drawn_counts(seed), kind, id=f"{kind} of draw {seed}", marks=pytest.mark.slow)
        for seed in range(6)
        for kind in MODELS
    ),
]


EMBEDS = [CategoricalOptions(embed=8), CategoricalOptions(), CategoricalOptions(embed=3)]
"""Of columns one after another, where the network takes vectors of different widths."""


def recommender_of(num_numeric, num_categorical, kind):
    numeric = tuple(f"x{i}" for i in range(num_numeric))
    model = {"kind": kind.split()[0], "embedding_dim": 4, "tower": [8], **MODELS[kind]}
    categorical = tuple(f"c{i}" for i in range(num_categorical))
    embeds = {name: EMBEDS[i % len(EMBEDS)] for i, name in enumerate(categorical)}
    features = Features(
        numeric=numeric,
        categorical=categorical,
        categorical_options=embeds if kind in ("dcn", "dcn v2") else {},
        numeric_options={name: OPTIONS[(i + num_numeric) % len(OPTIONS)] for i, name in enumerate(numeric)},
    )
    training = {"batch_size": 64, "min_batch_size": 64, "passes": 1}
    return Recommender(name="shop", features=features, settings={"model": model, "training": training})


def random_workflow(features, random):
    num_buckets = {name: features.options_of(name).num_buckets for name in features.bucketed}
    drawn = [random.choice(2**33, int(random.integers(0, 9)), replace=False) for _ in features.categorical]
    buckets = {n: np.unique(random.normal(0, 2, int(random.integers(k)))) for n, k in num_buckets.items()}
    return workflow_of(
        (*drawn, *map(np.arange, num_buckets.values())),
        features,
        boundaries={name: boundaries.astype(np.float32) for name, boundaries in buckets.items()},
        means=random.normal(size=len(features.numeric)).astype(np.float32),
        stds=random.uniform(0.5, 3, len(features.numeric)).astype(np.float32),
    )


def raw_rows(workflow, random):
    """Values of all sizes, missing ones, categories that are known, unknown and missing."""
    features = workflow.features
    dense = random.normal(0, 3, (ROWS, len(features.numeric))).astype(np.float32)
    dense[random.random(dense.shape) < 0.2] = np.nan
    for name, boundaries in workflow.boundaries.items():
        dense[: len(boundaries), features.numeric.index(name)] = boundaries
    vocabularies = workflow.vocabularies[: len(features.categorical)]
    columns = [random.choice(np.append(each, [-1, 77]), ROWS) for each in vocabularies]
    categorical = np.array(columns, np.int64).reshape(len(columns), ROWS).T
    return dense, np.ascontiguousarray(categorical)


def with_more_categories(workflow):
    """The workflow of a next round: each categorical column has one category more."""
    num = len(workflow.features.categorical)
    more = tuple(np.append(each, 2**34) for each in workflow.vocabularies[:num])
    return replace(workflow, vocabularies=more + workflow.vocabularies[num:])


def vectors_of(weights, features, sizes, ids):
    """The vectors of rows, side by side where their widths differ: from the tables of the weights file."""
    tables, starts, found = load_file(weights / WEIGHTS_FILE), defaultdict(int), []
    embeds = [features.embed_of(name) or 4 for name in features.id_names]
    for width, size, of_column in zip(embeds, sizes, ids.T):
        table = tables["embeddings" if len(set(embeds)) == 1 else f"embeddings/{width}"]
        assert table.shape[1] == width
        found.append(table[starts[width] + of_column])
        starts[width] += size
    if len(set(embeds)) > 1:
        return np.concatenate(found, axis=1)[:, None]
    return np.stack(found, axis=1) if found else np.zeros((len(ids), 0, 4), np.float32)


def encoded_set(folder, recommender, workflow, *, dense, ids):
    features = recommender.features
    clicks = (np.arange(ROWS) % 3 == 0).astype(np.float32)
    table = {"label": clicks, **dict(zip(features.dense_inputs, dense.T)), **dict(zip(features.id_names, ids.T))}
    folder.mkdir()
    pq.write_table(pa.table({name: np.ascontiguousarray(each) for name, each in table.items()}), folder / "p.parquet")
    (folder / "_file_list.txt").write_text("1\np.parquet\n")
    workflow.save(folder / "workflow")
    facts = {"slot_sizes": workflow.slot_sizes, "new_categories": [0] * len(ids.T), "recommender": recommender}
    return training_set_of(folder, ROWS, workflow=folder / "workflow", **facts)


@pytest.mark.parametrize(("num_numeric", "num_categorical", "kind"), CASES)
def test_a_recommender_of_any_columns_is_trained_and_served_as_its_workflow_and_network_say(
    num_numeric, num_categorical, kind, tmp_path, validation_report, capsys, double
):
    random = np.random.default_rng(1000 * num_numeric + num_categorical)
    recommender = recommender_of(num_numeric, num_categorical, kind)
    workflow = random_workflow(recommender.features, random)
    dense, categorical = raw_rows(workflow, random)
    encoded = workflow.encode_dense(dense)
    ids = workflow.encode_categorical(workflow.with_buckets(dense, categorical))
    assert encoded.shape == (ROWS, len(recommender.features.dense_inputs))
    training_set = encoded_set(tmp_path / "rows", recommender, workflow, dense=encoded, ids=ids)
    training_set.write(tmp_path / "training_set.json")
    validation_report.write(tmp_path / "report.json")
    flags = run_flags(
        run="r1",
        store=(tmp_path / "store").as_uri(),
        work=str(tmp_path / "work"),
        training_set=tmp_path / "training_set.json",
        validation_report=tmp_path / "report.json",
        output=tmp_path / "model.json",
    )
    flags += ["--backend", "hugectr"] * ("hugectr" in kind)
    assert main(flags) == 0
    model = Model.read(tmp_path / "model.json")
    assert model.optimizer_step >= 3
    more = with_more_categories(workflow)
    more.save(tmp_path / "more")
    grown = {"slot_sizes": more.slot_sizes, "workflow_uri": (tmp_path / "more").as_uri()}
    replace(training_set, parent_model_uri=model.uri, **grown).write(tmp_path / "training_set.json")
    assert main([*flags, "--run", "r2", "--output", str(tmp_path / "next.json")]) == 0
    assert Model.read(tmp_path / "next.json").optimizer_step > model.optimizer_step
    if any(map(len, workflow.boundaries.values())):
        moved = {name: boundaries + 1 for name, boundaries in workflow.boundaries.items()}
        replace(more, boundaries=moved).save(tmp_path / "more")
        assert main([*flags, "--run", "r3"]) == 2
        assert "boundaries of x" in capsys.readouterr().err
    config, weights = config_from_document(model.config), local_path(model.uri) / Model.WEIGHTS
    scores = load_scorer(weights, config, model.slot_sizes).probabilities(encoded, ids)
    stored = open_model(weights, model.slot_sizes).weights
    vectors = vectors_of(weights, recommender.features, model.slot_sizes, ids)
    by_formula = networks.logits(config, stored.dense, encoded[:50], vectors[:50])
    np.testing.assert_allclose(scores[:50], 1 / (1 + np.exp(-by_formula)), rtol=0, atol=1e-5)
    assert scores.std() > 1e-4

    export(model, tmp_path / "graph")
    session = open_graph(tmp_path / "graph" / GRAPH_FILE)
    for rows in (1, 7, ROWS):
        (found,) = session.run(None, named_inputs(dense[:rows], categorical[:rows]))
        np.testing.assert_allclose(found[:, 0], scores[:rows], rtol=0, atol=1e-5)

    sent = PredictionBatch(
        request_id="r", time=1.0, model_version=1, dense=dense, categorical=categorical, scores=scores
    )
    form = RecordFormat(recommender.features)
    received = form.decode(form.encode(sent))
    np.testing.assert_array_equal(received.dense, dense)
    np.testing.assert_array_equal(received.categorical, categorical)
