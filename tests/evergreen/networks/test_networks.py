"""The conformance suite for every network: formula, files, exported and served graph."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch

from evergreen.config.features import CategoricalOptions, Features, ListOptions
from evergreen.config.model import config_from_document, network_config
from evergreen.config.spec import Recommender
from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from evergreen.networks.network import build_network, export_onnx, load_dense
from evergreen.runtime.errors import ContractError
from testing import networks
from testing.networks import shaped
from testing.recommenders import shop_with
from tests.support.errors import raises
from tests.support.graphs import open_built
from tests.support.nasty_rows import STRANGE, nasty_rows, strange_workflow
from tests.support.toy_models import ids_of

WIDTHS = {
    "num_dense": len(STRANGE.dense_inputs),
    "num_categorical": len(STRANGE.vector_names),
}
SHAPE = {"embedding_dim": 4, "tower": (16, 8)}
CONFIGS = {
    "dcn v1": shaped("dcn", {**SHAPE, "num_cross_layers": 3}, **WIDTHS),
    "dcn v1, one of each": shaped(
        "dcn", {"embedding_dim": 1, "num_cross_layers": 1, "tower": (3,)}, **WIDTHS
    ),
    "dcn v2": shaped("dcn", {**SHAPE, "num_cross_layers": 2, "projection_dim": 5}, **WIDTHS),
    "deepfm": shaped("deepfm", SHAPE, **WIDTHS),
    "dlrm": shaped("dlrm", {**SHAPE, "dropout": 0.5}, **WIDTHS),
    "other widths": shaped(
        "dlrm", {"embedding_dim": 3, "tower": (5,)}, num_dense=2, num_categorical=3
    ),
    **{
        f"{kind} of {num_dense} + {num_categorical} columns": shaped(
            kind, SHAPE, num_dense=num_dense, num_categorical=num_categorical
        )
        for kind in ("dcn", "deepfm", "dlrm")
        for num_dense, num_categorical in ((1, 0), (3, 0), (0, 1), (0, 2), (1, 1))
        if kind != "dlrm" or num_dense + num_categorical > 1 and num_categorical
    },
}
every_network = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def network_of(config, seed=0):
    return build_network(config, seed).eval()


def parameters(network):
    return {name: each.detach().numpy() for name, each in network.named_parameters()}


def inputs(config, n=50, seed=0):
    random = np.random.default_rng(seed)
    embeddings = random.normal(0, 0.3, (n, config.num_categorical, config.embedding_dim))
    return random.normal(size=(n, config.num_dense)).astype(np.float32), embeddings.astype(
        np.float32
    )


def logits(network, dense, embeddings):
    with torch.no_grad():
        return network(torch.from_numpy(dense), torch.from_numpy(embeddings)).numpy()


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


@every_network
def test_logits_equal_formulas_of_papers(config):
    network = network_of(config)
    with torch.no_grad():
        network.bias.fill_(0.7)
    dense, embeddings = inputs(config)
    expected = networks.logits(config, parameters(network), dense, embeddings)
    assert expected.std() > (0.05 if config.input_width > 10 else 0.005)
    np.testing.assert_allclose(logits(network, dense, embeddings), expected, rtol=2e-5, atol=2e-5)


@every_network
def test_dropout_is_off_outside_training_and_seed_decides_weights(config):
    dense, embeddings = inputs(config)
    one, again, other = (logits(network_of(config, seed), dense, embeddings) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


@every_network
def test_configuration_survives_json(config):
    document = json.loads(json.dumps(config.as_document()))
    assert config_from_document(document) == config
    with raises(ContractError, "unknown or missing"):
        config_from_document({**document, "colour": 1})
    with raises(ContractError, "unknown or missing"):
        config_from_document({name: value for name, value in document.items() if name != "tower"})


@pytest.fixture(
    scope="module",
    params=[n for n, each in CONFIGS.items() if each.num_categorical == WIDTHS["num_categorical"]],
)
def served(request):
    """Configuration, network, workflow, table, and a session of the whole graph."""
    config, workflow = CONFIGS[request.param], strange_workflow(3)
    network = network_of(config)
    with torch.no_grad():
        # Use smaller weights, so that float32 has enough digits for dense values of millions.
        for parameter in network.parameters():
            parameter *= 0.5
    table = np.random.default_rng(1).normal(
        0, 0.3, (sum(workflow.slot_sizes), config.embedding_dim)
    )
    table = table.astype(np.float32)
    session = open_built(workflow, [table], onnx.load_from_string(export_onnx(network, config)))
    return config, network, workflow, table, session


def answers(session, dense, categorical):
    return session.run(None, {DENSE_INPUT: dense, CATEGORICAL_INPUT: categorical})[0]


def test_served_graph_scores_raw_rows_as_formula_scores_encoded_ones(served):
    config, network, workflow, table, session = served
    dense, categorical = nasty_rows(workflow, 300, 5, dense_up_to=1e5, strange_dense=False)
    tables, ids = (
        np.split(table, np.cumsum(workflow.slot_sizes)[:-1]),
        ids_of(workflow, categorical),
    )
    vectors = np.stack(networks.vectors_of(tables, STRANGE.positions, ids), axis=1)
    expected = networks.logits(config, parameters(network), workflow.encode_dense(dense), vectors)
    assert sigmoid(expected).std() > 0.001
    np.testing.assert_allclose(
        answers(session, dense, categorical)[:, 0], sigmoid(expected), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("rows_each", [1, 2, 7, 999], ids="{} rows each".format)
def test_split_of_batch_changes_no_bit_of_any_score(served, rows_each):
    _, _, workflow, _, session = served
    dense, categorical = nasty_rows(workflow, 4096, 1)
    whole = answers(session, dense, categorical)
    starts = range(0, min(4096, 300 * rows_each), rows_each)
    parts = [
        answers(session, dense[i : i + rows_each], categorical[i : i + rows_each]) for i in starts
    ]
    parts = np.concatenate(parts)
    np.testing.assert_array_equal(parts.view(np.int32), whole[: len(parts)].view(np.int32))


def test_parameters_of_another_network_are_refused():
    network = network_of(CONFIGS["dcn v1"])
    with raises(ContractError, "unknown or missing"):
        load_dense(network, parameters(network_of(CONFIGS["dlrm"])))
    wrong = {**parameters(network), "bias": np.zeros(2, np.float32)}
    with raises(ContractError, "bias", (2,), "expected (1,)"):
        load_dense(network, wrong)


@pytest.mark.parametrize(
    ("network", "settings", "message"),
    [
        ("gbdt", {}, "model.kind is 'gbdt', expected one of dcn, deepfm, dlrm"),
        ("deepfm", {"num_cross_layers": 5}, "model.num_cross_layers is not a setting"),
        ("deepfm", {"embedding_dim": 1}, "embedding_dim is 1, expected at least 2"),
        ("dcn", {"projection_dim": -1}, "projection_dim is -1, expected at least 0"),
        ("dcn", {"num_cross_layers": 0}, "num_cross_layers is 0, expected at least 1"),
        ("dlrm", {"tower": ()}, r"tower is \(\), expected one or more widths"),
        ("dlrm", {"dropout": 1.0}, r"dropout is 1.0, expected a share in \[0, 1\)"),
        ("dcn", {"widths": [8] * 5}, "model.widths is not a setting: the features decide it"),
    ],
)
def test_unknown_network_option_is_refused_by_name(network, settings, message):
    with pytest.raises(ContractError, match=message):
        network_config(shop_with(model={"kind": network, **settings}))


@pytest.mark.parametrize("network", ["deepfm", "dlrm"])
def test_network_that_multiplies_vectors_refuses_other_widths_by_name(network):
    options = {"item": CategoricalOptions(embed=8)}
    features = Features(
        numeric=(), categorical=("user", "item"), lists=("last",), categorical_options=options
    )
    shop = Recommender(name="shop", features=features, settings={"model": {"kind": network}})
    with raises(ContractError, "features.categorical.item.embed", 8, "embedding_dim (16)", network):
        network_config(shop)
    same = {name: CategoricalOptions(embed=16) for name in features.categorical}
    assert (
        network_config(replace(shop, features=replace(features, categorical_options=same))).widths
        == ()
    )


def test_single_width_of_all_columns_is_model_width_and_lists_have_tables():
    lists = {"last": ListOptions(table="item"), "tags": ListOptions(embed=4)}
    for embeds, expected in (
        ({"user": 8, "item": 32}, (16, (8, 32, 32, 4))),
        ({"user": 4, "item": 4}, (4, ())),
    ):
        options = {name: CategoricalOptions(embed=embed) for name, embed in embeds.items()}
        of_lists = {"list_options": lists, "categorical_options": options}
        features = Features(
            numeric=("price",), categorical=("user", "item"), lists=("last", "tags"), **of_lists
        )
        config = network_config(Recommender(name="shop", features=features))
        assert (config.embedding_dim, config.widths) == expected
        assert config.input_width == 1 + sum(expected[1] or [4] * 4)


@pytest.mark.parametrize(("num_dense", "num_categorical"), [(3, 0), (0, 1)])
def test_dlrm_without_pair_of_vectors_is_refused_and_requirement_named(num_dense, num_categorical):
    with raises(ContractError, "expected at least two vectors for dlrm"):
        shaped("dlrm", SHAPE, num_dense=num_dense, num_categorical=num_categorical)


def test_configurations_and_files_need_no_torch():
    code = (
        "import sys, evergreen.networks, evergreen.config.model, evergreen.networks.files; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def assert_normal(values, deviation):
    """Assert mean, spread and tails of N(0, deviation), each within 5 standard errors."""
    z, n = values.ravel().astype(np.float64) / deviation, values.size
    assert abs(z.mean()) < 5 / n**0.5
    assert abs(z.std() - 1) < 5 / (2 * n) ** 0.5
    # HugeCTR calls the distribution truncated, but does not truncate it: 4.55 % of the values are
    # beyond two standard deviations.
    beyond = 0.0455
    assert abs((np.abs(z) > 2).mean() - beyond) < 5 * (beyond * (1 - beyond) / n) ** 0.5


@pytest.mark.parametrize("rank", [0, 48], ids=["v1", "v2"])
def test_fresh_dcn_has_hugectrs_distributions(rank):
    settings = {
        "embedding_dim": 16,
        "num_cross_layers": 4,
        "tower": (256, 64),
        "projection_dim": rank,
    }
    config = shaped("dcn", settings, **WIDTHS)
    dense, n = parameters(network_of(config)), config.input_width
    assert not dense["cross_bias"].any()
    for name in ("cross_u", "cross_v") if rank else ("cross_weight",):
        assert_normal(dense[name], (2 / (n + rank)) ** 0.5 if rank else n**-0.5)
    for name, fan_in, fan_out in (
        ("tower.0.weight", n, 256),
        ("tower.3.weight", 256, 64),
        ("final_tower", 64 + n, 1),
        ("final_cross", 64 + n, 1),
    ):
        assert_normal(dense[name], (2 / (fan_in + fan_out)) ** 0.5 / 0.87962566)
    assert_normal(dense["tower.0.bias"], 256**-0.5)
    assert_normal(dense["tower.3.bias"], 64**-0.5)
