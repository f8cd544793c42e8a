"""Served graphs as bytes: built in a folder of their own, changed by a test, and opened from memory."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime

from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from components.deployment.graph.export import DEFAULT_LIMITS, write_graph
from components.store.models import GRAPH_FILE


def build_graph(workflow, table, network, *, limits=DEFAULT_LIMITS):
    """The message of a graph whose tables are small enough for it."""
    with TemporaryDirectory() as folder:
        write_graph(Path(folder), workflow, table, network=network, limits=limits)
        return (Path(folder) / GRAPH_FILE).read_bytes()


def open_bytes(graph):
    return onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])


def with_inner_values(graph, names):
    """The bytes of the graph that also answers with `names` of its inner values, before the probability."""
    model = onnx.load_from_string(graph)
    del model.graph.output[:]
    model.graph.output.extend(map(onnx.helper.make_empty_tensor_value_info, [*names, "probability"]))
    return model.SerializeToString()


def run_graph(session, dense, categorical, names=None):
    return session.run(names, {DENSE_INPUT.name: np.asarray(dense), CATEGORICAL_INPUT.name: np.asarray(categorical)})
