"""Export the feature workflow and the network as one ONNX graph from raw features to probability.

The input is a fitted `FeatureWorkflow` and a model's weights, and the graph has the tensors of
`evergreen.contracts.serving`. The graph contains the whole encoding, so serving cannot encode
differently from training. `evergreen.serving.graph.encoding` adds the encoding's nodes. The network
comes from `network.onnx`, which is stored with the weights of every registered model
(`evergreen.networks.files`). The network's graph is unchanged, except for a prefix on its names.
`evergreen.serving.graph.parts` writes the files, `evergreen.serving.parity` checks the scores, and
`evergreen.serving.repository` publishes the graph.

The tables are stored in `model.data`. The size of the tables is limited by the disk, by the memory
of this process and by the memory of the server. A graph has at most
`evergreen.serving.graph.encoding.MAX_KEYS` vocabulary entries.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from evergreen.config.features import MISSING_CATEGORY
from evergreen.config.release import FLOAT32, served_tables
from evergreen.contracts.manifests import Model
from evergreen.contracts.serving import CATEGORICAL_INPUT, PROBABILITY_OUTPUT, input_tensors
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.networks.files import NETWORK_FILE, Table, open_model, require_rows, tables_of
from evergreen.networks.rounding import RoundedTable, round_table
from evergreen.runtime.durable import sha256_tree
from evergreen.runtime.errors import ContractError, first_line
from evergreen.serving.graph.encoding import DENSE, PREFIX, encode_categorical, encode_dense
from evergreen.serving.graph.parts import OPSET, Parts
from evergreen.storage.uris import local_path

EMBEDDINGS, LOGIT = f"{PREFIX}embeddings", f"{PREFIX}logit"
"""Names of the network's tensors in the served graph: the embeddings in the shape that
`Network.forward` expects, and the logit [n]. `DENSE` is the dense input."""


def write_graph(
    folder: Path,
    workflow: FeatureWorkflow,
    values: Sequence[NDArray[np.float32]],
    *,
    network: Any,
    name: str,
    widths: Sequence[int] = (),
    numbers: str = FLOAT32,
) -> None:
    """Write the encoding, the lookup and the network into `folder` as one graph.

    The output is deterministic. Tables in a number type other than float32 are rounded, and the
    rounded tables stay in memory until they are written.

    Args:
        folder: Folder for the files.
        workflow: Fitted feature workflow.
        values: Embedding vectors of all ids, one array per table of `tables_of`.
        network: Network's graph, see `read_network`.
        name: Name of the graph.
        widths: Embedding widths, see `tables_of`.
        numbers: Number type of the stored tables (`rounding.TABLE_TYPES`).

    Raises:
        ContractError: the tables do not fit the workflow, or exceed the limits of a graph.
    """
    tables = tables_of(workflow.features.id_positions, widths)
    require_rows(values, tables, workflow.slot_sizes)
    parts = Parts(input_tensors(workflow.features))
    encode_dense(parts, workflow)
    encode_categorical(parts, workflow, tables)
    _add_vectors(parts, workflow, [round_table(each, numbers) for each in values], tables=tables)
    _add_network(parts, network)
    parts.write(folder, name)


def _add_vectors(
    parts: Parts,
    workflow: FeatureWorkflow,
    values: Sequence[RoundedTable],
    *,
    tables: Sequence[Table],
) -> None:
    """Add the network's embeddings.

    The embeddings of a single table have the shape [n, F, E]. The vectors of several tables are
    joined to [n, 1, X].
    """
    weights = _add_weights(parts, workflow) if workflow.features.lists else ""
    if len(tables) == 1:
        _look_up(parts, values[0], tables[0], weights=weights, rows="table_rows", output=EMBEDDINGS)
        return
    flat, at, positions = [], 0, {}
    for value, table in zip(values, tables):
        width = value.values.shape[1]
        columns = parts.constant(f"columns/{width}", np.array(table.columns))
        rows = parts.node("Gather", ["table_rows", columns], f"table_rows/{width}", axis=1)
        of_lists = ""
        if table.positions.lists:
            raw = np.array(
                [each for each in table.columns if each < len(workflow.features.position_names)]
            )
            of_lists = parts.node(
                "Gather",
                [weights, parts.constant(f"raw_columns/{width}", raw)],
                f"weights/{width}",
                axis=1,
            )
        found = _look_up(
            parts,
            value,
            table,
            weights=of_lists,
            rows=rows,
            output=f"vectors/{width}",
            suffix=f"/{width}",
        )
        shape = parts.constant(f"flat_shape/{width}", np.array([-1, len(table.vectors) * width]))
        flat.append(parts.node("Reshape", [found, shape], f"flat_vectors/{width}"))
        for vector in table.vectors:
            positions[vector] = np.arange(at, at := at + width)
    order = parts.constant(
        "vector_order", np.concatenate([positions[vector] for vector in range(len(positions))])
    )
    by_width = parts.node("Concat", flat, "vectors_by_width", axis=1)
    in_order = parts.node("Gather", [by_width, order], "vectors_in_order", axis=1)
    parts.node("Unsqueeze", [in_order, parts.constant("one_vector", np.array([1]))], EMBEDDINGS)


def _add_weights(parts: Parts, workflow: FeatureWorkflow) -> str:
    """Add the weight [n, positions] of each list position.

    The weight is 0 if the position has no element.
    """
    missing = parts.constant("no_element", np.array(MISSING_CATEGORY))
    absent = parts.node("Equal", [CATEGORICAL_INPUT, missing], "is_absent")
    excluded = parts.constant(
        "places_excluded", np.isin(workflow.features.position_features, workflow.excluded)
    )
    present = parts.node("Not", [parts.node("Or", [absent, excluded], "is_left_out")], "is_present")
    return parts.node("Cast", [present], "weights", to=TensorProto.FLOAT)


def _look_up(
    parts: Parts,
    value: RoundedTable,
    table: Table,
    *,
    weights: str,
    rows: str,
    output: str,
    suffix: str = "",
) -> str:
    """Add the nodes that look up the vectors of one table and pool lists.

    The result `output` has the shape [n, F, E]. Each list is pooled to one vector.

    A list is pooled by multiplying its weights [n, 1, positions] by its vectors.

    Args:
        parts: Graph to extend.
        value: Values of the table.
        table: Columns and lists of the table.
        weights: Name of the tensor of list weights.
        rows: Name of the tensor of the table's rows.
        output: Name of the result.
        suffix: Ending that makes the names of inner tensors unique per table.
    """
    to = f"position_vectors{suffix}" if table.positions.lists else output
    vectors = _gather(
        parts, value, rows, num_positions=len(table.columns), output=to, suffix=suffix
    )
    if not table.positions.lists:
        return vectors
    axis = parts.constant(f"positions_axis{suffix}", np.array([1]))
    one = parts.constant(f"one_element{suffix}", np.array(1, np.float32))

    def slice_positions(source: str, name: str, part: slice) -> str:
        ends = [
            parts.constant(f"{name}_{end}", np.array([getattr(part, end)]))
            for end in ("start", "stop")
        ]
        return parts.node("Slice", [source, *ends, axis], name)

    chunks = [
        slice_positions(vectors, f"own_vectors{suffix}", slice(0, table.positions.lists[0].start))
    ]
    for i, (start, stop, pool) in enumerate(table.positions.lists):
        name = f"{i}{suffix}"
        of_list = slice_positions(weights, f"weights_{name}", slice(start, stop))
        if pool == "mean":
            count = parts.node("ReduceSum", [of_list, axis], f"count_{name}", keepdims=1)
            divisor = parts.node("Max", [count, one], f"divisor_{name}")
            of_list = parts.node("Div", [of_list, divisor], f"shares_{name}")
        row = parts.node("Unsqueeze", [of_list, axis], f"row_{name}")
        of_vectors = slice_positions(vectors, f"vectors_{name}", slice(start, stop))
        chunks.append(parts.node("MatMul", [row, of_vectors], f"pooled_{name}"))
    if stop < len(table.columns):
        chunks.append(
            slice_positions(vectors, f"bucket_vectors{suffix}", slice(stop, len(table.columns)))
        )
    return parts.node("Concat", chunks, output, axis=1)


def _gather(
    parts: Parts, table: RoundedTable, rows: str, *, num_positions: int, output: str, suffix: str
) -> str:
    """Look up each of the `rows` [n, num_positions], and add the vectors [n, num_positions, E].

    The result equals `RoundedTable.vectors`.
    """
    # ONNX Runtime cannot map an empty array, so an empty table is not stored in `model.data`.
    add = parts.table if len(table.values) else parts.constant
    values = add(f"embeddings{suffix}", table.values)
    if table.values.dtype == np.float32:
        return parts.node("Gather", [values, rows], output, axis=0)
    stored = parts.node("Gather", [values, rows], f"stored_vectors{suffix}", axis=0)
    if table.scales is None:
        return parts.node("Cast", [stored], output, to=TensorProto.FLOAT)
    steps = parts.node("Cast", [stored], f"steps{suffix}", to=TensorProto.FLOAT)
    # Scales are single numbers, so they are gathered by flat indices as in `encoding`.
    flat = parts.node(
        "Reshape",
        [rows, parts.constant(f"flat_rows{suffix}", np.array([-1]))],
        f"rows_flat{suffix}",
    )
    found = parts.node(
        "GatherElements",
        [add(f"scales{suffix}", table.scales.ravel()), flat],
        f"scales_flat{suffix}",
    )
    shape = parts.constant(f"scales_shape{suffix}", np.array([-1, num_positions, 1]))
    return parts.node(
        "Mul", [steps, parts.node("Reshape", [found, shape], f"row_scales{suffix}")], output
    )


def export(model: Model, folder: Path) -> None:
    """Write the graph of a stored model (`evergreen.registry.models`) into `folder`.

    Raises:
        ContractError: the model's files are absent, corrupt or different from its manifest. See
            also `write_graph`.
    """
    stored = local_path(model.uri)
    for part in (Model.WEIGHTS, Model.WORKFLOW):
        found = sha256_tree(stored / part)
        if found != model.sha256.get(part):
            raise ContractError(
                f"{stored / part} has sha256 {found}, expected {model.sha256.get(part)} as in its "
                "manifest"
            )
    workflow = FeatureWorkflow.load(stored / Model.WORKFLOW)
    if workflow.slot_sizes != model.slot_sizes:
        raise ContractError(
            f"model {model.model_id} has slot sizes {model.slot_sizes}, its workflow "
            f"{workflow.slot_sizes}"
        )
    weights = stored / Model.WEIGHTS
    write_graph(
        folder,
        workflow,
        open_model(weights, model.slot_sizes).weights.tables,
        network=read_network(weights / NETWORK_FILE),
        name=model.recommender.name,
        widths=model.config.get("widths", ()),  # some networks have no widths
        numbers=served_tables(model.recommender),
    )


def read_network(path: Path) -> Any:
    """Read the network's graph at `path`.

    Raises:
        ContractError: the file cannot be read, or its graph does not map dense values and
            embeddings to a logit.
    """
    try:
        network = onnx.load(str(path))
        onnx.checker.check_model(network)
    except Exception as error:  # protobuf's error for a corrupt message has no public class
        raise ContractError(f"network {path} cannot be read: {first_line(error)}") from error
    found = [value.name for value in (*network.graph.input, *network.graph.output)]
    if found != (expected := [name.removeprefix(PREFIX) for name in (DENSE, EMBEDDINGS, LOGIT)]):
        raise ContractError(f"network {path} has tensors {found}, expected {expected}")
    opsets = {opset.domain: opset.version for opset in network.opset_import}
    if opsets != {"": OPSET}:
        raise ContractError(
            f"network {path} has operator sets {opsets}, expected version {OPSET} of ONNX's own"
        )
    return network


def _add_network(parts: Parts, network: Any) -> None:
    """Add the network, which computes the probability [n, 1] from the encoding's result."""
    graph = onnx.compose.add_prefix(network, PREFIX).graph
    for tensor in graph.initializer:
        parts.constant(tensor.name, numpy_helper.to_array(tensor))
    parts.nodes.extend(graph.node)
    column = parts.constant("column", np.array([-1, 1]))
    logits = parts.node("Reshape", [LOGIT, column], "logits")
    parts.node("Sigmoid", [logits], PROBABILITY_OUTPUT.name)
