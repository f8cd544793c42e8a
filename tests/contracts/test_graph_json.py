"""Graph JSON: HugeCTR's text for a small network, NVIDIA's sample read, and every other network refused by place."""

from __future__ import annotations

import copy
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.contracts.criteo import NUM_CATEGORICAL
from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.dcn_layers import dcn_layers
from components.contracts.graph_json import LOCALIZED, EmbeddingTable, Graph, graph_document, write_graph
from components.contracts.graph_reader import graph_from_document, read_graph
from components.runtime.errors import ContractError

SMALL = Graph(
    config=DcnConfig(embedding_dim=1, num_cross_layers=2, tower=(8,), dropout=0.1),
    table=EmbeddingTable(workspace_mb=1, max_vocabulary_size=87381),
)

# As add_dense_layer.cpp of 24.06 writes it with nlohmann's `setw(2)`, whose numbers are doubles of float32 values.
SMALL_TEXT = """\
{
  "layers": [
    {
      "dense": {
        "dense_dim": 13,
        "top": "dense"
      },
      "label": {
        "label_dim": 1,
        "top": "label"
      },
      "sparse": [
        {
          "is_fixed_length": true,
          "nnz_per_slot": [
            ONES
          ],
          "slot_num": 26,
          "top": "categories"
        }
      ],
      "type": "Data"
    },
    {
      "bottom": "categories",
      "optimizer": {
        "adam_hparam": {
          "beta1": 0.8999999761581421,
          "beta2": 0.9990000128746033,
          "epsilon": 1.0000000116860974e-07
        },
        "type": "Adam",
        "update_type": "Local"
      },
      "sparse_embedding_hparam": {
        "combiner": "sum",
        "embedding_vec_size": 1,
        "max_vocabulary_size_global": 87381,
        "workspace_size_per_gpu_in_mb": 1
      },
      "top": "embeddings",
      "type": "DistributedSlotSparseEmbeddingHash"
    },
    {
      "bottom": "embeddings",
      "leading_dim": 26,
      "time_step": 0,
      "top": "embeddings_flat",
      "type": "Reshape"
    },
    {
      "axis": 1,
      "bottom": [
        "embeddings_flat",
        "dense"
      ],
      "top": "x0",
      "type": "Concat"
    },
    {
      "bottom": "x0",
      "ranges": [
        [
          0,
          39
        ],
        [
          0,
          39
        ]
      ],
      "top": [
        "x0_cross",
        "x0_tower"
      ],
      "type": "Slice"
    },
    {
      "bottom": "x0_cross",
      "mc_param": {
        "num_layers": 2
      },
      "top": "cross",
      "type": "MultiCross"
    },
    {
      "bottom": "x0_tower",
      "fc_param": {
        "num_output": 8
      },
      "top": "tower_0_linear",
      "type": "InnerProduct"
    },
    {
      "bottom": "tower_0_linear",
      "top": "tower_0_relu",
      "type": "ReLU"
    },
    {
      "bottom": "tower_0_relu",
      "rate": 0.10000000149011612,
      "top": "tower_0_dropout",
      "type": "Dropout"
    },
    {
      "axis": 1,
      "bottom": [
        "tower_0_dropout",
        "cross"
      ],
      "top": "final_input",
      "type": "Concat"
    },
    {
      "bottom": "final_input",
      "fc_param": {
        "num_output": 1
      },
      "top": "logit",
      "type": "InnerProduct"
    },
    {
      "bottom": [
        "logit",
        "label"
      ],
      "top": "loss",
      "type": "BinaryCrossEntropyLoss"
    }
  ]
}
""".replace("ONES", ",\n            ".join("1" * 26))


def nvidia_sample():
    """What HugeCTR makes of samples/dcn/dcn_parquet.py: its names, and the Slice that it puts in by itself."""

    def dense(type_, bottom, top, **more):
        return {"type": type_, "bottom": bottom, "top": top, **more}

    return {
        "model_name": "dcn",
        "layers": [
            {
                "type": "Data",
                "label": {"top": "label", "label_dim": 1},
                "dense": {"top": "dense", "dense_dim": 13},
                "sparse": [{"top": "data1", "nnz_per_slot": [2] * 26, "is_fixed_length": False, "slot_num": 26}],
            },
            {
                "type": "DistributedSlotSparseEmbeddingHash",
                "bottom": "data1",
                "top": "sparse_embedding1",
                "sparse_embedding_hparam": {
                    "workspace_size_per_gpu_in_mb": 267,
                    "max_vocabulary_size_global": 1458176,
                    "embedding_vec_size": 16,
                    "combiner": "sum",
                },
                "optimizer": {
                    "type": "Adam",
                    "update_type": "Global",
                    "adam_hparam": {
                        "beta1": 0.8999999761581421,
                        "beta2": 0.9990000128746033,
                        "epsilon": 1.0000000116860974e-07,
                    },
                },
            },
            dense("Reshape", "sparse_embedding1", "reshape1", leading_dim=416, time_step=0),
            dense("Concat", ["reshape1", "dense"], "concat1", axis=1),
            dense("Slice", "concat1", ["concat1_slice0", "concat1_slice1"], ranges=[[0, 429], [0, 429]]),
            dense("MultiCross", "concat1_slice0", "multicross1", mc_param={"num_layers": 6}),
            dense("InnerProduct", "concat1_slice1", "fc1", fc_param={"num_output": 1024}),
            dense("ReLU", "fc1", "relu1"),
            dense("Dropout", "relu1", "dropout1", rate=0.5),
            dense("InnerProduct", "dropout1", "fc2", fc_param={"num_output": 1024, "weight_init": "XavierUniform"}),
            dense("ReLU", "fc2", "relu2"),
            dense("Dropout", "relu2", "dropout2", rate=0.5),
            dense("Concat", ["dropout2", "multicross1"], "concat2", axis=1),
            dense("InnerProduct", "concat2", "fc3", fc_param={"num_output": 1}),
            dense("BinaryCrossEntropyLoss", ["fc3", "label"], "loss"),
        ],
    }


def test_graph_is_hugectrs_text(tmp_path):
    write_graph(tmp_path / "dcn.json", SMALL)
    assert (tmp_path / "dcn.json").read_text() == SMALL_TEXT
    assert read_graph(tmp_path / "dcn.json", projection_dim=0) == SMALL


def test_nvidias_sample_graph_is_read_under_its_own_names():
    graph = graph_from_document(nvidia_sample(), projection_dim=0, source="sample")
    assert graph.config == DcnConfig(embedding_dim=16, num_cross_layers=6, tower=(1024, 1024), dropout=0.5)
    assert graph.table == EmbeddingTable(workspace_mb=267, max_vocabulary_size=1458176, update_type="Global")


def test_table_for_rows_has_the_smallest_workspace_that_holds_them():
    adam = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7}
    # NVIDIA's sample gives 267 MiB to 1,221,286 categories; 224 would do: 223 hold 1,217,877 rows.
    table = EmbeddingTable.for_rows(1_221_286, 16, **adam)
    assert (table.workspace_mb, table.max_vocabulary_size) == (224, 224 * 2**20 // (3 * 4 * 16))


configs = st.builds(
    DcnConfig,
    embedding_dim=st.integers(1, 64),
    num_cross_layers=st.integers(1, 8),
    tower=st.lists(st.integers(1, 2048), min_size=1, max_size=4).map(tuple),
    dropout=st.integers(0, 99).map(lambda percent: percent / 100),
    projection_dim=st.integers(0, 64),
)
tables = st.builds(
    EmbeddingTable,
    workspace_mb=st.integers(1, 10**6),
    max_vocabulary_size=st.integers(1, 2**40),
    slot_sizes=st.none() | st.lists(st.integers(1, 10**7), min_size=26, max_size=26).map(tuple),
    type=st.sampled_from([LOCALIZED, "DistributedSlotSparseEmbeddingHash"]),
    update_type=st.sampled_from(["Local", "Global", "LazyGlobal"]),
)


@given(config=configs, table=tables)
def test_any_network_survives_its_graph(config, table):
    document = json.loads(json.dumps(graph_document(Graph(config=config, table=table))))
    graph = graph_from_document(document, projection_dim=config.projection_dim, source="graph")
    assert graph == Graph(config=config, table=table)


@given(config=configs)
def test_layers_with_weights_stand_in_the_dense_files_order(config):
    """Sizes follow the tensors through the layers, and those with weights give `dense_layout`'s shapes in its order."""
    width = {"embeddings": NUM_CATEGORICAL * config.embedding_dim, "dense": 13, "label": 1}
    shapes = []
    for layer in dcn_layers(config):
        fan_in = sum(width.pop(name) for name in layer.bottoms)  # each tensor is read once, so no Slice is put in
        arguments = dict(layer.arguments)
        if layer.type == "InnerProduct":
            fan_out = arguments.pop("num_output")
            shapes += [(fan_in, fan_out), (fan_out,)]
            width[layer.tops[0]] = fan_out
        elif layer.type == "MultiCross":
            rank = arguments.pop("projection_dim")
            one = [(fan_in, rank), (rank, fan_in), (fan_in,)] if rank else [(fan_in,), (fan_in,)]
            shapes += one * arguments.pop("num_layers")
            width[layer.tops[0]] = fan_in
        elif layer.type == "Slice":
            for top, (start, end) in zip(layer.tops, arguments.pop("ranges")):
                assert (start, end) == (0, fan_in)
                width[top] = end
        else:
            if layer.type == "Reshape":
                assert arguments.pop("leading_dim") == fan_in
            if layer.type == "Dropout":
                assert arguments.pop("dropout_rate") == config.dropout
            width[layer.tops[0]] = fan_in
        assert not arguments
    assert shapes == [shape for _, shape in dense_layout(config)]
    assert set(width) == {"loss"}


def test_rank_that_hugectr_does_not_write_comes_from_the_caller():
    config = DcnConfig(projection_dim=7)
    document = graph_document(Graph(config=config, table=SMALL.table))
    assert document["layers"][5]["mc_param"] == {"num_layers": 3, "projection_dim": 7}
    with pytest.raises(ContractError, match=r"layers\[5\]: mc_param: projection_dim is 7, expected 0"):
        graph_from_document(document, projection_dim=0, source="graph")
    del document["layers"][5]["mc_param"]["projection_dim"]
    assert graph_from_document(document, projection_dim=7, source="graph").config == config


def change(path, value):
    """The sample with `value` at `path`; None removes the key."""
    document = copy.deepcopy(nvidia_sample())
    *way, last = path
    place = document
    for word in way:
        place = place[word]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


CROSS, FIRST, DROPOUT, LAST = 5, 6, 8, 13
REFUSED = [
    (["layers"], None, r"lacks|missing keys \['layers'\]"),
    (["layers"], [], "has 0 layers"),
    (["layers"], {}, r"layers is \{\}, expected a list"),
    (["solver"], {"lr": 1}, r"keys \['solver'\]"),
    (["layers", 0, "type"], "Input", r"layers\[0\]: type is 'Input', expected 'Data'"),
    (["layers", 0, "label", "label_dim"], 2, r"layers\[0\]: label: label_dim is 2, expected 1"),
    (["layers", 0, "label"], "label", r"layers\[0\]: label is 'label', expected a JSON object"),
    (["layers", 0, "dense", "dense_dim"], 12, "dense_dim is 12, expected 13"),
    (["layers", 0, "sparse"], [], "has 0 sparse inputs, expected 1"),
    (["layers", 0, "sparse", 0, "slot_num"], 25, r"sparse\[0\]: slot_num is 25, expected 26"),
    (["layers", 0, "sparse", 0, "nnz_per_slot"], [1] * 25, r"nnz_per_slot is .* expected 26 numbers"),
    (["layers", 0, "sparse", 0, "nnz_per_slot"], [0] * 26, r"nnz_per_slot\[0\] is 0, expected a whole number"),
    (["layers", 0, "dense", "top"], "label", "writes tensor 'label', which another layer writes"),
    (["layers", 1, "type"], "HybridSparseEmbedding", r"layers\[1\]: type is 'HybridSparseEmbedding'"),
    (["layers", 1, "bottom"], "data2", r"layers\[1\]: bottom is 'data2', expected \['data1'\]"),
    (["layers", 1, "optimizer"], None, r"layers\[1\] has unknown or missing keys \['optimizer'\]"),
    (["layers", 1, "optimizer", "type"], "SGD", "optimizer: type is 'SGD', expected 'Adam'"),
    (["layers", 1, "optimizer", "adam_hparam", "beta1"], "0.9", "beta1 is '0.9', expected a number"),
    (["layers", 1, "optimizer", "adam_hparam", "beta1"], float("nan"), "beta1 is nan, expected a number that float32"),
    (["layers", 1, "optimizer", "adam_hparam", "beta2"], 1.5, r"beta2 is 1\.5, expected a share in \[0, 1\)"),
    (["layers", 1, "optimizer", "adam_hparam", "epsilon"], 10**400, "epsilon is 10*, expected a number that float32"),
    (["layers", 1, "sparse_embedding_hparam", "max_vocabulary_size_global"], 2**63, "at least 1 that 63 bits hold"),
    (["layers", 1, "sparse_embedding_hparam", "combiner"], "mean", "combiner is 'mean', expected 'sum'"),
    (["layers", 1, "sparse_embedding_hparam", "embedding_vec_size"], 16.0, "embedding_vec_size is 16.0"),
    (["layers", 1, "sparse_embedding_hparam", "embedding_vec_size"], 8, "leading_dim is 416, expected 208"),
    (["layers", 1, "sparse_embedding_hparam", "slot_size_array"], [1] * 25, "has 25 slot sizes, expected 26"),
    (["layers", 2, "time_step"], 3, r"layers\[2\]: time_step is 3, expected 0"),
    (["layers", 2, "type"], None, r"layers\[2\] lacks 'type'"),
    (["layers", 3, "axis"], 2, r"layers\[3\]: axis is 2, expected 1"),
    (["layers", 3, "bottom"], ["dense", "reshape1"], r"layers\[3\]: bottom is \['dense', 'reshape1'\]"),
    (["layers", 4, "ranges"], [[0, 429], [0, 428]], r"layers\[4\]: ranges is"),
    (["layers", 4, "top"], ["concat1_slice0"], r"layers\[4\]: top is .* expected 2 names"),
    (["layers", 4, "top"], ["x", 3], r"layers\[4\]: top is .* expected 2 names"),
    (["layers", CROSS, "mc_param", "num_layers"], 0, "num_layers is 0, expected a whole number of at least 1"),
    (["layers", CROSS, "bottom"], "concat1", r"layers\[5\]: bottom is 'concat1', expected \['concat1_slice0'\]"),
    (["layers", FIRST, "type"], "BatchNorm", r"layers\[6\]: type is 'BatchNorm', expected 'Reshape' or"),
    (["layers", FIRST, "fc_param", "num_output"], True, "num_output is True"),
    (["layers", FIRST, "fc_param", "use_bias"], False, r"keys \['use_bias'\]"),
    (["layers", DROPOUT, "rate"], 0.25, r"rate is 0.5, expected 0.25"),
    (["layers", DROPOUT], None, r"has layers \[.*\], expected \["),
    (["layers", LAST, "fc_param", "num_output"], 2, r"layers\[13\]: fc_param: num_output is 2, expected 1"),
    (["layers", 14, "bottom"], ["label", "fc3"], r"layers\[14\]: bottom is"),
    (["layers", 14, "regularizer"], "L2", r"layers\[14\] has unknown or missing keys \['regularizer'\]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "said"), REFUSED, ids=[f"{p[1:]} {v}" for p, v, _ in REFUSED])
def test_another_network_is_refused_by_the_place_where_it_differs(path, value, said):
    with pytest.raises(ContractError, match=said) as refused:
        graph_from_document(change(path, value), projection_dim=0, source="graph dcn.json")
    assert str(refused.value).startswith("graph dcn.json")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"layers": 1}'], ids=str)
def test_unreadable_graph_is_refused_by_name(tmp_path, content):
    path = tmp_path / "dcn.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ContractError, match="dcn.json"):
        read_graph(path, projection_dim=0)


def places(value, way=()):
    """Every way into a document."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for word, part in parts:
        yield [*way, word]
        yield from places(part, (*way, word))


STRANGE = [True, 0, -1, 1.5, float("nan"), float("inf"), 10**400, "x", "", [], {}, [[]], {"a": 1}, "Relu"]


def test_no_value_at_any_place_leads_anywhere_but_to_a_graph_or_a_refusal():
    for path in places(nvidia_sample()):
        for value in [None, *STRANGE]:
            # Any other error ends the test.
            with suppress(ContractError):
                graph = graph_from_document(change(path, value), projection_dim=0, source="graph dcn.json")
                assert 0 <= graph.table.beta1 < 1
                assert 0 <= graph.table.beta2 < 1
                assert 1 <= graph.table.workspace_mb < 2**63
