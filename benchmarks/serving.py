"""Compare the speed of serving with peers on the same machine.

Run by `make benchmark-serving`. Deployment's command releases our model onto the bundled
tritonserver. `reference` runs in the same server binary as an ensemble of two Python models: an
NVTabular workflow, and the network. `web` is the graph of our model under FastAPI and uvicorn, with
requests in bytes. `floor` is the echo model, which computes nothing, in our server. Before the
measurement, the benchmark checks that all servers give the same scores, except `floor`. Client,
servers and peers share the machine.

Prints latencies, rows per second, the parts of a request's time, cold starts and releases under
load, and writes all figures as JSON. A missed target is printed, and the exit code stays 0. If
servers give different scores, the benchmark fails.

`serving_model` defines the model, `measured_servers` starts the servers, and `serving_runs`
measures them.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command import benchmark_parser, documented
from benchmarks.load import run_precisely
from benchmarks.measured_servers import FLOOR, OURS, REFERENCE, running
from benchmarks.serving_model import Models
from benchmarks.serving_runs import (
    FULL,
    IN_PROCESS,
    QUICK,
    WOKEN,
    Alone,
    Sizes,
    beyond_compute,
    check_parity,
    closed,
    cold_starts,
    half_load,
    least_ms,
    over_rounds,
    ratios,
    release_under_load,
)
from benchmarks.spread import Figure, short, spread
from demo.environments import python_of
from evergreen.runtime.exit_codes import exits_with_code

SERVING_PEERS = "serving-peers"
"""Environment of the peers."""
_SMALL_BATCHES = (1, 64)
_RELEASE_BATCH, _RELEASE_LOAD = 64, 0.25
"""Rows per request during releases, and the load as a share of the capacity."""


REFERENCE_RATIO = 50.0
"""Minimum ratio of the p50 of `reference` to our p50."""
FLOOR_RATIO = 1.5
"""Maximum ratio of our latency to the latency of `floor`."""
IN_PROCESS_SHARE = 0.7
"""Minimum ratio of our rows per second to those of ONNX Runtime without a server."""
COLD_START_SECONDS = 1.0
"""Maximum seconds from the start of a server until it is ready."""
RELEASE_RATIO = 2.0
"""Maximum ratio of the p99 during a release to the p99 before it."""


def measure(scratch: Path, sizes: Sizes) -> dict[str, Any]:
    """Return all figures, and print each figure as soon as it is measured.

    Raises:
        Disagreement: the servers do not give the same scores.
    """
    models = Models(scratch, python_of(SERVING_PEERS))
    results: dict[str, Any] = {"table_rows": sum(models.workflow.slot_sizes)}
    with running(models, python_of(SERVING_PEERS)) as (ours, servers):
        results["parity"] = run_precisely(check_parity(servers, models))
        differences = ", ".join(f"{name} {value:.1e}" for name, value in results["parity"].items())
        print(
            f"{results['table_rows']:,} table rows; largest difference from the expected scores: "
            f"{differences}"
        )
        alone = Alone(ours.graph(1), models.request_rows, ours.options().instances)
        results["closed"] = run_precisely(closed(servers, alone, models.request_rows, sizes=sizes))
        _print_closed(results["closed"])
        rates = {batch: capacities(results["closed"], batch) for batch in _SMALL_BATCHES}
        results["half_load"] = run_precisely(
            half_load(servers, alone, models.request_rows, sizes=sizes, capacities=rates)
        )
        _print_half_load(results["half_load"])
        results["cold_starts"] = cold_starts(ours, models, sizes)
        print(
            f"\ncold start to ready, seconds: {spread(results['cold_starts']).shown()}", flush=True
        )
        rate = _RELEASE_LOAD * rates[_RELEASE_BATCH][OURS]
        results["releases"] = []
        print(f"\nrelease under {rate:,.0f} requests/s of {_RELEASE_BATCH} rows")
        for seed in range(1, sizes.releases + 1):
            run = release_under_load(
                ours,
                servers[OURS],
                models.request_rows,
                quiet_seconds=sizes.quiet_seconds,
                rate=rate,
                batch=_RELEASE_BATCH,
                seed=seed,
            )
            results["releases"].append(run_precisely(run))
            _print_release(results["releases"][-1])
    return results


def capacities(closed_results: dict[str, Any], batch: int) -> dict[str, float]:
    """Return each server's maximum requests per second in a closed loop."""
    best: dict[str, float] = {}
    for servers in closed_results[str(batch)].values():
        for name, rounds in servers.items():
            rate = over_rounds(rounds, "rows_per_second").median / batch
            best[name] = max(rate, best.get(name, 0.0))
    return best


def page_figures(results: dict[str, Any]) -> list[Figure]:
    """Return the figures for the page, each with its target."""
    one_by_one, large = results["closed"]["64"]["1"], results["closed"]["1024"]
    found = [
        Figure(f"64 rows, one caller, p50 of {name}", over_rounds(rounds, "p50_ms"), "ms")
        for name, rounds in one_by_one.items()
    ]
    times_lower = ratios(one_by_one[REFERENCE], one_by_one[OURS], "p50_ms")
    to_floor = ratios(one_by_one[OURS], one_by_one[FLOOR], "p50_ms")
    to_least = spread(
        [least / one["p50_ms"] for least, one in zip(least_ms(one_by_one), one_by_one[FLOOR])]
    )
    echo = f"{FLOOR}, an echo in the same server"
    found += [
        Figure(
            "64 rows, one caller, p50 as many times lower",
            times_lower,
            peer=f"{REFERENCE}, NVTabular's ensemble",
            target=REFERENCE_RATIO,
            is_least=True,
        ),
        Figure(
            "64 rows, one caller, p50",
            to_floor,
            peer=echo,
            target=FLOOR_RATIO,
            limit=f"floor and {WOKEN}: {short(to_least.median)} times",
        ),
    ]
    for batch, result in results["half_load"].items():
        rounds = result["rounds"]
        beyond = beyond_compute(rounds[OURS], rounds[IN_PROCESS], rounds[FLOOR])
        found.append(
            Figure(
                f"{batch} rows, open loop at half of capacity, p99 beyond compute",
                beyond,
                peer=echo,
            )
        )
        whole = ratios(rounds[OURS], rounds[FLOOR], "p99_ms")
        target = FLOOR_RATIO if batch == "1" else None
        found.append(
            Figure(
                f"{batch} rows, open loop at half of capacity, p99", whole, "times", echo, target
            )
        )
    for concurrency in (min(large, key=int), max(large, key=int)):
        of_these = large[concurrency]
        share = ratios(of_these[OURS], of_these[IN_PROCESS], "rows_per_second")
        limit = (
            "onnxruntime: "
            f"{short(over_rounds(of_these[IN_PROCESS], 'rows_per_second').median)} rows/s"
        )
        if WOKEN in of_these:
            best = spread(
                [
                    one["p50_ms"] / least
                    for one, least in zip(of_these[IN_PROCESS], least_ms(of_these))
                ]
            )
            limit += f"; floor and {WOKEN}: {short(best.median)} times"
        found.append(
            Figure(
                f"1,024 rows, {concurrency} at once, rows/s",
                share,
                peer="onnxruntime with as many threads",
                target=IN_PROCESS_SHARE,
                is_least=True,
                limit=limit,
            )
        )
    ready, releases = spread(results["cold_starts"]), results["releases"]
    found.append(Figure("from start to ready", ready, "s", target=COLD_START_SECONDS))
    failed = spread([one["num_failed"] for one in releases])
    found.append(
        Figure(
            "failed requests of a release",
            failed._replace(median=failed.most),
            "requests",
            target=0,
        )
    )
    if slowed := [one["ratio"] for one in releases if one["ratio"] is not None]:
        echo = [one["echo_ratio"] for one in releases if one["echo_ratio"] is not None]
        found.append(
            Figure(
                "p99 during a release",
                spread(slowed),
                peer="before it",
                target=RELEASE_RATIO,
                limit=f"during a load of the echo: {spread(echo).shown()} times" if echo else None,
            )
        )
    return found


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run all measurements, and return 0."""
    flags = benchmark_parser(
        "serving", __doc__, quick="two or three minutes: fewer and shorter rounds"
    ).parse_args(argv)
    sizes = QUICK if flags.quick else FULL
    with documented(flags) as document, tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        results = measure(Path(scratch), sizes)
        document |= {"sizes": asdict(sizes), "figures": page_figures(results), "results": results}
    return 0


def _print_closed(results: dict[str, Any]) -> None:
    """Print the results of the closed loops."""
    for batch, of_batch in results.items():
        print(
            f"\nclosed loop, {batch} rows per request: milliseconds (median over rounds, least to "
            "most), rows/s"
        )
        print(f"  {'':<14} {'at once':>7} {'p50':>26} {'p99':>26} {'rows/s':>32}")
        for concurrency, servers in of_batch.items():
            for name, rounds in servers.items():
                latencies = f"{_ms(rounds, 'p50_ms')} {_ms(rounds, 'p99_ms')}"
                rate = over_rounds(rounds, "rows_per_second").shown(",.0f")
                print(f"  {name:<14} {concurrency:>7} {latencies} {rate:>32}{_failures(rounds)}")
    print(end="", flush=True)


def _print_half_load(results: dict[str, Any]) -> None:
    """Print the results of the open loops, and the mean time of each part of a request."""
    for batch, result in results.items():
        print(
            f"\nopen loop, {batch} rows, {result['requests_per_second']:,.0f} requests/s (half of "
            "ours' capacity), ms"
        )
        print(f"  {'':<14} {'p50':>26} {'p99':>26}")
        for name, rounds in result["rounds"].items():
            print(
                f"  {name:<14} {_ms(rounds, 'p50_ms')} {_ms(rounds, 'p99_ms')}{_failures(rounds)}"
            )
        for name, rounds in result["rounds"].items():
            splits = [one["split_ms"] for one in rounds if one.get("split_ms")]
            if splits:
                parts = {
                    part: spread([split[part] for split in splits]).median for part in splits[0]
                }
                print(
                    f"  {name}: mean of "
                    + ", ".join(f"{part} {value:.3f}" for part, value in parts.items())
                )
    print(end="", flush=True)


def _two_digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _print_release(one: dict[str, Any]) -> None:
    during, before = _two_digits(one["window_p99_ms"]), _two_digits(one["before_p99_ms"])
    ratio, of_echo = _two_digits(one["ratio"]), _two_digits(one["echo_ratio"])
    print(
        f"  version {one['version']}: window {one['window_seconds']:.2f} s with "
        f"{one['num_in_window']} requests,"
        f" p99 {during} ms; before {before}; ratio {ratio}, during a load of the echo {of_echo};"
        f" failed {one['num_failed']} of {one['num_answered'] + one['num_failed']}",
        flush=True,
    )


def _ms(rounds: list[dict[str, Any]], figure: str) -> str:
    return f"{over_rounds(rounds, figure).shown('.3f'):>26}"


def _failures(rounds: list[dict[str, Any]]) -> str:
    failed = sum(one["num_failed"] for one in rounds)
    return f"  {failed} FAILED: {rounds[-1]['errors']}" if failed else ""


if __name__ == "__main__":
    sys.exit(main())
