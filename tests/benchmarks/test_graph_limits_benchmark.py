"""The graph's limits: that the benchmark opens what it says it opens, and compares like with like."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from benchmarks import graph_limits
from components.contracts.criteo import MISSING_CATEGORY
from components.contracts.serving import CATEGORICAL_INPUT
from components.deployment.graph.export import GraphLimits
from components.deployment.graph.parity import open_graph


def test_both_encoders_are_measured_on_the_same_entries(tmp_path):
    by_name = {row["encoder"]: row for row in graph_limits.vocabularies(26_000, tmp_path)}
    assert by_name.keys() == graph_limits.ENCODERS.keys()
    for name, row in by_name.items():
        operators = {node.op_type for node in onnx.load(str(tmp_path / name / "model.onnx")).graph.node}
        assert ("LabelEncoder" in operators) == (name == "LabelEncoder")
        assert not operators & {"Gemm", "Log"}
        assert min(row["seconds_to_open"], row["nanoseconds_per_value"], row["files"]) > 0
    assert by_name["hash table"]["mapped"] > 26_000 * 12
    assert by_name["LabelEncoder"]["mapped"] == 0


def test_the_encoding_alone_answers_as_the_whole_graph_would(tmp_path):
    workflow = graph_limits._workflow(2600)
    graph = graph_limits._write(tmp_path, workflow, graph_limits.TINY, GraphLimits())
    graph_limits._keep_only_encoding(graph)
    categorical = np.full((2, 26), MISSING_CATEGORY)
    categorical[1] = [vocabulary[5] for vocabulary in workflow.vocabularies]
    [rows] = open_graph(graph).run(None, {CATEGORICAL_INPUT.name: categorical})
    offsets = np.cumsum([0, *workflow.slot_sizes[:-1]])
    np.testing.assert_array_equal(rows - offsets, workflow.encode_categorical(categorical))


def test_an_estimate_stands_beside_what_a_process_held(tmp_path):
    first = next(iter(graph_limits.estimates(26_000, tmp_path)))
    assert first["measured"] > 0
    assert first["ratio"] == pytest.approx(first["estimate"] / first["measured"])
