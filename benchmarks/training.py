"""How fast training is, against peers that run beside it: `make benchmark-training`.

Prints rows per second, AUC and ratios for two networks on two tables; writes all of it as JSON. A missed target is
printed as missed, and the exit code stays 0: only peers that compute another network make it an error. What is measured
how is `speed`'s, who is measured `peers`'.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.encoded_rows import SAMPLE_SLOT_SIZES
from benchmarks.spread import named, print_target
from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.models.configs import DcnConfig
from components.runtime.durable import write_whole

_SMALL = DcnConfig(num_dense=NUM_DENSE, num_categorical=NUM_CATEGORICAL)
_NETWORKS = {"small": _SMALL, "sample": replace(_SMALL, num_cross_layers=6, tower=(1024, 1024))}
"""`sample` is NVIDIA's DCN sample."""
_TABLES = {"1.2M": sum(SAMPLE_SLOT_SIZES), "10M": 10_000_000}
CASES = tuple(f"{network}-{table}" for table in _TABLES for network in _NETWORKS)
_ROUNDS_AND_STEPS = {"1.2M": (6, 40), "10M": (5, 16)}
_QUICK_ROUNDS_AND_STEPS = {"1.2M": (4, 5), "10M": (3, 3)}
"""With 15 steps nobody has learned anything yet, so AUCs of a quick run say nothing."""
_RATIO_TARGETS = {"1.2M": 5, "10M": 20}
_AUC_TARGET = 0.002
_COST_TARGET = 1.1
"""Seconds per row on the large table over those on the small one: none, and a tenth for noise."""


def measure_case(name: str, flags: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The figures of a network on a table, against the peers."""
    # Torch takes a second to import; a misuse is answered without it.
    from benchmarks import speed

    network, table = name.split("-")
    rounds, steps = (_QUICK_ROUNDS_AND_STEPS if flags.quick else _ROUNDS_AND_STEPS)[table]
    case = speed.Case(
        name=name,
        config=replace(_NETWORKS[network], dropout=flags.dropout),
        table_rows=_TABLES[table],
        rounds=rounds,
        steps=steps,
    )
    return speed.measure(case, flags.batch_size, scratch)


def print_case(result: dict[str, Any], *, ratio_target: float) -> None:
    """One case as a table, each figure of ours beside its target."""
    print(
        f"\n{result['case']}: {result['rounds']} rounds of {result['steps']} steps after one that warms up;"
        f" {result['rows']:,} rows learned, best possible AUC {result['best_possible_auc']:.4f}"
    )
    print(f"  {'':<20} {'rows/s':>32} {'ratio to ' + result['faster_peer']:>30} {'AUC':>8} {'difference':>11}")
    for name, figures in result["contestants"].items():
        rate, ratio = figures["rows_per_second"], figures["ratio"]
        print(
            f"  {name:<20} {rate.median:>10,.0f} ({rate.least:>8,.0f} to {rate.most:>8,.0f})"
            f" {ratio.median:>12.2f} ({ratio.least:>5.2f} to {ratio.most:>6.2f})"
            f" {figures['auc']:>8.4f} {figures['auc_difference']:>+11.4f}"
        )
    for name in result["ours"]:
        ratio, difference = result["contestants"][name]["ratio"].median, result["contestants"][name]["auc_difference"]
        print_target(
            f"{name} to the faster peer", f"{ratio:.1f}", f"at least {ratio_target:g}", is_met=ratio >= ratio_target
        )
        is_as_good = difference >= -_AUC_TARGET
        print_target(
            f"{name}, AUC to the better peer", f"{difference:+.4f}", f"at least -{_AUC_TARGET}", is_met=is_as_good
        )
    if cost := result.get("cost_per_row_to_small_table"):
        is_met = cost.median <= _COST_TARGET
        print_target(
            "cost of a row to that on 1.2M, float32", f"{cost.median:.2f}", f"at most {_COST_TARGET}", is_met=is_met
        )


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a minute or two: fewer rounds, AUCs without meaning")
    add("--only", action="append", choices=CASES, metavar="CASE", help=f"one of {', '.join(CASES)}; may be repeated")
    add("--batch-size", type=int, default=2048, help="rows per optimizer step, the same for all (default: training's)")
    add("--dropout", type=float, default=0.0, help="of the towers, the same for all (NVIDIA's sample has 0.5)")
    add("--output", type=Path, default=Path("build/benchmarks/training.json"), help="JSON file with all figures")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen cases; 0 = all figures are there, whether or not they meet their targets."""
    flags = build_parser().parse_args(argv)
    facts = machine.facts()
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"batches of {flags.batch_size} rows, dropout {flags.dropout}; median (least to most) of rounds", flush=True)
    other_work = machine.OtherWork()
    results: dict[str, Any] = {}
    for name in flags.only or CASES:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
            results[name] = measure_case(name, flags, Path(scratch))
        print_case(results[name], ratio_target=_RATIO_TARGETS[name.split("-")[1]])
    document = {
        "machine": facts,
        "flags": {name: value for name, value in vars(flags).items() if name != "output"},
        "other_work_share": other_work.share(),
        "results": named(results),
    }
    if warning := other_work.warning():
        print(warning)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(flags.output, json.dumps(document, indent=2) + "\n")
    print(f"written: {flags.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
