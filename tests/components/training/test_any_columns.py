"""Tests of unusual recommenders, from raw rows to the served graph.

A recommender has only one kind of column, or options for its columns, or 200 columns. Rows are
encoded by the workflow. The model is trained by the step's own command, exported as in deployment,
and scored by ONNX Runtime. Expected scores are computed by PyTorch's network on rows that the
workflow encodes, and by the networks' formulas in float64.
`tests/components/preprocessing/test_columns.py` checks that NVTabular encodes such columns like the
workflow. `contracts/test_records` has more tests of records.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from components.training.__main__ import main
from evergreen.config.features import CategoricalOptions, Features, ListOptions, NumericOptions
from evergreen.config.model import config_from_document
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import Model
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import PredictionBatch
from evergreen.contracts.serving import named_inputs
from evergreen.networks.files import WEIGHTS_FILE, open_model
from evergreen.networks.scoring import load_scorer
from evergreen.registry.models import GRAPH_FILE
from evergreen.runtime.flags import run_flags
from evergreen.serving.graph.export import export
from evergreen.serving.parity import open_graph
from evergreen.storage.references import keep
from evergreen.storage.uris import local_path
from testing import networks
from tests.support.planted_rows import training_set_of
from tests.support.workflows import workflow_of

ROWS = 600
EDGES = [
    (1, 0, 0),
    (0, 1, 0),
    (3, 0, 0),
    (0, 3, 0),
    (0, 0, 1),
    (1, 2, 2),
    (2, 190, 8),
]
"""Default numbers of numeric columns, categorical columns and lists."""
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


def can_be(counts, kind):
    """Return whether the network has enough columns.

    HugeCTR needs a category, and DLRM needs two vectors.
    """
    needed = {"dlrm": 1 if counts[0] else 2, "dcn by hugectr": 1}
    return sum(counts[1:]) >= needed.get(kind, 0)


CASES = [
    pytest.param(counts, kind, id=f"{kind} {' + '.join(map(str, counts))}")
    for counts in EDGES
    for kind in (MODELS if sum(counts) < 6 else ["dcn", "dcn by hugectr"])
    if can_be(counts, kind)
]


EMBEDS = [CategoricalOptions(embed=8), CategoricalOptions(), CategoricalOptions(embed=3)]
"""Embedding options of consecutive columns, for networks that accept vectors of different
widths."""


def list_options_of(number, categorical, embed):
    """Return the options of the list feature `number`.

    Lists with an odd number share the categories of a categorical column, if the recommender has
    one. Lists that share categories have the same pooling.
    """
    if number % 2 == 0 or not categorical:
        return ListOptions(max=1 + number % 3, pool="sum" if number % 4 else "mean", embed=embed)
    return ListOptions(max=2, table=categorical[number % len(categorical)], pool="sum")


def recommender_of(counts, kind):
    num_numeric, num_categorical, num_lists = counts
    numeric = tuple(f"x{i}" for i in range(num_numeric))
    lists = tuple(f"l{i}" for i in range(num_lists))
    model = {"kind": kind.split()[0], "embedding_dim": 4, "tower": [8], **MODELS[kind]}
    categorical = tuple(f"c{i}" for i in range(num_categorical))
    embeds = {name: EMBEDS[i % len(EMBEDS)] for i, name in enumerate(categorical)}
    is_wide = kind.startswith("dcn")
    features = Features(
        numeric=numeric,
        categorical=categorical,
        lists=lists,
        list_options={
            n: list_options_of(i, categorical, 5 if is_wide else None) for i, n in enumerate(lists)
        },
        categorical_options=embeds if is_wide else {},
        numeric_options={
            name: OPTIONS[(i + num_numeric) % len(OPTIONS)] for i, name in enumerate(numeric)
        },
    )
    training = {"batch_size": 64, "min_batch_size": 64, "passes": 1}
    return Recommender(
        name="shop", features=features, settings={"model": model, "training": training}
    )


def random_workflow(features, random):
    num_buckets = {name: features.options_of(name).num_buckets for name in features.bucketed}
    num_drawn = len(features.slots) - len(features.bucketed)
    drawn = [
        random.choice(2**33, int(random.integers(0, 9)), replace=False) for _ in range(num_drawn)
    ]
    buckets = {
        n: np.unique(random.normal(0, 2, int(random.integers(k)))) for n, k in num_buckets.items()
    }
    return workflow_of(
        (*drawn, *map(np.arange, num_buckets.values())),
        features,
        boundaries={name: boundaries.astype(np.float32) for name, boundaries in buckets.items()},
        means=random.normal(size=len(features.numeric)).astype(np.float32),
        stds=random.uniform(0.5, 3, len(features.numeric)).astype(np.float32),
    )


def raw_rows(workflow, random):
    """Return values of all sizes, all kinds of categories, and lists of any length."""
    features = workflow.features
    dense = random.normal(0, 3, (ROWS, len(features.numeric))).astype(np.float32)
    dense[random.random(dense.shape) < 0.2] = np.nan
    for name, boundaries in workflow.boundaries.items():
        dense[: len(boundaries), features.numeric.index(name)] = boundaries
    columns = [
        random.choice(np.append(workflow.vocabularies[slot], [-1, 77]), ROWS)
        for slot in features.positions.slots
    ]
    categorical = np.array(columns, np.int64).reshape(len(columns), ROWS).T
    for start, stop, _ in features.positions.lists:
        # A list is padded at its end.
        in_list = categorical[:, start:stop]
        categorical[:, start:stop] = np.take_along_axis(
            in_list, np.argsort(in_list == -1, axis=1, kind="stable"), 1
        )
    return dense, np.ascontiguousarray(categorical)


def with_more_categories(workflow):
    """Return the workflow of a next run, in which each column has one more category."""
    num = len(workflow.features.slots) - len(workflow.features.bucketed)
    more = tuple(np.append(each, 2**34) for each in workflow.vocabularies[:num])
    return replace(workflow, vocabularies=more + workflow.vocabularies[num:])


def network_vectors(weights, features, sizes, ids):
    """Return the vectors of rows from the weights file, side by side if their widths differ."""
    stored, ends, slots = load_file(weights / WEIGHTS_FILE), defaultdict(int), []
    embeds = {name: features.embed_of(name) or 4 for name in features.slots}
    num_widths = len(set(embeds.values()))
    for width, size in zip(embeds.values(), sizes):
        table = stored["embeddings" if num_widths == 1 else f"embeddings/{width}"]
        assert table.shape[1] == width
        slots.append(table[ends[width] : ends[width] + size])
        ends[width] += size
    found = networks.vectors_of(slots, features.id_positions, ids)
    if num_widths > 1:
        return np.concatenate(found, axis=1)[:, None]
    return np.stack(found, axis=1) if found else np.zeros((len(ids), 0, 4), np.float32)


def encoded_set(folder, recommender, workflow, *, dense, ids):
    features = recommender.features
    clicks = (np.arange(ROWS) % 3 == 0).astype(np.float32)
    table = {
        "label": clicks,
        **dict(zip(features.dense_inputs, dense.T)),
        **dict(zip(features.id_names, ids.T)),
    }
    folder.mkdir()
    pq.write_table(
        pa.table({name: np.ascontiguousarray(each) for name, each in table.items()}),
        folder / "p.parquet",
    )
    (folder / "_file_list.txt").write_text("1\np.parquet\n")
    workflow.save(folder / "workflow")
    news = [0] * len(workflow.slot_sizes)
    facts = {"slot_sizes": workflow.slot_sizes, "new_categories": news, "recommender": recommender}
    return training_set_of(folder, ROWS, workflow=folder / "workflow", **facts)


@pytest.mark.parametrize(("counts", "kind"), CASES)
def test_any_columns_are_trained_and_served_like_workflow_and_network(
    counts, kind, tmp_path, validation_report, capsys, double
):
    train_and_serve(counts, kind, tmp_path, validation_report=validation_report, capsys=capsys)


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.tuples(*(st.integers(0, most) for most in (60, 100, 40))).filter(any),
    st.sampled_from(sorted(MODELS)),
)
def test_drawn_recommender_is_too(
    tmp_path_factory, validation_report, capsys, double, counts, kind
):
    assume(can_be(counts, kind))
    folder = tmp_path_factory.mktemp("drawn")
    train_and_serve(counts, kind, folder, validation_report=validation_report, capsys=capsys)


def train_and_serve(counts, kind, tmp_path, *, validation_report, capsys):
    """Run all comparisons of this module for one recommender."""
    random = np.random.default_rng(counts)
    recommender = recommender_of(counts, kind)
    workflow = random_workflow(recommender.features, random)
    dense, categorical = raw_rows(workflow, random)
    encoded = workflow.encode_dense(dense)
    ids = workflow.encode_categorical(workflow.with_buckets(dense, categorical))
    assert encoded.shape == (ROWS, len(recommender.features.dense_inputs))
    training_set = encoded_set(tmp_path / "rows", recommender, workflow, dense=encoded, ids=ids)
    report = keep(validation_report, tmp_path / "report.json")
    training_set = replace(training_set, validation_report=report)
    training_set.write(tmp_path / "training_set.json")
    flags = run_flags(
        run="r1",
        store=(tmp_path / "store").as_uri(),
        work=str(tmp_path / "work"),
        training_set=tmp_path / "training_set.json",
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
    scorer = load_scorer(
        weights, config, model.slot_sizes, positions=recommender.features.id_positions
    )
    scores = scorer.probabilities(encoded, ids)
    stored = open_model(weights, model.slot_sizes).weights
    vectors = network_vectors(weights, recommender.features, model.slot_sizes, ids)
    by_formula = networks.logits(config, stored.dense, encoded[:50], vectors[:50])
    np.testing.assert_allclose(scores[:50], 1 / (1 + np.exp(-by_formula)), rtol=0, atol=1e-5)
    assert scores.std() > 1e-4

    export(model, tmp_path / "graph")
    session = open_graph(tmp_path / "graph" / GRAPH_FILE)
    for rows in (1, 7, ROWS):
        (found,) = session.run(None, named_inputs(dense[:rows], categorical[:rows]))
        np.testing.assert_allclose(found[:, 0], scores[:rows], rtol=0, atol=1e-5)

    sent = PredictionBatch(
        request_id="r",
        time=1.0,
        model_version=1,
        dense=dense,
        categorical=categorical,
        scores=scores,
    )
    form = RecordFormat(recommender.features)
    received = form.decode(form.encode(sent))
    np.testing.assert_array_equal(received.dense, dense)
    np.testing.assert_array_equal(received.categorical, categorical)
