"""Compare the cost of a list with the cost of flat columns in the served graph.

Run by `make benchmark-lists`. ONNX Runtime runs three graphs one after the other, without a server.
The first graph has 26 columns. The second graph adds a list of up to 20 elements of the first
column, pooled by mean. The third graph adds 20 flat columns with their own vocabularies. The list
adds one vector to the network's input, and the flat columns add 20 vectors. Prints the time of a
response, and writes all figures as JSON.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime import InferenceSession

from benchmarks.command import benchmark_parser, documented
from benchmarks.spread import Figure, spread
from evergreen.config.features import MISSING_CATEGORY, Features, ListOptions
from evergreen.config.model import DcnConfig
from evergreen.contracts.serving import named_inputs
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.networks.network import build_network, export_onnx
from evergreen.registry.models import GRAPH_FILE
from evergreen.serving.graph.export import write_graph
from evergreen.serving.parity import open_graph

_COLUMNS = tuple(f"c{i}" for i in range(26))
_LENGTH, _CATEGORIES, _WIDTH = 20, 10_000, 16
MODELS = {
    "columns": Features(numeric=(), categorical=_COLUMNS),
    "list": Features(
        numeric=(),
        categorical=_COLUMNS,
        lists=("last",),
        list_options={"last": ListOptions(max=_LENGTH, table="c0", pool="mean")},
    ),
    "flat": Features(numeric=(), categorical=(*_COLUMNS, *(f"flat{i}" for i in range(_LENGTH)))),
}
_BATCHES = (1, 64, 1024)
_MOST_ROWS = 4096
_ROUNDS, _QUICK_ROUNDS = 15, 3
_SECONDS, _QUICK_SECONDS = 0.4, 0.05
"""Seconds for which each graph runs in a round."""


class TimedGraph:
    """One graph with its input rows."""

    def __init__(self, features: Features, folder: Path, *, provider: str | None = None) -> None:
        """Write and open the graph with random weights, which do not change its speed.

        `provider` is an execution provider of ONNX Runtime. None selects the CPU provider, which
        production uses.
        """
        random = np.random.default_rng(7)
        workflow = FeatureWorkflow(
            features=features,
            vocabularies=tuple(np.arange(_CATEGORIES) for _ in features.slots),
            means=np.zeros(0, np.float32),
            stds=np.ones(0, np.float32),
            frequency_threshold=1,
        )
        vectors = len(features.vector_names)
        config = DcnConfig(
            num_dense=0, num_categorical=vectors, embedding_dim=_WIDTH, num_cross_layers=3
        )
        table = random.normal(0, 0.1, (sum(workflow.slot_sizes), _WIDTH)).astype(np.float32)
        network = onnx.load_from_string(export_onnx(build_network(config).eval(), config))
        write_graph(folder, workflow, [table], network=network, name="benchmark")
        path = folder / GRAPH_FILE
        self._session = (
            open_graph(path) if provider is None else InferenceSession(path, providers=[provider])
        )
        self._rows = random.integers(0, _CATEGORIES, (_MOST_ROWS, len(features.position_names)))
        for start, stop, _ in features.positions.lists:
            lengths = random.integers(0, stop - start + 1, (len(self._rows), 1))
            self._rows[:, start:stop][np.arange(stop - start) >= lengths] = MISSING_CATEGORY

    def score(self, num_rows: int) -> NDArray[np.float32]:
        """Return the probabilities [n] of the first rows."""
        inputs = named_inputs(np.zeros((num_rows, 0), np.float32), self._rows[:num_rows])
        scores: NDArray[np.float32] = self._session.run(None, inputs)[0]
        return scores

    def response_ms(self, num_rows: int, seconds: float) -> float:
        """Return the mean time of a response for `num_rows` rows in milliseconds."""
        inputs = named_inputs(np.zeros((num_rows, 0), np.float32), self._rows[:num_rows])
        self._session.run(None, inputs)
        count, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            self._session.run(None, inputs)
            count += 1
        return 1000 * passed / count


def measure(num_rows: int, graphs: dict[str, TimedGraph], *, is_quick: bool) -> dict[str, Any]:
    """Return the figures of one batch size."""
    rounds, seconds = (_QUICK_ROUNDS, _QUICK_SECONDS) if is_quick else (_ROUNDS, _SECONDS)
    latencies: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, each in graphs.items():
            latencies[name].append(each.response_ms(num_rows, seconds))
    ratio = [with_list / flat for with_list, flat in zip(latencies["list"], latencies["flat"])]
    for name, values in latencies.items():
        print(f"{num_rows} rows, {name}: {spread(values).shown()} ms")
    return {
        "rows": num_rows,
        "ms": {name: spread(values) for name, values in latencies.items()},
        "ratio": spread(ratio),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return 0."""
    flags = benchmark_parser("lists", __doc__, quick="shorter rounds").parse_args(argv)
    with documented(flags) as document, tempfile.TemporaryDirectory() as folder:
        graphs = {name: TimedGraph(each, Path(folder) / name) for name, each in MODELS.items()}
        document["batches"] = [measure(each, graphs, is_quick=flags.quick) for each in _BATCHES]
        for batch in document["batches"]:
            what = f"answer to {batch['rows']} rows"
            document["figures"] += [
                Figure(f"{what}, with a list", batch["ratio"], peer="20 flat columns", target=1.0),
                *(Figure(f"{what}, {name}", value, "ms") for name, value in batch["ms"].items()),
            ]
    return 0


if __name__ == "__main__":
    sys.exit(main())
