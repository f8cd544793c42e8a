"""Helpers that build served graphs in a temporary folder, change them and open them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from evergreen.registry.models import GRAPH_FILE
from evergreen.serving.graph.export import write_graph
from evergreen.serving.parity import open_graph


def open_built(workflow, tables, network, *, names=(), widths=(), numbers="float32"):
    """Open a session of the graph.

    The session's outputs are the inner values `names` and the probability, in this order.
    """
    with TemporaryDirectory() as folder:
        write_graph(
            Path(folder),
            workflow,
            tables,
            network=network,
            name="any",
            widths=widths,
            numbers=numbers,
        )
        graph = Path(folder) / GRAPH_FILE
        return open_graph(with_inner_values(graph, names) if names else graph)


def with_inner_values(graph, names):
    """Return a changed graph that also outputs its inner values `names`."""
    model = onnx.load(graph, load_external_data=False)
    del model.graph.output[:]
    model.graph.output.extend(
        map(onnx.helper.make_empty_tensor_value_info, [*names, "probability"])
    )
    inner = graph.with_name("inner.onnx")  # The graph is next to the file of the tables.
    inner.write_bytes(model.SerializeToString())
    return inner


def run_graph(session, dense, categorical, names=None):
    return session.run(
        names, {DENSE_INPUT: np.asarray(dense), CATEGORICAL_INPUT: np.asarray(categorical)}
    )
