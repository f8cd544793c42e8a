"""How fast training is, against peers that run beside it: `make benchmark-training`.

Prints rows per second, AUC and ratios for two networks on two tables, the
reader alone, peak memory and start-up; writes all of it as JSON. A missed target is printed as missed, and the exit
code stays 0: only peers that compute another network, or a step that fails, make it an error.

What is measured how is said in `speed`, `peers`, `reader` and `step_process`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine, printing
from benchmarks.encoded_rows import SAMPLE_SLOT_SIZES, PlantedLogit, slot_sizes_for, write_step_inputs
from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.models.configs import DcnConfig
from components.runtime.durable import write_whole

_SMALL = DcnConfig(num_dense=NUM_DENSE, num_categorical=NUM_CATEGORICAL)
_NETWORKS = {"small": _SMALL, "sample": replace(_SMALL, num_cross_layers=6, tower=(1024, 1024))}
"""`sample` is NVIDIA's DCN sample."""
_TABLES = {"1.2M": sum(SAMPLE_SLOT_SIZES), "10M": 10_000_000}
_ROUNDS_AND_STEPS = {"1.2M": (6, 40), "10M": (5, 16)}
_QUICK_ROUNDS_AND_STEPS = {"1.2M": (4, 5), "10M": (3, 3)}
"""With 15 steps nobody has learnt anything yet, so AUCs of a quick run say nothing."""
_MEMORY_ROWS, _STARTUP_ROWS = 40_000, 10_000
_BYTES_OF_ROW = 4 * (1 + 13 + 26)


def speed_case(network: str, table: str, flags: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """A network on a table, against the peers."""
    # Torch takes a second to import; a misuse is answered without it.
    from benchmarks import speed

    rounds, steps = (_QUICK_ROUNDS_AND_STEPS if flags.quick else _ROUNDS_AND_STEPS)[table]
    case = speed.Case(
        name=f"{network}-{table}",
        config=replace(_NETWORKS[network], dropout=flags.dropout),
        table_rows=_TABLES[table],
        rounds=rounds,
        steps=steps,
    )
    result = speed.measure(case, flags.batch_size, scratch)
    printing.speed(result, ratio_target=5 if table == "1.2M" else 20)
    return result


def reader(flags: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The reader alone."""
    from benchmarks import reader

    result = reader.measure(100_000 if flags.quick else 500_000, flags.batch_size, scratch)
    printing.reader(result)
    return result


def memory(flags: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Peak memory of a whole step, small network."""
    from benchmarks import step_process
    from components.models.network import build_network

    num_dense_parameters, results = sum(p.numel() for p in build_network(_SMALL).parameters()), {}
    after_imports = step_process.memory_after_imports()
    for table in ("1.2M",) if flags.quick else ("1.2M", "10M"):
        slot_sizes = slot_sizes_for(_TABLES[table])
        rows = PlantedLogit(slot_sizes).draw(_MEMORY_ROWS, seed=2)[0]
        inputs = write_step_inputs(scratch / f"inputs {table}", rows, slot_sizes)
        run = step_process.run_step(
            inputs, scratch / f"run {table}", "--max-epochs=1", f"--batch-size={flags.batch_size}"
        )
        num_parameters = sum(slot_sizes) * _SMALL.embedding_dim + num_dense_parameters
        needed = 3 * 4 * num_parameters + 2 * flags.batch_size * _BYTES_OF_ROW
        results[table] = {
            "needed": needed,
            "peak": run.peak._asdict(),
            "after_imports": after_imports._asdict(),
            "ratio": (run.peak.anonymous - after_imports.anonymous) / needed,
            "ratio_with_imports": run.peak.anonymous / needed,
            "seconds": run.seconds,
        }
    printing.memory(results)
    return results


def startup(flags: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """A whole step on few rows, whose table is as small as such rows make it."""
    from benchmarks import step_process

    slot_sizes = [min(size, 2000) for size in SAMPLE_SLOT_SIZES]
    rows = PlantedLogit(slot_sizes).draw(_STARTUP_ROWS, seed=2)[0]
    inputs = write_step_inputs(scratch / "inputs", rows, slot_sizes)
    runs = [step_process.run_step(inputs, scratch / f"run {i}") for i in range(2 if flags.quick else 4)]
    imports = step_process.run_step(inputs, scratch / "run imports", import_times=True)
    result = {
        "seconds": [run.seconds for run in runs],
        "import_seconds": imports.import_seconds,
        "import_share": imports.import_seconds / imports.seconds,
        "num_rows": _STARTUP_ROWS,
    }
    printing.startup(result)
    return result


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    **{f"{network}-{table}": partial(speed_case, network, table) for table in _TABLES for network in _NETWORKS},
    "reader": reader,
    "memory": memory,
    "startup": startup,
}


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a minute or two: fewer rounds, AUCs without meaning")
    add(
        "--only",
        action="append",
        choices=list(PARTS),
        metavar="CASE",
        help=f"one of {', '.join(PARTS)}; may be repeated",
    )
    add("--batch-size", type=int, default=2048, help="rows per optimizer step, the same for all (default: training's)")
    add("--dropout", type=float, default=0.0, help="of the towers, the same for all (NVIDIA's sample has 0.5)")
    add("--output", type=Path, default=Path("build/benchmarks/training.json"), help="JSON file with all figures")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen parts; 0 = all figures are there, whether or not they meet their targets."""
    flags = build_parser().parse_args(argv)
    facts = machine.facts()
    printing.facts(facts, flags)
    other_work = machine.OtherWork()
    results: dict[str, Any] = {}
    for name in flags.only or PARTS:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
            results[name] = PARTS[name](flags, Path(scratch))
    printing.across(results)
    document = {
        "machine": facts,
        "flags": {name: value for name, value in vars(flags).items() if name != "output"},
        "other_work_share": other_work.share(),
        "results": results,
    }
    if warning := other_work.warning():
        print(warning)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(flags.output, json.dumps(document, indent=2, default=_as_document) + "\n")
    print(f"written: {flags.output}")
    return 0


def _as_document(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot be written as JSON")


if __name__ == "__main__":
    sys.exit(main())
