"""How large a served graph may grow, and what each way of writing it costs: a table per question.

    python -m benchmarks.graph_limits [--quick] [--json FILE]

1. Vocabularies: LabelEncoder against the graph's own hash table, by entries: seconds to open, memory that a process
   holds for itself and memory that it maps, bytes on disk, nanoseconds per value looked up. Only the encoding is
   opened; each case is opened in a process of its own, and the two are timed in turns on the same rows.
2. Tables in the message against tables beside it: seconds to open, memory, and the most memory while opening.
3. `memory.memory_needed` against what a process that served full batches really holds.

The limits that follow from them are `graph.GraphLimits`'.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx

from benchmarks import machine
from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.model_files import ModelWeights
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, MAX_BATCH_ROWS
from components.contracts.workflow import FeatureWorkflow
from components.deployment.graph.export import GraphLimits, write_graph
from components.deployment.graph.files import DATA_FILE, GRAPH_FILE, graph_bytes
from components.deployment.graph.memory import GraphSizes, memory_needed
from components.deployment.graph.parity import open_graph

MIB = 2**20
ENCODERS = {"LabelEncoder": 2**40, "hash table": 0}
"""Name -> entries up to which a LabelEncoder is written."""
TINY = DcnConfig(embedding_dim=1, num_cross_layers=1, tower=(1,))
_ROWS, _TURNS = 1024, 30


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, a minute")
    parser.add_argument("--json", type=Path, help="writes the figures there")
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.hold:
        print(json.dumps(_hold(flags.hold)))
        return
    facts, others = machine.facts(), machine.OtherWork()
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    sizes = [10**5, 10**6, 3 * 10**6] if flags.quick else [10**5, 10**6, 10**7, 3 * 10**7]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        results = {
            "machine": facts,
            "vocabularies": [row for entries in sizes for row in vocabularies(entries, folder)],
            "tables": [row for rows in sizes[:-1] for row in tables(rows, folder)],
            "estimates": list(estimates(sizes[-2], folder)),
        }
    _print_all(results)
    if warning := others.warning():
        print(warning)
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


def vocabularies(entries: int, folder: Path) -> list[dict[str, Any]]:
    """Both encoders on the same vocabularies of `entries` in all."""
    workflow, results, sessions = _workflow(entries), [], {}
    for name, most in ENCODERS.items():
        began = time.perf_counter()
        graph = _write(folder / name, workflow, TINY, GraphLimits(inline_bytes=0, label_encoder_entries=most))
        built = time.perf_counter() - began
        _keep_only_encoding(graph)
        results.append({"entries": entries, "encoder": name, "seconds_to_build": built, **_in_process(graph)})
        sessions[name] = open_graph(graph)
    for result, nanoseconds in zip(results, _in_turns(list(sessions.values()), workflow)):
        result["nanoseconds_per_value"] = nanoseconds
        result["bytes_per_entry"] = result["own"] / entries
    return results


def tables(rows: int, folder: Path) -> list[dict[str, Any]]:
    """One graph of `rows` vectors of 16 numbers, its tables in the message and beside it."""
    workflow, config, results = _workflow(rows), DcnConfig(), []
    for name, inline in (("in the message", 2**31), ("beside it", 0)):
        limits = GraphLimits(inline_bytes=inline, label_encoder_entries=0)
        results.append({"rows": rows, "tables": name, **_in_process(_write(folder / name, workflow, config, limits))})
    return results


def estimates(rows: int, folder: Path) -> Any:
    """Yields the estimate of one session of several graphs beside what a process with that session holds."""
    cases = {
        "default, label encoder": (DcnConfig(), GraphLimits(label_encoder_entries=2**40)),
        "default, hash table": (DcnConfig(), GraphLimits(label_encoder_entries=0)),
        "wide tower": (DcnConfig(tower=(1024, 1024, 512)), GraphLimits()),
        "DCN v2": (DcnConfig(projection_dim=64, tower=(1024, 1024)), GraphLimits()),
    }
    for size in (rows // 10, rows):
        for name, (config, limits) in cases.items():
            graph = _write(folder / "estimate", _workflow(size), config, limits)
            held = _in_process(graph)
            # A process alone: neither Triton's own process nor what has passed with opening is in it.
            needed = memory_needed(GraphSizes.of(graph), instances=1, versions=1)
            counted = sum(a.num_bytes for a in needed if a.name not in ("processes", "opening"))
            measured = held["own_after_batches"] + held["mapped"]
            yield {"rows": size, "graph": name, "estimate": counted, "measured": measured, "ratio": counted / measured}


def _workflow(entries: int) -> FeatureWorkflow:
    random = np.random.default_rng(0)
    each = entries // NUM_CATEGORICAL
    keys = np.unique(random.integers(0, 2**32, int(each * 1.01) + 10))[:each]
    return FeatureWorkflow(
        vocabularies=tuple(random.permutation(keys) for _ in range(NUM_CATEGORICAL)),
        fill=0.0,
        clip_min=0.0,
        means=np.ones(NUM_DENSE, np.float32),
        stds=np.ones(NUM_DENSE, np.float32),
        frequency_threshold=1,
    )


def _write(folder: Path, workflow: FeatureWorkflow, config: DcnConfig, limits: GraphLimits) -> Path:
    random = np.random.default_rng(1)
    weights = ModelWeights(
        dense={n: random.normal(0, 0.05, shape).astype(np.float32) for n, shape in dense_layout(config)},
        embeddings=np.full((sum(workflow.slot_sizes), config.embedding_dim), 0.01, np.float32),
    )
    write_graph(folder, workflow, weights, config, limits)
    return folder / GRAPH_FILE


def _keep_only_encoding(graph: Path) -> None:
    """Cuts the graph off after `table_rows`."""
    message = onnx.load(str(graph), load_external_data=False)
    wanted, nodes = {"table_rows"}, []
    for node in reversed(message.graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            nodes.append(node)
    constants = [tensor for tensor in message.graph.initializer if tensor.name in wanted]
    for field in ("node", "initializer", "output"):
        message.graph.ClearField(field)
    message.graph.node.extend(reversed(nodes))
    message.graph.initializer.extend(constants)
    message.graph.output.append(onnx.helper.make_empty_tensor_value_info("table_rows"))
    del message.graph.input[0]
    graph.write_bytes(message.SerializeToString())


def _in_turns(sessions: list[Any], workflow: FeatureWorkflow) -> list[float]:
    """Nanoseconds per value of each session, in turns on the same rows, new ones every turn; medians."""
    random = np.random.default_rng(2)
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(_TURNS):
        rows = np.stack([random.choice(v, _ROWS) for v in workflow.vocabularies], axis=1)
        for session, taken in zip(sessions, times):
            began = time.perf_counter()
            session.run(None, {CATEGORICAL_INPUT.name: rows})
            taken.append(time.perf_counter() - began)
    return [median(taken) / (_ROWS * NUM_CATEGORICAL) * 1e9 for taken in times]


def _in_process(graph: Path) -> dict[str, Any]:
    """What `_hold` measures of `graph` in a process of its own, and the size of its files."""
    command = [sys.executable, "-m", "benchmarks.graph_limits", "--hold", str(graph)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    return {**json.loads(done.stdout.splitlines()[-1]), "files": graph_bytes(graph.parent)}


def _hold(graph: Path) -> dict[str, float]:
    """Opens a graph, runs batches up to the largest, and says what this process holds for it."""
    import onnxruntime  # noqa: F401  what it holds itself is not the graph's

    before = _memory()
    began = time.perf_counter()
    session = open_graph(graph)
    seconds = time.perf_counter() - began
    opened = _memory()
    random, wanted = np.random.default_rng(0), [value.name for value in session.get_inputs()]
    for rows in (1, 64, _ROWS, MAX_BATCH_ROWS, MAX_BATCH_ROWS):
        values = {
            DENSE_INPUT.name: np.ones((rows, NUM_DENSE), np.float32),
            CATEGORICAL_INPUT.name: random.integers(0, 2**32, (rows, NUM_CATEGORICAL)),
        }
        session.run(None, {name: values[name] for name in wanted})
    after = _memory()
    return {
        "seconds_to_open": seconds,
        "own": opened["RssAnon"] - before["RssAnon"],
        "own_after_batches": after["RssAnon"] - before["RssAnon"],
        "mapped": float(_mapped(graph.with_name(DATA_FILE))),
        "peak_while_opening": opened["VmHWM"] - before["VmRSS"],
    }


def _memory() -> dict[str, float]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def _mapped(path: Path) -> int:
    """Bytes of `path` that are resident in this process's maps of it."""
    resident, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


def _print_all(results: dict[str, Any]) -> None:
    print("\nvocabularies, 26 values a row, rows of known categories")
    print(
        f"  {'entries':>11} {'encoder':<13} {'build s':>8} {'open s':>7} {'own MiB':>8} {'B/entry':>8}"
        f" {'mapped MiB':>11} {'ns/value':>9}"
    )
    for row in results["vocabularies"]:
        print(
            f"  {row['entries']:>11,} {row['encoder']:<13} {row['seconds_to_build']:>8.2f}"
            f" {row['seconds_to_open']:>7.2f} {row['own'] / MIB:>8.1f} {row['bytes_per_entry']:>8.1f}"
            f" {row['mapped'] / MIB:>11.1f} {row['nanoseconds_per_value']:>9.1f}"
        )
    print("\ntables of 16 numbers a row")
    for row in results["tables"]:
        print(
            f"  {row['rows']:>11,} {row['tables']:<15} files {row['files'] / MIB:>8.1f} MiB, open"
            f" {row['seconds_to_open']:>6.2f} s, own {row['own'] / MIB:>8.1f} MiB, most while opening"
            f" {row['peak_while_opening'] / MIB:>8.1f} MiB, mapped {row['mapped'] / MIB:>8.1f} MiB"
        )
    print("\nestimate of one session to what a process holds after full batches")
    for row in results["estimates"]:
        print(
            f"  {row['rows']:>11,} {row['graph']:<24} estimate {row['estimate'] / MIB:>8.1f} MiB, measured"
            f" {row['measured'] / MIB:>8.1f} MiB, ratio {row['ratio']:.2f}"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
