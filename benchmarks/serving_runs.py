"""Run the measurements of serving: parity, closed loops, open loops, cold starts, releases.

All servers run all the time, and only one server gets requests at a time. The servers take turns
within each round. ONNX Runtime runs in this process without a server. Measurements of ONNX Runtime
alternate with measurements of the servers. A percentile is computed within a round. The figure has
the median, minimum and maximum over all rounds. A ratio divides two figures of the same round, so
that a slow moment of the machine affects both figures.
"""

import asyncio
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient

from benchmarks.load import Latencies, Responses, closed_loop, open_loop, window_figures
from benchmarks.measured_servers import FLOOR, OURS, MeasuredServer, Released, reload_model
from benchmarks.serving_model import Models
from benchmarks.spread import Spread, spread
from benchmarks.triton_counters import PARTS, counters, increase
from demo.environments import REPOSITORY
from demo.runner import at_low_priority
from demo.triton import TritonServer
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import Release
from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT
from evergreen.registry.promotion_journal import INTENT, RELEASE, read_entries
from evergreen.runtime.errors import Refused
from evergreen.serving.parity import open_graph
from inference_client.rows import FeatureRows

IN_PROCESS, WOKEN = "onnxruntime", "onnxruntime, woken"
WOKEN_AFTER = 0.0005
"""Pause in seconds before each batch of the measurement `WOKEN`. A processor core that was idle is
slower at first, as in a server that waits for requests."""
PARITY = 1e-5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurements."""

    rounds: int = 3
    seconds: float = 1.0
    """Seconds of a closed loop."""
    concurrencies: tuple[int, ...] = (1, 4, 16)
    open_rounds: int = 5
    open_seconds: float = 5.0
    starts: int = 7
    releases: int = 7
    quiet_seconds: float = 6.0
    """Seconds of traffic before each release, and before each load of the echo model."""


FULL = Sizes()
QUICK = Sizes(
    rounds=2,
    seconds=0.4,
    concurrencies=(1, 16),
    open_rounds=3,
    open_seconds=2.0,
    starts=3,
    releases=1,
    quiet_seconds=4.0,
)
BATCHES = (1, 64, 1024)
_HEADROOM = 1.2
"""Minimum ratio of capacity to rate. Below this ratio, an open loop would only measure a growing
queue."""


class Disagreement(Refused):
    """The servers give different scores, so that their speeds cannot be compared."""


async def check_parity(servers: dict[str, MeasuredServer], models: Models) -> dict[str, float]:
    """Return the largest difference from the expected scores for each server with the model.

    The echo model computes no scores, so it is left out.

    Raises:
        Disagreement: a server's difference is above `PARITY`.
    """
    expected = models.expected(models.request_rows, seed=0)
    found = {}
    for name, server in servers.items():
        if name == FLOOR:
            continue
        worst = 0.0
        for batch in BATCHES:
            caller = server.connect(models.request_rows, batch)
            scores = np.concatenate(
                [await caller(i) for i in range(max(1, min(64, 1024 // batch)))]
            )
            await caller.close()
            worst = max(worst, float(np.abs(scores - expected[: len(scores)]).max()))
        if not worst <= PARITY:
            raise Disagreement(
                f"{name} differs from the expected scores by {worst:.3g}, expected at most {PARITY}"
            )
        found[name] = worst
    return found


class Alone:
    """ONNX Runtime in this process, with one thread for each of the served model's `instances`."""

    def __init__(self, graph: Path, rows: FeatureRows, instances: int) -> None:
        self.instances = instances
        self._session, self._rows = open_graph(graph), rows

    def run(self, batch: int, seconds: float, *, threads: int = 1, pause: float = 0.0) -> Responses:
        """Run batches in each thread for `seconds`, with a pause before each batch."""
        began = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            runs = list(
                pool.map(lambda _: self._run_on(batch, began + seconds, pause), range(threads))
            )
        due, latencies = (np.concatenate(parts) for parts in zip(*runs))
        return Responses(due, latencies, time.monotonic() - began, {}, {})

    def _run_on(
        self, batch: int, end: float, pause: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        sent, latencies = [], []
        last = len(self._rows.dense) - batch
        while time.monotonic() < end:
            at = slice(start := (len(sent) * batch) % (last + 1), start + batch)
            rows = {
                DENSE_INPUT: self._rows.dense[at],
                CATEGORICAL_INPUT: self._rows.categorical[at],
            }
            time.sleep(pause)
            now = time.monotonic()
            self._session.run([PROBABILITY_OUTPUT.name], rows)
            sent.append(now)
            latencies.append(time.monotonic() - now)
        return np.array(sent), np.array(latencies)


async def closed(
    servers: dict[str, MeasuredServer], alone: Alone, rows: FeatureRows, *, sizes: Sizes
) -> dict[str, Any]:
    """Return the summaries of all rounds per batch size, concurrency and server.

    ONNX Runtime alone has as many threads as the server can use: one per caller, but at most one
    per instance. For one caller, there is a second measurement with a pause before each batch
    (`WOKEN`), because a core is slower after a pause.
    """
    results: dict[str, Any] = {}
    for _ in range(sizes.rounds):
        for batch in BATCHES:
            of_batch = results.setdefault(str(batch), {})
            for concurrency in sizes.concurrencies:
                run = alone.run(batch, sizes.seconds, threads=min(concurrency, alone.instances))
                alone_runs = of_batch.setdefault(str(concurrency), {}).setdefault(IN_PROCESS, [])
                alone_runs.append(summary(run, batch))
                if concurrency == 1:
                    run = alone.run(batch, sizes.seconds, pause=WOKEN_AFTER)
                    of_batch["1"].setdefault(WOKEN, []).append(summary(run, batch))
                for name, server in servers.items():
                    caller = server.connect(rows, batch)
                    await caller(0)
                    responses = await closed_loop(caller, concurrency, sizes.seconds)
                    await caller.close()
                    runs = of_batch.setdefault(str(concurrency), {}).setdefault(name, [])
                    runs.append(summary(responses, batch))
    return results


async def half_load(
    servers: dict[str, MeasuredServer],
    alone: Alone,
    rows: FeatureRows,
    *,
    sizes: Sizes,
    capacities: dict[int, dict[str, float]],
) -> dict[str, Any]:
    """Run open loops at half of our capacity, and return their results per batch size.

    All servers get the same rate, unless their capacity is too low.
    """
    results: dict[str, Any] = {}
    for turn in range(sizes.open_rounds):
        for batch, of_name in capacities.items():
            rate = of_name[OURS] / 2
            of_batch = results.setdefault(str(batch), {"requests_per_second": rate, "rounds": {}})[
                "rounds"
            ]
            run = summary(alone.run(batch, sizes.open_seconds / 2), batch)
            of_batch.setdefault(IN_PROCESS, []).append(run)
            for name, server in servers.items():
                if of_name[name] < _HEADROOM * rate:
                    continue
                caller = server.connect(rows, batch)
                await caller(0)
                before = _counters(server)
                responses = await open_loop(caller, rate, sizes.open_seconds, seed=turn)
                after = _counters(server)
                await caller.close()
                run = summary(responses, batch)
                if before and after and run["mean_ms"] is not None:
                    run["split_ms"] = server_split(before, after, run["mean_ms"])
                of_batch.setdefault(name, []).append(run)
    return results


def _counters(server: MeasuredServer) -> dict[str, int] | None:
    """Return the server's counters of the model, or None for a web server."""
    if server.target.startswith("/"):
        return None
    with InferenceServerClient(server.address) as client:
        return counters(client, server.target)


def cold_starts(ours: Released, models: Models, sizes: Sizes) -> list[float]:
    """Start servers on a copy of the served model, and return the seconds until each is ready."""
    repository = models.folder / "cold"
    shutil.copytree(ours.repository / CRITEO_RECOMMENDER.name, repository / CRITEO_RECOMMENDER.name)
    found = []
    for _ in range(sizes.starts):
        with TritonServer(repository, log=models.folder / "cold.log") as server:
            assert server.start_seconds is not None, "the server is ready"
            found.append(server.start_seconds)
    return found


async def release_under_load(
    ours: Released,
    server: MeasuredServer,
    rows: FeatureRows,
    *,
    quiet_seconds: float,
    rate: float,
    batch: int,
    seed: int,
) -> dict[str, Any]:
    """Release a model during an open loop, and later load the echo model again on the same server.

    The echo model computes nothing, but Triton starts as many processes for it as for a version.
    Latencies during a load of the echo model are therefore a lower bound for a release on this
    machine.

    Returns the figures of the release, and the ratio for the echo model as `echo_ratio`.
    """
    command, manifest = ours.command(seed)
    caller = server.connect(rows, batch)
    await caller(0)
    done = asyncio.Event()
    load = asyncio.ensure_future(open_loop(caller, rate, float("inf"), seed=seed, until=done))
    try:
        await asyncio.sleep(quiet_seconds)
        began = time.monotonic()
        # Start the steps as the local pipeline starts them.
        process = await asyncio.create_subprocess_exec(
            *at_low_priority(command),
            cwd=REPOSITORY,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        _, complaint = await process.communicate()
        await asyncio.sleep(quiet_seconds)
        echo_began = time.monotonic()
        await asyncio.to_thread(reload_model, ours.server.grpc_url, FLOOR)
        echo_ended = time.monotonic()
        await asyncio.sleep(1.0)
    finally:
        done.set()
        responses = await load
        await caller.close()
    if process.returncode:
        raise RuntimeError(f"release ended with {process.returncode}: {complaint.decode()[-2000:]}")
    released = Release.read(manifest)
    window = _window(ours, released.version)
    # The quiet time is shorter than `quiet_seconds`, and leaves out the first requests on a new
    # connection.
    quiet = quiet_seconds - 1.0
    echo = window_figures(
        responses, window=(echo_began, echo_ended), quiet=(echo_began - quiet, echo_began)
    )
    return {
        "version": released.version,
        **window_figures(responses, window=window, quiet=(began - quiet, began)),
        "echo_ratio": echo["ratio"],
        **summary(responses, batch),
    }


def _window(ours: Released, version: int) -> tuple[float, float]:
    """Return the times when the journal announced the version and recorded it as live.

    Both times are values of `time.monotonic`.
    """
    times = {line.action: line.time for line in read_entries(ours.store) if line.version == version}
    since = time.time() - time.monotonic()
    announced, live = (
        datetime.fromisoformat(times[action]).timestamp() - since for action in (INTENT, RELEASE)
    )
    return announced, live


def summary(responses: Responses, batch: int) -> dict[str, Any]:
    """Return the summary of one run.

    The summary has two percentiles and the mean in milliseconds, rows per second and failed
    requests.
    """
    latencies = Latencies.of(responses.latencies)
    return {
        "p50_ms": latencies.p50,
        "p99_ms": latencies.p99,
        "mean_ms": latencies.mean,
        "rows_per_second": batch * len(responses.due) / responses.seconds,
        "num_answered": len(responses.due),
        "num_failed": sum(responses.failed.values()),
        "errors": list(responses.first_errors.values()),
    }


def over_rounds(rounds: Sequence[dict[str, Any]], figure: str) -> Spread:
    """Return the spread of one value of `summary` over all rounds that have the value."""
    return spread([one[figure] for one in rounds if one[figure] is not None])


def ratios(ours: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], figure: str) -> Spread:
    """Return our figure as a multiple of another server's, per round."""
    return spread([mine[figure] / theirs[figure] for mine, theirs in zip(ours, others)])


def least_ms(rounds: dict[str, list[dict[str, Any]]]) -> list[float]:
    """Return a lower bound of the p50 for each round, in milliseconds.

    No server that runs the graph can have a lower p50. The bound is the p50 of the echo model, plus
    the p50 of ONNX Runtime with a pause before each batch (`WOKEN`).
    """
    return [floor["p50_ms"] + woken["p50_ms"] for floor, woken in zip(rounds[FLOOR], rounds[WOKEN])]


def beyond_compute(
    ours: Sequence[dict[str, Any]],
    compute: Sequence[dict[str, Any]],
    floor: Sequence[dict[str, Any]],
) -> Spread:
    """Return the p99 that serving adds to the computation of the model, per round.

    The unit is the p99 of the echo model: (p99 of `ours` - p99 of `compute`) / p99 of `floor`.
    """
    return spread(
        [(a["p99_ms"] - b["p99_ms"]) / c["p99_ms"] for a, b, c in zip(ours, compute, floor)]
    )


def server_split(
    before: dict[str, int], after: dict[str, int], mean_ms: float
) -> dict[str, float] | None:
    """Return the parts of a request's mean time in milliseconds, from two reads of the counters.

    `mean_ms` is the mean time that the client measured. The part `client and network` is `mean_ms`
    minus the parts of the server. Returns None without requests between the reads.
    """
    moved = increase(before, after)
    if not moved["requests"]:
        return None
    parts = {part: moved[part] / moved["requests"] / 1e6 for part in PARTS}
    total = moved["request"] / moved["requests"] / 1e6
    return {
        **parts,
        "front end": total - sum(parts.values()),
        "client and network": mean_ms - total,
    }
