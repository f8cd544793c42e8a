"""Measure the duration of a batch on a Triton instance, by number of rows.

`evergreen simulate autoscaler` reads these service times. `python -m benchmarks.service_times
--server HOST:PORT --output FILE` sends one request at a time to a running Triton. Requests
therefore neither wait nor share a batch. The server must have no other callers during the
measurement. The time is the sum of input, inference and output in the server's own counters.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client

from benchmarks import machine
from benchmarks.cache_model import RequestStream
from benchmarks.serving_model import SIMULATOR_SEED
from benchmarks.triton_counters import counters
from demo.simulation.simulator import Simulator
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.serving import GRPC_OPTIONS
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import TemporaryError
from evergreen.runtime.exit_codes import exits_with_code

ROWS = (1, 16, 64, 256, 1024, 4096)
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
COUNTED_SECONDS = 60.0
"""Maximum seconds until a server has counted a request."""
_PARTS = ("compute_input", "compute_infer", "compute_output")


def measure(address: str, model: str, *, seconds: float) -> list[dict[str, Any]]:
    """Measure a model, and return the number of requests and quantiles of seconds per request.

    The result has one entry for each number of rows in a request.

    Args:
        address: host:port of a Triton's gRPC.
        model: Name of a model with the contract's tensors.
        seconds: Duration of the measurement for each number of rows in a request.

    Raises:
        TemporaryError: the model has other callers at the same time, or the server does not count
            requests.
    """
    measured, simulator = [], Simulator.create(SIMULATOR_SEED)
    with closing(
        grpc_client.InferenceServerClient(address, channel_args=list(GRPC_OPTIONS))
    ) as client:
        for rows in ROWS:
            requests = RequestStream(simulator, rows).fresh(32)
            for request in requests[:4]:
                client.infer(model, request)
            times = _seconds_of_requests(client, model, requests, seconds=seconds)
            quantiles = {str(q): float(np.quantile(times, q)) for q in QUANTILES}
            measured.append({"rows": rows, "requests": len(times), "seconds": quantiles})
    return measured


def _seconds_of_requests(
    client: Any, model: str, requests: Sequence[list[Any]], *, seconds: float
) -> list[float]:
    """Send requests one by one for `seconds`, and return the instance's time per request.

    At least one request is sent.

    Raises:
        TemporaryError: the server did not count a request, or its count includes requests of other
            callers.
    """
    began, times = time.monotonic(), list[float]()
    count, before = _settled(client, model)
    while not times or time.monotonic() < began + seconds:
        client.infer(model, requests[len(times) % len(requests)])
        sent_at, expected = time.monotonic(), count + len(times) + 1
        # A server may count a request a moment after its response.
        while (worked := _worked(client, model))[0] < expected:
            if time.monotonic() > sent_at + COUNTED_SECONDS:
                raise TemporaryError(
                    f"the server responded, but did not count a request for model {model}"
                )
        if worked[0] > expected:
            raise TemporaryError(
                f"model {model} counted {worked[0]} requests, expected {expected}: other "
                "callers use it"
            )
        times.append(worked[1] - before)
        before = worked[1]
    return times


def _settled(client: Any, model: str) -> tuple[int, float]:
    """Wait until the server has counted the last warm-up request, and return `_worked()`."""
    began, before = time.monotonic(), _worked(client, model)
    while time.monotonic() < began + COUNTED_SECONDS:
        time.sleep(0.05)
        if (now := _worked(client, model)) == before:
            return now
        before = now
    raise TemporaryError(
        f"model {model} counts requests although none was sent: other callers use it"
    )


def _worked(client: Any, model: str) -> tuple[int, float]:
    """Return the model's number of requests so far, and the total seconds of its instances."""
    counted = counters(client, model)
    return counted["requests"], sum(counted[part] for part in _PARTS) / 1e9


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the benchmark's flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_times", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--server", required=True, help="host:grpc_port of the Triton")
    parser.add_argument(
        "--model", default=CRITEO_RECOMMENDER.name, help="name of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--describe", default="", help="device of the server, such as the GPU's name"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="seconds of requests per number of rows"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the times, and return 0."""
    arguments = build_parser().parse_args(argv)
    others = machine.OtherWork()
    measured = measure(arguments.server, arguments.model, seconds=arguments.seconds)
    document = {
        "what": arguments.describe or "a Triton, not described",
        "how": "python -m benchmarks.service_times: one request at a time; compute input + infer + "
        "output per request",
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "other_work": round(others.share(), 2),
        "machine": machine.facts(),
        "service_times": measured,
    }
    write_whole(arguments.output, json.dumps(document, indent=2).encode() + b"\n")
    for each in measured:
        print(
            f"{each['rows']:>5} rows: p50 {1e3 * each['seconds']['0.5']:.3f} ms, "
            f"{each['requests']} requests"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
