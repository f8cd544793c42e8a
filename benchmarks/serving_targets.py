"""Who is compared with whom, and the targets of serving: each figure beside what it should be."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks import serving_figures as figures
from benchmarks.spread import Spread, spread

OURS, FLOOR, REFERENCE = "evergreen", "floor", "reference"
WEB_JSON, WEB_BINARY = "web, JSON", "web, bytes"
IN_PROCESS = "onnxruntime"

REFERENCE_RATIO, FLOOR_RATIO, IN_PROCESS_SHARE, COLD_START_SECONDS, RELEASE_RATIO = 50.0, 2.0, 0.8, 1.0, 2.0


class Target(NamedTuple):
    """A figure beside what it should be."""

    name: str
    value: Spread
    bound: float
    is_least: bool
    """Whether `bound` is the least that meets the target; otherwise it is the most."""
    is_met: bool


def at_least(name: str, value: Spread, bound: float) -> Target:
    """A target that the median must reach."""
    return Target(name, value, bound, True, value.median >= bound)


def at_most(name: str, value: Spread, bound: float) -> Target:
    """A target that the median must not exceed."""
    return Target(name, value, bound, False, value.median <= bound)


def capacities(closed_results: dict[str, Any], batch: int) -> dict[str, float]:
    """The most requests per second that each answered in a closed loop, at its best concurrency."""
    best: dict[str, float] = {}
    for contestants in closed_results[str(batch)].values():
        for name, rounds in contestants.items():
            rate = figures.over_rounds(rounds, "rows_per_second").median / batch
            best[name] = max(rate, best.get(name, 0.0))
    return best


def judge(results: dict[str, Any]) -> list[Target]:
    """The targets of the issue, each with what was reached."""
    one_by_one = results["closed"]["64"]["1"]
    ratio = figures.faster(one_by_one[OURS], one_by_one[REFERENCE])
    found = [at_least("times lower median than the reference, 64 rows", ratio, REFERENCE_RATIO)]
    for batch, result in results["half_load"].items():
        rounds = result["rounds"]
        beyond = figures.beyond_compute(rounds[OURS], rounds[IN_PROCESS], rounds[FLOOR])
        found.append(at_most(f"p99 beyond compute to the floor's, {batch} rows", beyond, FLOOR_RATIO))
    large = results["closed"]["1024"]
    for concurrency in (min(large, key=int), max(large, key=int)):
        share = figures.share_of(large[concurrency][OURS], large[concurrency][IN_PROCESS])
        name = f"rows/s to onnxruntime alone with as many threads, 1024 rows, {concurrency} at once"
        found.append(at_least(name, share, IN_PROCESS_SHARE))
    ready = spread(results["cold_starts"]["ready"])
    found.append(at_most("cold start to ready, seconds", ready, COLD_START_SECONDS))
    releases = results["releases"]["releases"]
    failed = spread([one["num_failed"] for one in releases])
    found.append(at_most("failed requests of a release", failed._replace(median=failed.most), 0))
    ratios = [one["ratio"] for one in releases if one["ratio"] is not None]
    if ratios:
        name = "p99 during a release to before"
        found.append(at_most(name, spread(ratios), RELEASE_RATIO))
    return found
