"""`evergreen simulate autoscaler` runs the shipped autoscaler over a trace."""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.serving import MAX_BATCH_ROWS
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from tools.autoscaling.cluster import StartTimes
from tools.autoscaling.hpa import (
    QUEUE_METRIC,
    SHIPPED_AUTOSCALER,
    SYNC_SECONDS,
    Autoscaler,
    read_autoscaler,
    with_queue_target,
)
from tools.autoscaling.queueing import PodSettings, read_service_times, shipped_or_file
from tools.autoscaling.simulation import Settings, SimulatedRun, Simulation
from tools.autoscaling.traces import DEFAULT_ROWS, SYNTHETIC, Trace, read_trace

_MAX_LINES = 48


def _describe(outcome: SimulatedRun, *, objective_ms: float) -> str:
    """Return the run as text.

    Args:
        outcome: The simulated run.
        objective_ms: Queue time in milliseconds. A request that waited longer is counted as late.
    """
    waits = np.concatenate(outcome.waits)
    counters, wanted = outcome.counters, [moment.wanted for moment in outcome.moments]
    num_dropped = counters.refused + counters.timed_out + outcome.num_without_pod
    num_late = int((waits > objective_ms / 1e3).sum()) + num_dropped
    mean = outcome.pod_hours * 3600 / outcome.seconds
    num_changes = sum(1 for a, b in zip(wanted, wanted[1:]) if a != b)
    return "\n".join(
        [
            *_time_line(outcome),
            "",
            f"{outcome.num_arrived:,} requests: {counters.answered:,} answered, "
            f"{counters.refused:,} found a full queue, {counters.timed_out:,} waited too long, "
            f"{outcome.num_without_pod:,} found no ready pod, {outcome.num_inside:,} unfinished at "
            "the end",
            f"queue time p50 {_quantile_ms(waits, 0.5)} ms, p99 {_quantile_ms(waits, 0.99)} ms; "
            f"{num_late / max(1, outcome.num_arrived):.3%} later than {objective_ms:g} ms or "
            "dropped",
            f"replicas {mean:.2f} on average, {max(wanted)} at most, changed {num_changes} times",
            f"{outcome.pod_hours:.1f} pod hours (and as many hours of GPUs or slices, if the pods "
            "have them)",
        ]
    )


def _time_line(outcome: SimulatedRun) -> Iterator[str]:
    """Yield a header and a table of the simulation, ordered by time.

    Each line summarizes several syncs. In a long simulation, each line covers more syncs.
    """
    yield f"{'time':>6}  {'ready':>5}  {'wanted':>6}  {'served/s':>8}  {'p50 ms':>8}  {'p99 ms':>8}"
    size = -(-len(outcome.moments) // _MAX_LINES)
    for start in range(0, len(outcome.moments), size):
        moments = outcome.moments[start : start + size]
        waits = np.concatenate(outcome.waits[start : start + size])
        seconds = int(moments[-1].seconds)
        yield (
            f"{seconds // 3600:3d}:{seconds // 60 % 60:02d}  "
            f"{np.mean([each.ready for each in moments]):5.1f}  "
            f"{np.mean([each.wanted for each in moments]):6.1f}  "
            f"{len(waits) / (len(moments) * SYNC_SECONDS):8.1f}  {_quantile_ms(waits, 0.5):>8}  "
            f"{_quantile_ms(waits, 0.99):>8}"
        )


def _quantile_ms(waits: NDArray[np.float32], quantile: float) -> str:
    return f"{1e3 * float(np.quantile(waits, quantile)):.1f}" if len(waits) else "none"


_INITIAL_LOAD = 0.6
"""Load of the pods at the start of a simulation, as a share of their capacity."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen simulate autoscaler",
        description="Run the shipped autoscaler over a trace of requests, without a cluster. The "
        "simulation takes about 4 seconds per million of requests.",
    )
    trace = parser.add_argument_group("requests")
    trace.add_argument(
        "--trace",
        required=True,
        metavar="FILE",
        help="CSV: seconds,requests_per_second[,rows_per_request]; or a synthetic one: "
        f"{', '.join(sorted(SYNTHETIC))}",
    )
    trace.add_argument(
        "--peak-rate",
        type=_positive,
        default=1200.0,
        metavar="N",
        help="requests per second of a synthetic trace's peak",
    )
    trace.add_argument(
        "--rows",
        type=int,
        choices=range(1, MAX_BATCH_ROWS + 1),
        default=DEFAULT_ROWS,
        metavar="N",
        help="rows per request of a synthetic trace",
    )
    trace.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of arrivals, choices and service times (default: 0)",
    )

    scaler = parser.add_argument_group("autoscaler (default: as the manifests ship it)")
    scaler.add_argument(
        "--manifest",
        type=Path,
        default=SHIPPED_AUTOSCALER,
        help="another ScaledObject (default: the one of k8s/components/keda)",
    )
    scaler.add_argument(
        "--target-queue-microseconds",
        type=_positive,
        metavar="N",
        help="queue target in place of the manifest's",
    )

    pods = parser.add_argument_group("pods and nodes")
    pods.add_argument(
        "--service-times",
        type=shipped_or_file,
        default="demo",
        metavar="FILE",
        help="JSON of benchmarks.service_times, or a network measured on a CPU: demo (5 ms for a "
        "request of 1024 rows) or sample (62 ms). The shipped target is for demo, the default",
    )
    pods.add_argument(
        "--instances",
        type=int,
        choices=range(1, 65),
        default=PodSettings.instances,
        metavar="N",
        help="model instances of a pod",
    )
    pods.add_argument(
        "--node-seconds",
        type=_not_negative,
        default=StartTimes.node,
        help="start of a node and pull of the image; 0 = a node is free (default: %(default)g, an "
        "assumption)",
    )
    pods.add_argument(
        "--pod-seconds",
        type=_not_negative,
        default=StartTimes.pod,
        help="from the container's start to a loaded model (default: %(default)g, an assumption)",
    )

    out = parser.add_argument_group("results")
    out.add_argument(
        "--objective-ms",
        type=_not_negative,
        default=100.0,
        help="longest queue time that counts as in time",
    )
    return parser


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, expected 0 or more")
    return number


def _positive(text: str) -> float:
    number = _not_negative(text)
    # Kubernetes' quantities are multiples of a thousandth. The upper limit is far above any
    # expected rate or time.
    if not 0.001 <= number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}, expected 0.001 to 1e6")
    return number


def _settings(arguments: argparse.Namespace, trace: Trace, spec: Autoscaler) -> Settings:
    times = read_service_times(arguments.service_times)
    busy = (
        trace.rates[0]
        * times.of_rows(int(trace.rows[0]))
        * times.mean_multiple
        / arguments.instances
    )
    return Settings(
        service_times=times,
        pod=PodSettings(instances=arguments.instances),
        starts=StartTimes(node=arguments.node_seconds, pod=arguments.pod_seconds),
        initial_replicas=min(
            max(math.ceil(busy / _INITIAL_LOAD), spec.min_replicas), spec.max_replicas
        ),
        seed=arguments.seed,
    )


def _print_inputs(trace: Trace, settings: Settings, spec: Autoscaler) -> None:
    """Print what is simulated, and compare the queue target with docs/kubernetes/autoscaling.md."""
    times = settings.service_times
    usual = 1e6 * times.of_rows(int(trace.rows[0]))
    print(
        f"trace {trace.name}: {trace.seconds / 3600:g} h, about {trace.num_expected:,.0f} requests"
    )
    print(f"service times: {times.what}")
    print(
        f"a first request takes {usual:,.0f} us of an instance, for which the rule gives a queue "
        f"target of {usual / 5:,.0f} us"
    )
    target = next(
        (metric.target for metric in spec.metrics if metric.name == QUEUE_METRIC), usual / 5
    )
    print(f"replicas {spec.min_replicas} to {spec.max_replicas}, queue target {target:,.0f} us")
    if not usual / 15 <= target <= usual:
        print(
            "such a target keeps the replicas near their maximum or minimum: see "
            "docs/kubernetes/autoscaling.md, Choosing the targets"
        )


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one simulation, and return 0."""
    arguments = build_parser().parse_args(argv)
    generate = SYNTHETIC.get(arguments.trace)
    if generate is None:
        trace = read_trace(Path(arguments.trace))
    else:
        trace = generate(arguments.peak_rate, arguments.seed, arguments.rows)
    spec = read_autoscaler(arguments.manifest)
    if arguments.target_queue_microseconds is not None:
        spec = with_queue_target(spec, arguments.target_queue_microseconds)
    settings = _settings(arguments, trace, spec)
    _print_inputs(trace, settings, spec)
    outcome = Simulation(trace, spec, settings).run()
    print(_describe(outcome, objective_ms=arguments.objective_ms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
