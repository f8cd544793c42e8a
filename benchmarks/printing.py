"""The benchmark's figures as plain tables, each beside its target."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

AUC_TARGET, READER_TARGET, MEMORY_TARGET, STARTUP_TARGET = 0.002, 10.0, 1.3, 8.0
COST_TARGET = 1.1
"""Seconds per row on the large table over those on the small one: none, and a tenth for noise."""


def facts(machine: dict[str, Any], flags: argparse.Namespace) -> None:
    """Machine, versions and what is the same for all."""
    print("; ".join(f"{name} {value}" for name, value in machine.items()))
    print(
        f"batches of {flags.batch_size} rows, dropout {flags.dropout}; median (least to most) over rounds", flush=True
    )


def speed(result: dict[str, Any], *, ratio_target: float) -> None:
    """One case."""
    print(
        f"\n{result['case']}: {result['rounds']} rounds of {result['steps']} steps after one that warms up;"
        f" {result['rows']:,} rows learnt, best possible AUC {result['best_possible_auc']:.4f}"
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
        print_target(f"{name} to the faster peer", f"{ratio:.1f}", f"at least {ratio_target:g}", ratio >= ratio_target)
        print_target(
            f"{name}, AUC to the better peer",
            f"{difference:+.4f}",
            f"at least -{AUC_TARGET}",
            difference >= -AUC_TARGET,
        )
    if cost := result.get("cost_per_row_to_small_table"):
        print_target(
            "cost of a row to that on the 1.2M table, float32",
            f"{cost.median:.2f}",
            f"at most {COST_TARGET}",
            cost.median <= COST_TARGET,
        )


def reader(result: dict[str, Any]) -> None:
    """The reader alone."""
    print(f"\nreader, {result['num_rows']:,} rows")
    for name in ("decoding", "batches", "both"):
        rate = result[name]
        print(f"  {name:<20} {rate.median:>10,.0f} rows/s ({rate.least:,.0f} to {rate.most:,.0f})", flush=True)


def memory(results: dict[str, Any]) -> None:
    """Peak memory per table."""
    print("\npeak memory of a training step, small network")
    for table, figures in results.items():
        peak, imports = figures["peak"], figures["after_imports"]["anonymous"]
        print(
            f"  {table}: peak {_mib(peak['anonymous'])}, of which {_mib(imports)} after imports; parameters, optimizer"
            f" and two batches {_mib(figures['needed'])}; mapped files {_mib(peak['file'])}"
        )
        print(f"  {table}: ratio {figures['ratio_with_imports']:.2f} with what imports hold")
        ratio = figures["ratio"]
        print_target(f"{table}: ratio without", f"{ratio:.2f}", f"at most {MEMORY_TARGET}", ratio <= MEMORY_TARGET)


def startup(result: dict[str, Any]) -> None:
    """A step on few rows."""
    seconds = median(result["seconds"])
    spread = f"({min(result['seconds']):.1f} to {max(result['seconds']):.1f})"
    print(f"\ntraining step on {result['num_rows']:,} rows; imports take {result['import_share']:.0%} of it")
    print_target("seconds in all", f"{seconds:.1f} {spread}", f"at most {STARTUP_TARGET:g}", seconds <= STARTUP_TARGET)


def across(results: dict[str, Any]) -> None:
    """What needs figures of several parts."""
    cases = [name for name, result in results.items() if "contestants" in result]
    if "reader" not in results or not cases:
        return
    print("\nreader to trainer")
    for name in cases:
        figures = {n: results[name]["contestants"][n]["rows_per_second"].median for n in results[name]["ours"]}
        trainer = max(figures, key=lambda n: figures[n])
        ratio = results["reader"]["both"].median / figures[trainer]
        print_target(f"{name}, {trainer}", f"{ratio:.1f}", f"at least {READER_TARGET:g}", ratio >= READER_TARGET)


def print_target(name: str, value: str, target: str, is_met: bool) -> None:
    """One figure beside its target."""
    print(f"  {name}: {value}, target {target}: {'met' if is_met else 'TARGET MISSED'}", flush=True)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
