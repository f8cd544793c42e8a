"""When Triton's response cache pays: by model cost and hit rate, hashing counted: `make benchmark-cache`.

Repeats the comparison of the post "How to build a distributed inference cache with NVIDIA Triton and Redis" for no
cache and the local one: one server serves each network twice, with and without the cache, and every request is asked
of both, one right after the other, in turns first, so that a slow moment of the machine meets both. One request at a
time: what is measured is what one answer takes, hashing included. The share of hits is planted, then compared with the
server's own counters. Redis is not in the laptop's server.

Prints a table and writes all of it as JSON. The requests and models are in `cache_model`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from tritonclient.grpc import InferenceServerClient

from benchmarks import machine
from benchmarks.cache_model import CACHE_BYTES, CACHED, NETWORKS, PLAIN, Requests, repeating_share, write_models
from benchmarks.serving_model import DrawnLog
from benchmarks.spread import Spread, named, spread
from benchmarks.triton_counters import counters, increase
from components.contracts.serving import GRPC_OPTIONS
from components.runtime.durable import write_whole
from components.runtime.errors import PermanentError
from components.runtime.exit_codes import exits_with_code
from pipelines.local.triton import TritonServer, TritonSettings

HIT_RATES = (0, 10, 25, 50, 75, 90, 100)
"""Percent."""
CASES = (("demo", 1), ("demo", 64), ("sample", 1), ("sample", 64), ("demo", 1024))
"""Network and rows of a request."""
_QUICK_CASES = CASES[:4]
_ROUNDS, _QUICK_ROUNDS = 5, 2
_REQUESTS, _QUICK_REQUESTS = 200, 40
"""Per round and hit rate."""
_WARM = 20
"""Requests that are in the cache before a round begins; its hits are these, again and again."""
_WARM_UP = 30
"""Requests of each model before anything is measured."""
_TRAFFIC_ROWS = 100_000
"""Rows of the demo's traffic in which repetitions are looked for."""


class Pair(NamedTuple):
    """One request, asked of both; seconds."""

    is_hit: bool
    """Whether it had been asked before."""
    plain: float
    cached: float


class Unplanted(PermanentError):
    """The server counted other hits than were planted: the figures would be of something else."""


def measure(
    client: InferenceServerClient, network: str, num_rows: int, *, log: DrawnLog, is_quick: bool
) -> dict[str, Any]:
    """The figures of one network and request size.

    Raises:
        Unplanted: see there.
    """
    requests, random = Requests(log, num_rows), np.random.default_rng(0)
    names = {kind: f"{network}_{kind}" for kind in (PLAIN, CACHED)}
    for request in requests.fresh(_WARM_UP):
        for name in names.values():
            client.infer(name, request)
    before = {kind: counters(client, name) for kind, name in names.items()}
    rounds: dict[int, list[list[Pair]]] = {rate: [] for rate in HIT_RATES}
    planted = 0
    count = _QUICK_REQUESTS if is_quick else _REQUESTS
    for _ in range(_QUICK_ROUNDS if is_quick else _ROUNDS):
        for rate in random.permutation(HIT_RATES):
            pairs = _ask_one_round(client, names, requests, rate=int(rate), count=count, random=random)
            planted += sum(pair.is_hit for pair in pairs)
            rounds[int(rate)].append(pairs)
    counted = {kind: increase(before[kind], counters(client, name)) for kind, name in names.items()}
    if counted[CACHED]["cache_hits"] != planted:
        hits = counted[CACHED]["cache_hits"]
        raise Unplanted(f"{network} at {num_rows} rows: the server counted {hits} hits, expected {planted}")
    merged = [[pair for pairs in of_round for pair in pairs] for of_round in zip(*rounds.values())]
    miss, hit = (difference(merged, of_hits=of_hits) for of_hits in (False, True))
    assert miss is not None, "hit rate 0 has misses"
    assert hit is not None, "hit rate 100 has hits"
    return {
        "case": f"{network}, {num_rows} row{'s' if num_rows > 1 else ''}",
        "rates": {str(rate): of_rate(each) for rate, each in rounds.items()},
        "miss_cost_ms": miss,
        "hit_saving_ms": Spread(-hit.median, -hit.most, -hit.least),
        "break_even": break_even(miss.median, -hit.median),
        "compute_us": counted[PLAIN]["compute_infer"] / counted[PLAIN]["executions"] / 1e3,
    }


def _ask_one_round(
    client: InferenceServerClient,
    names: dict[str, str],
    requests: Requests,
    *,
    rate: int,
    count: int,
    random: np.random.Generator,
) -> list[Pair]:
    warm = requests.fresh(_WARM)
    for request in warm:
        client.infer(names[CACHED], request)
    hits = random.permutation(np.arange(count) < round(count * rate / 100))
    fresh = requests.fresh(int((~hits).sum()))
    pairs = []
    for at, is_hit in enumerate(hits):
        request = warm[at % _WARM] if is_hit else fresh.pop()
        seconds = {}
        for kind in (PLAIN, CACHED) if at % 2 else (CACHED, PLAIN):
            began = time.perf_counter()
            client.infer(names[kind], request)
            seconds[kind] = time.perf_counter() - began
        pairs.append(Pair(bool(is_hit), seconds[PLAIN], seconds[CACHED]))
    return pairs


def of_rate(rounds: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """The figures of one hit rate: milliseconds of a typical request without and with the cache, and the time saved.

    Typical: the medians of hits and of misses, weighted by their shares; a mean would be that of the worst moments.

    Args:
        rounds: At least one round of at least one pair.
    """
    plain = [_typical(pairs, [pair.plain for pair in pairs]) for pairs in rounds]
    cached = [_typical(pairs, [pair.cached for pair in pairs]) for pairs in rounds]
    return {
        "plain_ms": spread(plain),
        "cached_ms": spread(cached),
        "saved": spread([1 - mine / without for mine, without in zip(cached, plain)]),
        "pairs": sum(len(pairs) for pairs in rounds),
    }


def _typical(pairs: Sequence[Pair], seconds: Sequence[float]) -> float:
    kinds = [[1e3 * s for pair, s in zip(pairs, seconds) if pair.is_hit == is_hit] for is_hit in (False, True)]
    return sum(len(kind) * median(kind) for kind in kinds if kind) / len(pairs)


def difference(rounds: Sequence[Sequence[Pair]], *, of_hits: bool) -> Spread | None:
    """Milliseconds that the cache adds (negative: saves) to a hit or to a miss; None where there was none.

    The median over a round's pairs, then over the rounds.
    """
    chosen = [[1e3 * (p.cached - p.plain) for p in pairs if p.is_hit == of_hits] for pairs in rounds]
    return spread([median(values) for values in chosen if values]) if any(chosen) else None


def break_even(miss_cost: float, hit_saving: float) -> float | None:
    """The hit rate at which what misses cost is what hits save; 0 where misses cost nothing, None where it never pays.

    >>> break_even(0.1, 0.3), break_even(-0.02, 0.3), break_even(0.1, -0.2)
    (0.25, 0.0, None)
    """
    if hit_saving <= 0:
        return None
    return max(0.0, miss_cost) / (max(0.0, miss_cost) + hit_saving)


def print_case(result: dict[str, Any]) -> None:
    """One case's table."""
    print(f"\n{result['case']}: by the server's counters the model computes {result['compute_us']:,.0f} us")
    print(f"  {'hits':>5} {'no cache, ms':>24} {'local cache, ms':>24} {'time saved':>26}")
    for rate, figures in result["rates"].items():
        plain, cached = figures["plain_ms"], figures["cached_ms"]
        saved = figures["saved"]
        print(
            f"  {rate:>4}% {plain.median:>8.3f} ({plain.least:>5.3f} to {plain.most:>5.3f})"
            f" {cached.median:>8.3f} ({cached.least:>5.3f} to {cached.most:>5.3f})"
            f" {saved.median:>9.0%} ({saved.least:>4.0%} to {saved.most:>4.0%})"
        )
    miss, hit = result["miss_cost_ms"], result["hit_saving_ms"]
    rate = result["break_even"]
    pays = "never" if rate is None else f"from {rate:.1%} hits"
    print(
        f"  a miss costs {miss.median:+.3f} ms ({miss.least:+.3f} to {miss.most:+.3f}), a hit saves "
        f"{hit.median:.3f} ms ({hit.least:.3f} to {hit.most:.3f}): pays {pays}",
        flush=True,
    )


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer requests, wider spreads")
    parser.add_argument(
        "--output", type=Path, default=Path("build/benchmarks/cache.json"), help="JSON file with all figures"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs all cases; 0 = all figures are there, whatever they say."""
    flags = build_parser().parse_args(argv)
    facts, other_work = machine.facts(), machine.OtherWork()
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    print("one request at a time; typical request of a round, then median (least to most) over rounds", flush=True)
    results = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        scratch, log = Path(folder), DrawnLog()
        settings = TritonSettings(cache_bytes=CACHE_BYTES)
        with (
            TritonServer(scratch / "repository", log=scratch / "triton.log", settings=settings) as server,
            InferenceServerClient(server.grpc_url, channel_args=list(GRPC_OPTIONS)) as client,
        ):
            for network in NETWORKS:
                for name in write_models(server.repository, network, log=log, scratch=scratch):
                    client.load_model(name)
            for network, num_rows in _QUICK_CASES if flags.quick else CASES:
                result = measure(client, network, num_rows, log=log, is_quick=flags.quick)
                results[result["case"]] = result
                print_case(result)
    share = repeating_share(_TRAFFIC_ROWS)
    print(f"\nof the demo's traffic {share:.2%} of single rows repeat")
    if warning := other_work.warning():
        print(warning)
    document = {
        "machine": facts,
        "flags": {"quick": flags.quick},
        "other_work_share": other_work.share(),
        "cache_bytes": CACHE_BYTES,
        "repeating_share": share,
        "results": results,
    }
    write_whole(flags.output, json.dumps(named(document), indent=2) + "\n")
    print(f"written: {flags.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
