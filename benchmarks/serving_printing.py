"""The serving benchmark's figures as plain tables, each target beside what was reached."""

from __future__ import annotations

from typing import Any

from benchmarks.serving_figures import over_rounds
from benchmarks.serving_targets import Target
from benchmarks.spread import Spread, spread


def closed(results: dict[str, Any]) -> None:
    """Closed loops."""
    for batch, of_batch in results.items():
        print(f"\nclosed loop, {batch} rows per request: milliseconds (median over rounds, least to most), rows/s")
        print(f"  {'':<14} {'at once':>7} {'p50':>24} {'p99':>24} {'rows/s':>32}")
        for concurrency, contestants in of_batch.items():
            for name, rounds in contestants.items():
                latencies = f"{_ms(over_rounds(rounds, 'p50_ms')):>24} {_ms(over_rounds(rounds, 'p99_ms')):>24}"
                rate = over_rounds(rounds, "rows_per_second")
                span = f"({rate.least:,.0f} to {rate.most:,.0f})"
                print(f"  {name:<14} {concurrency:>7} {latencies} {rate.median:>9,.0f} {span:>22}{_failures(rounds)}")
    print(end="", flush=True)


def half_load(results: dict[str, Any]) -> None:
    """Open loops, and where the server says that time went."""
    for batch, result in results.items():
        print(
            f"\nopen loop, {batch} rows, {result['requests_per_second']:,.0f} requests/s (half of ours' capacity), ms"
        )
        print(f"  {'':<14} {'p50':>24} {'p95':>24} {'p99':>24}")
        for name, rounds in result["rounds"].items():
            cells = " ".join(f"{_ms(over_rounds(rounds, f'p{p}_ms')):>24}" for p in (50, 95, 99))
            print(f"  {name:<14} {cells}{_failures(rounds)}")
        for name, rounds in result["rounds"].items():
            splits = [one["split_ms"] for one in rounds if one.get("split_ms")]
            if splits:
                parts = {part: spread([split[part] for split in splits]).median for part in splits[0]}
                print(f"  {name}: mean of " + ", ".join(f"{part} {value:.3f}" for part, value in parts.items()))
    print(end="", flush=True)


def starts(result: dict[str, list[float]]) -> None:
    """Cold starts."""
    ready, answered = spread(result["ready"]), spread(result["first_answer"])
    print(f"\ncold start, seconds: ready {_figure(ready)}, first answer {_figure(answered)}", flush=True)


def releases(result: dict[str, Any]) -> None:
    """Releases under load."""
    print(f"\nrelease under {result['requests_per_second']:,.0f} requests/s of {result['batch']} rows")
    for one in result["releases"]:
        print(
            f"  version {one['version']}: window {one['window_seconds']:.2f} s with {one['num_in_window']} requests,"
            f" p99 {_of(one['window_p99_ms'])} ms (worst {_of(one['window_worst_ms'])});"
            f" before {_of(one['before_p99_ms'])}; whole run of the step {_of(one['whole_run_p99_ms'])};"
            f" failed {one['num_failed']} of {one['num_answered'] + one['num_failed']}"
        )
        print(f"    seconds: {', '.join(f'{name} {value:.2f}' for name, value in one['seconds'].items())}", flush=True)


def targets(found: list[Target]) -> None:
    """Each target, met or missed."""
    print("\ntargets")
    for target in found:
        word = "at least" if target.is_least else "at most"
        verdict = "met" if target.is_met else "TARGET MISSED"
        print(f"  {target.name}: {_figure(target.value)}, target {word} {target.bound:g}: {verdict}", flush=True)


def _ms(value: Spread) -> str:
    return f"{value.median:.3f} ({value.least:.2f} to {value.most:.2f})"


def _figure(value: Spread) -> str:
    return f"{value.median:.3g} ({value.least:.3g} to {value.most:.3g})"


def _of(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _failures(rounds: list[dict[str, Any]]) -> str:
    failed = sum(one["num_failed"] for one in rounds)
    return f"  {failed} FAILED: {rounds[-1]['errors']}" if failed else ""
