"""Measure when Triton's response cache saves time, for `make benchmark-cache`.

The result depends on the cost of the model and on the hit rate. The question comes from the post
"How to build a distributed inference cache with NVIDIA Triton and Redis". The benchmark compares
Triton without a cache and Triton with its local cache. The laptop's server has no Redis.

One server serves each network twice, with and without the cache. Every request is sent to the model
with the cache and to the model without, in alternating order. A slow moment of the machine
therefore affects both models. Only one request is in flight, so that the time of one response is
measured, including hashing. Half of the requests are planted hits, which the server's own counters
must confirm. Requests do not wait for each other. Two figures therefore give the saved time at any
hit rate: the time that a hit saves, and the time that a miss costs.

Prints a table, and writes all figures as JSON. `cache_model` creates the requests and models.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient

from benchmarks.cache_model import (
    CACHE_BYTES,
    CACHED,
    NETWORKS,
    PLAIN,
    RequestStream,
    repeating_share,
    write_models,
)
from benchmarks.command import benchmark_parser, documented
from benchmarks.serving_model import SIMULATOR_SEED
from benchmarks.spread import Figure, spread
from benchmarks.triton_counters import counters, increase
from demo.simulation.simulator import Simulator
from demo.triton import TritonServer, TritonSettings
from evergreen.contracts.serving import GRPC_OPTIONS
from evergreen.runtime.errors import PermanentError
from evergreen.runtime.exit_codes import exits_with_code

HIT_RATES = (0, 10, 25, 50, 75, 90, 100)
"""Hit rates in per cent."""
CASES = (("demo", 1), ("demo", 64), ("sample", 1), ("sample", 64), ("demo", 1024))
"""Name of the network, and number of rows per request."""
_QUICK_CASES = CASES[:4]
_ROUNDS, _QUICK_ROUNDS = 5, 2
_REQUESTS, _QUICK_REQUESTS = 1000, 200
"""Number of requests per round. Half of the requests are hits."""
_WARM = 20
"""Number of requests that are cached before a round. A hit repeats one of these requests."""
_WARM_UP = 30
"""Number of requests to each model before the measurement."""
_TRAFFIC_ROWS = 100_000
"""Number of rows from the demo's simulator. The benchmark counts how many of them are
repetitions."""


class Pair(NamedTuple):
    """Durations of the same request with and without the cache, in seconds."""

    is_hit: bool
    """Whether the request is a repetition."""
    plain: float
    cached: float


class Unplanted(PermanentError):
    """The number of cache hits differs from the number of planted hits, so no figure is valid."""


class RoundMedians(NamedTuple):
    """Median durations in one round, in milliseconds.

    Medians are used because a mean would depend on the slowest requests.
    """

    plain: float
    """Duration of a request without the cache."""
    miss_cost: float
    """Time that the cache adds to a request that is not cached."""
    hit_saving: float
    """Time that a cache hit saves."""

    def saved(self, hit_rate: float) -> float:
        """Return the share of a request's time that the cache saves at a hit rate in [0, 1].

        A negative share means that the cache costs time.
        """
        return (hit_rate * self.hit_saving - (1 - hit_rate) * self.miss_cost) / self.plain


def measure(
    client: InferenceServerClient,
    network: str,
    num_rows: int,
    *,
    simulator: Simulator,
    is_quick: bool,
) -> dict[str, Any]:
    """Return the figures of one network and request size.

    Raises:
        Unplanted: the server's number of cache hits differs from the number of planted hits.
    """
    requests, random = RequestStream(simulator, num_rows), np.random.default_rng(0)
    names = {kind: f"{network}_{kind}" for kind in (PLAIN, CACHED)}
    for request in requests.fresh(_WARM_UP):
        for name in names.values():
            client.infer(name, request)
    before = {kind: counters(client, name) for kind, name in names.items()}
    count, num_rounds = (_QUICK_REQUESTS, _QUICK_ROUNDS) if is_quick else (_REQUESTS, _ROUNDS)
    rounds = [
        medians_of(_send_round(client, names, requests, hits=random.permutation(count) % 2 == 0))
        for _ in range(num_rounds)
    ]
    counted = {kind: increase(before[kind], counters(client, name)) for kind, name in names.items()}
    hits, planted = counted[CACHED]["cache_hits"], num_rounds * count // 2
    if hits != planted:
        raise Unplanted(
            f"{network} at {num_rows} rows: the server counted {hits} hits, expected {planted}"
        )
    miss, hit = (
        spread([each.miss_cost for each in rounds]),
        spread([each.hit_saving for each in rounds]),
    )
    return {
        "case": f"{network}, {num_rows} row{'s' if num_rows > 1 else ''}",
        "plain_ms": spread([each.plain for each in rounds]),
        "saved_by_rate": {
            str(rate): spread([each.saved(rate / 100) for each in rounds]) for rate in HIT_RATES
        },
        "miss_cost_ms": miss,
        "hit_saving_ms": hit,
        "break_even": break_even(miss.median, hit.median),
        "compute_us": counted[PLAIN]["compute_infer"] / counted[PLAIN]["executions"] / 1e3,
    }


def _send_round(
    client: InferenceServerClient,
    names: dict[str, str],
    requests: RequestStream,
    *,
    hits: NDArray[np.bool_],
) -> list[Pair]:
    warm = requests.fresh(_WARM)
    for request in warm:
        client.infer(names[CACHED], request)
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


def medians_of(pairs: Sequence[Pair]) -> RoundMedians:
    """Return the medians of a round with at least one hit and one miss."""
    return RoundMedians(
        plain=1e3 * median(pair.plain for pair in pairs),
        miss_cost=1e3 * median(pair.cached - pair.plain for pair in pairs if not pair.is_hit),
        hit_saving=1e3 * median(pair.plain - pair.cached for pair in pairs if pair.is_hit),
    )


def break_even(miss_cost: float, hit_saving: float) -> float | None:
    """Return the hit rate at which the cost of misses equals the saving of hits.

    Returns 0 if a miss costs nothing, and None if a hit saves nothing.

    >>> break_even(0.1, 0.3), break_even(-0.02, 0.3), break_even(0.1, -0.2)
    (0.25, 0.0, None)
    """
    if hit_saving <= 0:
        return None
    return max(0.0, miss_cost) / (max(0.0, miss_cost) + hit_saving)


def print_case(result: dict[str, Any]) -> None:
    """Print the results of one case as a table."""
    plain, compute = result["plain_ms"].shown(".3f"), result["compute_us"]
    print(
        f"\n{result['case']}: {plain} ms without the cache, of which the model computes "
        f"{compute:,.0f} us"
    )
    for rate, saved in result["saved_by_rate"].items():
        print(f"  at {rate:>3}% hits the cache saves {saved.shown('.0%')} of the time")
    miss, hit, rate = result["miss_cost_ms"], result["hit_saving_ms"], result["break_even"]
    pays = "never" if rate is None else f"from {rate:.1%} hits"
    print(
        f"  a miss costs {miss.shown('+.3f')} ms, a hit saves {hit.shown('.3f')} ms: pays {pays}",
        flush=True,
    )


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, and return 0."""
    flags = benchmark_parser(
        "cache", __doc__, quick="under a minute: fewer requests, wider spreads"
    ).parse_args(argv)
    with documented(flags) as document, tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        print(
            "one request at a time; median of a round, then median (least to most) over rounds",
            flush=True,
        )
        scratch, simulator, results = Path(folder), Simulator.create(SIMULATOR_SEED), {}
        settings = TritonSettings(cache_bytes=CACHE_BYTES)
        with (
            TritonServer(
                scratch / "repository", log=scratch / "triton.log", settings=settings
            ) as server,
            InferenceServerClient(server.grpc_url, channel_args=list(GRPC_OPTIONS)) as client,
        ):
            for network in NETWORKS:
                for name in write_models(
                    server.repository, network, simulator=simulator, scratch=scratch
                ):
                    client.load_model(name)
            for network, num_rows in _QUICK_CASES if flags.quick else CASES:
                result = measure(
                    client, network, num_rows, simulator=simulator, is_quick=flags.quick
                )
                results[result["case"]] = result
                print_case(result)
        share = repeating_share(simulator, _TRAFFIC_ROWS)
        print(f"\nof the demo's traffic {share:.2%} of single rows repeat")
        document |= {"cache_bytes": CACHE_BYTES, "repeating_share": share, "results": results}
        for name, each in results.items():
            document["figures"] += [
                Figure(f"{name}, without the cache", each["plain_ms"], "ms"),
                Figure(f"{name}, what a miss costs", each["miss_cost_ms"], "ms"),
                Figure(f"{name}, what a hit saves", each["hit_saving_ms"], "ms"),
            ]
    return 0


if __name__ == "__main__":
    sys.exit(main())
