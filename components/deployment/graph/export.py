"""One ONNX graph from raw features to probability: the feature workflow and the network, written down together.

Takes a fitted `FeatureWorkflow` and a model's weights, gives a graph with the tensors of `contracts.serving`. So
nothing is encoded outside the graph, and training and serving cannot encode differently. The encoding's nodes are
`graph.encoding`'s, the network's `graph.network`'s, the files `graph.parts`'; proving that the graph is right is left
to `parity`, whether it fits the server to `memory`, and where it goes to `repository`.

Limits, measured by `benchmarks/graph_limits.py`: a graph is one file up to `GraphLimits.inline_bytes` of tables;
beyond, the tables lie in `model.data`, whose size only the disk limits. What stops next is this process's memory,
which holds the table once while it writes it, then the server's (`memory`), then `graph.hash_table.MAX_KEYS`
vocabulary entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from components.contracts.dcn import DcnConfig
from components.contracts.manifests import Model
from components.contracts.model_files import ModelWeights, read_model
from components.contracts.workflow import FeatureWorkflow
from components.deployment.graph.encoding import encode_categorical, encode_dense
from components.deployment.graph.network import look_up, network
from components.deployment.graph.parts import Parts
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError
from components.storage.uris import local_path


@dataclass(frozen=True, kw_only=True)
class GraphLimits:
    """Sizes at which a graph is written in another form, which computes the same."""

    inline_bytes: int = 64 * 2**20
    """Most bytes of tables in `model.onnx` itself. Opening tables in the message takes twice their size and seconds per
    GB (4.2 s for 754 MiB); mapped from `model.data` it takes 10 ms, and instances share them."""
    label_encoder_entries: int = 2**20
    """Most vocabulary entries, of all slots together, for ONNX Runtime's LabelEncoder. Its hash map takes each instance
    60 to 75 bytes per entry, as much as a vector of 16 numbers, and a second to open for a few millions; the hash table
    in the graph takes 15 bytes, once, and 10 ms. Per value it is a third slower at 100,000 entries and no slower at
    30,000,000, where both wait for memory."""


DEFAULT_LIMITS = GraphLimits()


def build_graph(
    workflow: FeatureWorkflow, weights: ModelWeights, config: DcnConfig, limits: GraphLimits = DEFAULT_LIMITS
) -> bytes:
    """`workflow` followed by the network as one ONNX file, whatever its size; the same arguments give the same bytes.

    Raises:
        ContractError: the weights do not fit the workflow or `config`, or one file cannot hold them (`write_graph`).
    """
    return _parts(workflow, weights, config, limits).to_bytes()


def write_graph(
    folder: Path,
    workflow: FeatureWorkflow,
    weights: ModelWeights,
    config: DcnConfig,
    limits: GraphLimits = DEFAULT_LIMITS,
) -> None:
    """Writes the graph into `folder` as `graph.files` names it; the same arguments give the same bytes.

    Raises:
        ContractError: the weights do not fit the workflow or `config`, or are beyond what a graph can hold.
    """
    _parts(workflow, weights, config, limits).write(folder, inline_bytes=limits.inline_bytes)


def export(model: Model, folder: Path, limits: GraphLimits = DEFAULT_LIMITS) -> None:
    """Writes the graph of a stored model into `folder` (`graph.files`).

    Raises:
        ContractError: the model's files are absent, damaged or not those that its manifest names; as `write_graph`.
    """
    stored = local_path(model.uri)
    for part in (Model.WEIGHTS, Model.WORKFLOW):
        found = sha256_tree(stored / part)
        if found != model.sha256.get(part):
            raise ContractError(
                f"{stored / part} has sha256 {found}, expected {model.sha256.get(part)} as in its manifest"
            )
    workflow = FeatureWorkflow.load(stored / Model.WORKFLOW)
    if workflow.slot_sizes != model.slot_sizes:
        raise ContractError(
            f"model {model.model_id} has slot sizes {model.slot_sizes}, its workflow {workflow.slot_sizes}"
        )
    config = DcnConfig.from_document(model.config)
    weights = read_model(stored / Model.WEIGHTS, config, model.slot_sizes)
    write_graph(folder, workflow, weights, config, limits)


def _parts(workflow: FeatureWorkflow, weights: ModelWeights, config: DcnConfig, limits: GraphLimits) -> Parts:
    expected = (sum(workflow.slot_sizes), config.embedding_dim)
    if weights.embeddings.shape != expected:
        raise ContractError(
            f"embeddings have shape {weights.embeddings.shape}, expected {expected} from the workflow's vocabularies"
        )
    parts = Parts()
    encode_dense(parts, workflow)
    encode_categorical(parts, workflow, label_encoder_entries=limits.label_encoder_entries)
    look_up(parts, weights.embeddings)
    network(parts, weights.dense, config)
    return parts
