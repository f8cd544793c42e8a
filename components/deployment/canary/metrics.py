"""What the servers themselves counted for each arm of a canary: requests, failures and how long they took.

Reads Triton's Prometheus text of every replica. Counters only grow, so a stage is the difference to the plan's
`baseline`, summed over replicas before anything is divided: never a mean of means. A server that appeared since, or
whose counter is below its baseline because it restarted, has counted its warm-up, which is slow (measured: 70 requests
of thrice the usual time) and weighs heavier in the small arm: it counts nothing until a step has taken its baseline
(`uncounted`). A server that left takes both arms' counts with it. A server that restarted and has counted past its
whole baseline by the next step is not noticed; its arms are counted short, never negative.

What these numbers are not: Triton has totals and no medians; a request refused before it reached a model is in none of
them. Requests that the response cache answers are among the successful ones and their times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from components.runtime.errors import TemporaryError
from components.store.traffic_plan import CANARY, STABLE, Arm, Baseline

COUNTERS = {
    "success": "nv_inference_request_success",
    "failure": "nv_inference_request_failure",
    "duration_us": "nv_inference_request_duration_us",
    "queue_us": "nv_inference_queue_duration_us",
    "infer_us": "nv_inference_compute_infer_duration_us",
    "cache_hits": "nv_cache_num_hits_per_model",
}
"""Triton's name of each counter; durations add up those of successful requests, `infer_us` only of computed ones."""
READ_SECONDS = 10.0
_LINE = re.compile(r"^(\w+)\{([^}]*)\}\s+(\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_NAMES = {name: short for short, name in COUNTERS.items()}

Fetch = Callable[[str], str]
"""The metrics text of host:port."""


class ArmCounts(NamedTuple):
    """Sums over all replicas since the stage began."""

    success: float
    failure: float
    duration_us: float
    queue_us: float
    infer_us: float = 0.0
    cache_hits: float = 0.0

    @property
    def computed(self) -> float:
        """Successful requests that the model computed, instead of the response cache."""
        return self.success - self.cache_hits

    @property
    def requests(self) -> float:
        """Requests that a model answered or failed."""
        return self.success + self.failure

    @property
    def mean_ms(self) -> float | None:
        """Mean time of a successful request in the server, queue included; None without one."""
        return self.duration_us / self.success / 1000 if self.success else None

    @property
    def infer_ms(self) -> float | None:
        """Mean time in the model of a request that it computed; None without one."""
        return self.infer_us / self.computed / 1000 if self.computed > 0 else None


def fetch(address: str) -> str:
    """The metrics text of the server whose metrics port is `address` (host:port).

    Raises:
        TemporaryError: it does not answer.
    """
    try:
        # Never through the proxy that the environment may name: the server is on this machine or in this cluster.
        with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=READ_SECONDS) as answer:
            return str(answer.read().decode())
    except (URLError, HTTPException, OSError, ValueError) as error:
        raise TemporaryError(f"metrics of {address} cannot be read: {error}") from error


def read_baseline(addresses: Sequence[str], stable: Arm, canary: Arm, *, fetch: Fetch = fetch) -> Baseline:
    """What every server has counted so far for both arms.

    Raises:
        TemporaryError: a server does not answer.
    """
    return {address: counted(fetch(address), {STABLE: stable, CANARY: canary}) for address in addresses}


def counted(text: str, arms: Mapping[str, Arm]) -> dict[str, dict[str, float]]:
    """The counters of each arm's model and version in a metrics text; what is not in it has counted nothing."""
    wanted = {(arm.model_name, str(arm.version)): name for name, arm in arms.items()}
    found = {name: dict.fromkeys(COUNTERS, 0.0) for name in arms}
    for line in text.splitlines():
        if (match := _LINE.match(line)) and match[1] in _NAMES:
            labels = dict(_LABEL.findall(match[2]))
            arm = wanted.get((labels.get("model", ""), labels.get("version", "")))
            if arm is not None:
                found[arm][_NAMES[match[1]]] += float(match[3])  # failures have one line per reason
    return found


def since(baseline: Baseline, now: Baseline) -> dict[str, ArmCounts]:
    """What each arm counted between `baseline` and `now`, over the servers that are in both and did not restart."""
    sums = {arm: dict.fromkeys(COUNTERS, 0.0) for arm in (STABLE, CANARY)}
    fresh = uncounted(baseline, now)
    for address in now.keys() - fresh.keys():
        for arm, counters in now[address].items():
            for name in COUNTERS:
                sums[arm][name] += counters[name] - baseline[address][arm].get(name, 0.0)
    return {arm: ArmCounts(**values) for arm, values in sums.items()}


def uncounted(baseline: Baseline, now: Baseline) -> Baseline:
    """Those servers of `now` that need it as their baseline: they are new, or restarted, which either arm shows."""
    return {
        address: arms
        for address, arms in now.items()
        if any(_is_fresh(baseline.get(address, {}).get(arm), counters) for arm, counters in arms.items())
    }


def _is_fresh(before: Mapping[str, float] | None, now: Mapping[str, float]) -> bool:
    return before is None or any(now[name] < before.get(name, 0.0) for name in COUNTERS)
