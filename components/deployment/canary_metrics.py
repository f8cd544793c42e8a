"""What the servers themselves counted for each arm of a canary: requests, failures and how long they took.

Reads Triton's Prometheus text of every replica. Counters only grow, so a stage is the difference to the plan's
`baseline`, summed over replicas before anything is divided: never a mean of means. A counter below its baseline is a
server that restarted: it counts from zero, and what it had counted before is lost. A server that restarted and has
counted past its baseline is not noticed; its arm is counted short, never negative.

What these numbers are not: Triton has totals and no medians; warm-up requests count as requests (the baseline is taken
after loading, so only a restart's warm-up is in it); a request refused before it reached a model is in none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from components.contracts.errors import TemporaryError
from components.contracts.traffic_plan import CANARY, STABLE, Arm, Baseline
from components.deployment.discovery import DNS, Resolve

COUNTERS = {
    "success": "nv_inference_request_success",
    "failure": "nv_inference_request_failure",
    "duration_us": "nv_inference_request_duration_us",
    "queue_us": "nv_inference_queue_duration_us",
}
"""Triton's name of each counter; durations add up those of successful requests."""
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

    @property
    def requests(self) -> float:
        """Requests that a model answered or failed."""
        return self.success + self.failure

    @property
    def mean_ms(self) -> float | None:
        """Mean time of a successful request in the server, queue included; None without one."""
        return self.duration_us / self.success / 1000 if self.success else None


def fetch(address: str) -> str:
    """The metrics text of the server whose metrics port is `address` (host:port).

    Raises:
        TemporaryError: it does not answer.
    """
    try:
        # Never through the proxy that the environment may name: the server is on this machine or in this cluster.
        with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=READ_SECONDS) as answer:
            return str(answer.read().decode())
    except (URLError, OSError, ValueError) as error:
        raise TemporaryError(f"metrics of {address} cannot be read: {error}") from error


def addresses(urls: Sequence[str], resolve: Resolve) -> tuple[str, ...]:
    """host:port of every server that `urls` (host:port or dns:///name:port) mean now.

    Raises:
        TemporaryError: a name has no address.
    """
    found: list[str] = []
    for url in urls:
        if not url.startswith(DNS):
            found.append(url)
            continue
        name, _, port = url.removeprefix(DNS).rpartition(":")
        if not (here := resolve(name, int(port))):
            raise TemporaryError(f"{url} resolves to no address, expected at least one server")
        found += here
    return tuple(dict.fromkeys(found))


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
    """What each arm counted between `baseline` and `now`, over all servers of `now`.

    A server that is not in the baseline came later and counts in full.
    """
    sums = {arm: dict.fromkeys(COUNTERS, 0.0) for arm in (STABLE, CANARY)}
    for address, arms in now.items():
        for arm, counters in arms.items():
            before = baseline.get(address, {}).get(arm, {})
            restarted = any(counters[name] < before.get(name, 0.0) for name in COUNTERS)
            for name in COUNTERS:
                sums[arm][name] += counters[name] - (0.0 if restarted else before.get(name, 0.0))
    return {arm: ArmCounts(**values) for arm, values in sums.items()}
