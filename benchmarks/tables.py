"""Measure the savings and the costs of served tables in float16 and int8.

Run by `make benchmark-tables` after `make demo`.

Quality: each model of the demo is exported in each number type. The graph of each model scores the
raw held-out rows of its run, as a server would. The figures are AUC and log loss. For float16 and
int8, the change of the AUC against float32 has a confidence interval, computed by request.

Speed: a table of 10 million vectors of width 16 is served in each number type. Requests are
uniformly random, so that nearly every vector misses the processor's caches. ONNX Runtime in this
process and the laptop's Triton serve the tables alternately. Prints all figures, and writes them as
JSON.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.command import benchmark_parser, documented
from benchmarks.load import closed_loop, run_precisely
from benchmarks.measured_servers import MeasuredServer
from benchmarks.serving_runs import BATCHES, Alone, over_rounds, ratios, summary
from benchmarks.spread import Figure
from components.evaluation.scoring import raw_batches
from demo.environments import REPOSITORY
from demo.triton import TritonServer
from evergreen.config.release import FLOAT32, TABLE_TYPES
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.manifests import Model, RawDataset
from evergreen.contracts.serving import CODE_FILE, CONFIG_FILE, named_inputs
from evergreen.contracts.workflow import FeatureWorkflow
from evergreen.networks.files import NETWORK_FILE
from evergreen.registry.models import DATA_FILE, GRAPH_FILE
from evergreen.runtime.durable import write_whole
from evergreen.serving.graph.export import export, read_network, write_graph
from evergreen.serving.parity import open_graph
from evergreen.serving.repository.triton_config import ServingOptions, triton_config
from evergreen.statistics.metrics import auc_difference, log_loss, roc_auc
from evergreen.storage.uris import local_path
from inference_client.rows import FeatureRows

_ROWS, _QUICK_ROWS, _WIDTH = 10_000_000, 1_000_000, 16
_ROUNDS, _SECONDS = 7, 0.5
"""Number of rounds, and seconds per round for each number type and batch size."""
_NUM_REQUEST_ROWS = 65_536
SERVED_MODEL = REPOSITORY / "evergreen/serving/served_model.py"
IN_PROCESS, TRITON = "onnxruntime", "triton"


def quality(demo: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Return the figures of every demo model in every number type."""
    for manifest in sorted(demo.glob("artifacts/*/training/model")):
        model = Model.read(manifest)
        raw = RawDataset.read(manifest.parents[1] / "validation/valid_dataset")
        batches = list(raw_batches(local_path(raw.holdout_uri), raw.recommender.features))
        labels, requests = (
            np.concatenate([getattr(each, name) for each in batches])
            for name in ("labels", "requests")
        )
        plain = None
        for numbers in TABLE_TYPES:
            folder = scratch / f"{model.model_id}-{numbers}"
            folder.mkdir()
            export(
                replace(
                    model, recommender=model.recommender.with_settings({"release.tables": numbers})
                ),
                folder,
            )
            session = open_graph(folder / GRAPH_FILE)
            scores = np.concatenate(
                [
                    session.run(None, named_inputs(each.dense, each.categorical))[0].ravel()
                    for each in batches
                ]
            )
            plain = scores if plain is None else plain
            figures = {
                "model": model.model_id,
                "table_rows": sum(model.slot_sizes),
                "numbers": numbers,
                "data_bytes": (folder / DATA_FILE).stat().st_size,
                "rows": len(labels),
                "auc": roc_auc(labels, scores),
                "log_loss": log_loss(labels, scores),
                "largest_difference": float(np.abs(scores - plain).max()),
            }
            if numbers != FLOAT32 and (
                found := auc_difference(labels, scores, plain, groups=requests)
            ):
                figures["auc_difference"] = found._asdict()
            print(", ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
            yield figures


def write_large(demo: Path, repository: Path, num_rows: int) -> FeatureRows:
    """Write models with a table of `num_rows` random vectors in each number type.

    The models are written to `repository`, from which a server loads them. Returns rows for
    requests to these models.
    """
    random, size = np.random.default_rng(7), num_rows // len(CRITEO.categorical)
    workflow = FeatureWorkflow(
        features=CRITEO,
        vocabularies=tuple(np.arange(size) for _ in CRITEO.slots),
        means=np.zeros(len(CRITEO.numeric), np.float32),
        stds=np.ones(len(CRITEO.numeric), np.float32),
        frequency_threshold=1,
    )
    table = random.standard_normal((sum(workflow.slot_sizes), _WIDTH), np.float32) * np.float32(0.1)
    network = read_network(
        next(iter(sorted(demo.glob("store/models/*")))) / Model.WEIGHTS / NETWORK_FILE
    )
    for numbers in TABLE_TYPES:
        folder = repository / numbers / "1"
        folder.mkdir(parents=True)
        write_graph(folder, workflow, [table], network=network, name=numbers, numbers=numbers)
        write_whole(folder / CODE_FILE, SERVED_MODEL.read_bytes())
        config = triton_config(numbers, ServingOptions(), [1], features=CRITEO)
        write_whole(repository / numbers / CONFIG_FILE, config)
    dense = random.exponential(3.0, (_NUM_REQUEST_ROWS, len(CRITEO.numeric))).astype(np.float32)
    return FeatureRows(
        dense=dense,
        categorical=random.integers(0, size, (_NUM_REQUEST_ROWS, len(CRITEO.categorical))),
    )


def speed(repository: Path, rows: FeatureRows, log: Path) -> dict[str, Any]:
    """Return the summaries of all rounds, by server, batch size and number type."""
    sizes: dict[str, Any] = {}
    alone = {}
    for numbers in TABLE_TYPES:
        before = machine.own_memory("RssAnon")
        alone[numbers] = Alone(repository / numbers / "1" / GRAPH_FILE, rows, 1)
        sizes[numbers] = {
            "data_bytes": (repository / numbers / "1" / DATA_FILE).stat().st_size,
            "opened_bytes": machine.own_memory("RssAnon") - before,
        }
        print(numbers, sizes[numbers])
    runs: dict[str, Any] = {}
    with TritonServer(repository, log=log) as server:
        for _ in range(_ROUNDS):
            for batch in BATCHES:
                of_batch = runs.setdefault(str(batch), {IN_PROCESS: {}, TRITON: {}})
                for numbers in TABLE_TYPES:
                    responses = alone[numbers].run(batch, _SECONDS)
                    of_batch[IN_PROCESS].setdefault(numbers, []).append(summary(responses, batch))
                    responses = run_precisely(
                        _closed_loop_on(
                            MeasuredServer(TRITON, server.grpc_url, numbers), rows, batch
                        )
                    )
                    of_batch[TRITON].setdefault(numbers, []).append(summary(responses, batch))
    return {"sizes": sizes, "runs": runs}


async def _closed_loop_on(server: MeasuredServer, rows: FeatureRows, batch: int) -> Any:
    caller = server.connect(rows, batch)
    await caller(0)
    responses = await closed_loop(caller, 1, _SECONDS)
    await caller.close()
    return responses


def _print_speed(runs: dict[str, Any]) -> None:
    for batch, of_batch in runs.items():
        for who, of_numbers in of_batch.items():
            for numbers, rounds in of_numbers.items():
                ratio = ratios(rounds, of_numbers[FLOAT32], "p50_ms").shown()
                p50, p99 = (over_rounds(rounds, name).shown() for name in ("p50_ms", "p99_ms"))
                print(
                    f"{batch} rows, {who}, {numbers}: p50 {p50} ms, p99 {p99} ms, p50 over "
                    f"float32's {ratio}"
                )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return 0."""
    parser = benchmark_parser("tables", __doc__, quick="a table of 1 million vectors")
    parser.add_argument(
        "--demo", default="build/demo", help="the demo's folder (default: %(default)s)"
    )
    flags = parser.parse_args(argv)
    num_rows = _QUICK_ROWS if flags.quick else _ROWS
    with documented(flags) as document, tempfile.TemporaryDirectory() as folder:
        scratch, demo = Path(folder), Path(flags.demo)
        document["quality"] = list(quality(demo, scratch))
        rows = write_large(demo, scratch / "repository", num_rows)
        document["table_rows"] = num_rows
        document |= speed(scratch / "repository", rows, scratch / "triton.log")
        _print_speed(document["runs"])
        document["figures"] = [
            Figure(
                f"{batch} rows, {who}, {numbers}, p50",
                ratios(rounds, of_numbers[FLOAT32], "p50_ms"),
                peer=FLOAT32,
            )
            for batch, of_batch in document["runs"].items()
            for who, of_numbers in of_batch.items()
            for numbers, rounds in of_numbers.items()
            if numbers != FLOAT32
        ]
    return 0


if __name__ == "__main__":
    sys.exit(main())
