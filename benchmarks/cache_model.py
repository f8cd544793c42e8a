"""Requests and models for the benchmark of the cache.

One server serves two networks, each with and without the cache. Rows are drawn from the demo's
simulator, and their categories form the vocabularies. The weights are untrained, because training
does not change the cost of a model or the cost of hashing its requests.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client

from benchmarks.initial_model import write_initial_model
from benchmarks.serving_model import CONFIG, NUM_FITTED, drawn_features
from demo.simulation.simulator import Simulator
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.serving import INPUT_TYPES, named_inputs
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.networks.files import NETWORK_FILE
from evergreen.serving.graph.export import read_network, write_graph
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import GOLDEN_FILE, assemble
from evergreen.serving.repository.triton_config import ServingOptions, triton_config
from inference_client.rows import FeatureRows

NETWORKS = {"demo": CONFIG, "sample": replace(CONFIG, num_cross_layers=6, tower=(1024, 1024))}
"""Networks by name. `demo` is the network of `make demo`, and `sample` is the network of NVIDIA's
DCN sample."""
PLAIN, CACHED = "plain", "cached"
CACHE_BYTES = 256 * 2**20
"""Cache size in bytes, enough for every response, so that nothing is evicted."""


def write_models(
    repository: Path, network: str, *, simulator: Simulator, scratch: Path
) -> list[str]:
    """Write the network as two models that differ only in the cache, and return their names."""
    config, workflow = NETWORKS[network], _workflow(simulator)
    weights, graph = scratch / f"weights {network}", scratch / f"graph {network}"
    table = write_initial_model(weights, config, workflow.slot_sizes, seed=0).table
    graph.mkdir()
    write_graph(
        graph, workflow, [table], network=read_network(weights / NETWORK_FILE), name=network
    )
    rows = drawn_features(simulator, 1, seed=9)
    golden = GoldenRows(
        features=CRITEO,
        dense=rows.dense,
        categorical=rows.categorical,
        expected=np.zeros(1, np.float32),
    )
    golden.save(graph / GOLDEN_FILE)
    names = []
    for kind in (PLAIN, CACHED):
        name = f"{network}_{kind}"
        options = ServingOptions(response_cache=kind == CACHED, warmup_rows=0)
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        for file, content in assemble(1, graph, options).items():
            (folder / file).write_bytes(
                content if isinstance(content, bytes) else content.read_bytes()
            )
        (repository / name / "config.pbtxt").write_text(
            triton_config(name, options, [1], features=CRITEO)
        )
        names.append(name)
    return names


def _workflow(simulator: Simulator) -> FeatureWorkflow:
    columns = drawn_features(simulator, NUM_FITTED, seed=1).categorical.T
    return FeatureWorkflow(
        features=CRITEO,
        vocabularies=tuple(np.unique(c[c != MISSING_CATEGORY]) for c in columns),
        means=np.full(13, 1.5, np.float32),
        stds=np.ones(13, np.float32),
        frequency_threshold=1,
    )


class RequestStream:
    """Prepared requests of `num_rows` simulated rows.

    The first feature value of a request is a counter, so each request is unique.
    """

    def __init__(self, simulator: Simulator, num_rows: int) -> None:
        self._drawn = drawn_features(simulator, max(1024, num_rows), seed=4)
        self._num_rows, self._number = num_rows, 0

    def fresh(self, count: int) -> list[list[Any]]:
        """Return `count` requests that were never sent before."""
        return [self._number_next() for _ in range(count)]

    def _number_next(self) -> list[Any]:
        self._number += 1
        at = np.random.default_rng(self._number).integers(0, len(self._drawn.dense), self._num_rows)
        rows: FeatureRows = self._drawn.take(at)
        rows.dense[0, 0] = self._number
        request = []
        for tensor, values in named_inputs(rows.dense, rows.categorical).items():
            request.append(grpc_client.InferInput(tensor, list(values.shape), INPUT_TYPES[tensor]))
            request[-1].set_data_from_numpy(values)
        return request


def repeating_share(simulator: Simulator, num_rows: int) -> float:
    """Return the share of repeated requests in the demo's traffic, with one row per request.

    This share is the hit rate that the traffic would have.
    """
    rows = drawn_features(simulator, num_rows, seed=1)
    whole = np.concatenate([rows.dense.view(np.uint8), rows.categorical.view(np.uint8)], axis=1)
    return 1 - len({row.tobytes() for row in whole}) / num_rows
