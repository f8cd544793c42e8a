"""`evergreen scale simulate`: runs the shipped autoscaler over a trace; prints, and writes JSON and a chart."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path

from components.contracts.serving import MAX_BATCH_ROWS
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError
from components.runtime.exit_codes import exits_with_code
from k8s.scaling import report
from k8s.scaling.cluster import StartTimes
from k8s.scaling.hpa import Autoscaler
from k8s.scaling.manifests import (
    HPA_MANIFEST,
    KEDA_MANIFEST,
    PENDING_METRIC,
    QUEUE_METRIC,
    read_autoscaler,
    read_queries,
    with_targets,
)
from k8s.scaling.queueing import PodSettings
from k8s.scaling.service_times import read_service_times, shipped_or_file
from k8s.scaling.simulation import Settings, Simulation
from k8s.scaling.traces import DEFAULT_ROWS, SYNTHETIC, Trace, read_trace

_SHIPPED = {"hpa": HPA_MANIFEST, "keda": KEDA_MANIFEST}
_INITIAL_LOAD = 0.6
"""Share of their capacity at which the pods are loaded when a simulation begins."""


def build_parser() -> argparse.ArgumentParser:
    """The room's flags."""
    parser = argparse.ArgumentParser(prog="evergreen scale", description="Try the autoscaler without a cluster.")
    actions = parser.add_subparsers(dest="action", required=True)
    simulate = actions.add_parser(
        "simulate",
        help="run the shipped autoscaler over a trace of requests",
        description="Run the shipped autoscaler over a trace of requests; some 3 seconds per million of them. "
        "Try: evergreen scale simulate --trace spike --chart build/spike.svg",
    )
    trace = simulate.add_argument_group("requests")
    trace.add_argument(
        "--trace", required=True, metavar="FILE",
        help=f"CSV: seconds,requests_per_second[,rows_per_request]; or a synthetic one: {', '.join(sorted(SYNTHETIC))}",
    )  # fmt: skip
    trace.add_argument(
        "--peak-rate", type=float, default=1200.0,
        help="requests per second of a synthetic trace's peak (default: %(default)g)",
    )  # fmt: skip
    trace.add_argument(
        "--rows", type=int, default=DEFAULT_ROWS, help="rows per request of a synthetic trace (default: %(default)s)"
    )
    trace.add_argument("--seed", type=int, default=0, help="of arrivals, choices and service times (default: 0)")
    trace.add_argument("--write-trace", type=Path, metavar="FILE", help="also write the trace as CSV")

    scaler = simulate.add_argument_group("autoscaler (default: as the manifests ship it)")
    scaler.add_argument("--scaler", choices=_SHIPPED, default="hpa", help="HPA with prometheus-adapter, or KEDA")
    scaler.add_argument("--manifest", type=Path, help="another HPA or ScaledObject than the shipped one")
    scaler.add_argument("--min-replicas", type=int, help="instead of the manifest's")
    scaler.add_argument("--max-replicas", type=int, help="instead of the manifest's")
    scaler.add_argument("--target-queue-microseconds", type=_numbers, metavar="N[,N...]", help="with --compare several")
    scaler.add_argument("--target-pending", type=_numbers, metavar="N[,N...]", help="with --compare several")
    scaler.add_argument("--compare", action="store_true", help="run every pair of the targets; print one table")

    pods = simulate.add_argument_group("pods and nodes")
    pods.add_argument(
        "--service-times", type=shipped_or_file, default="demo", metavar="FILE",
        help="JSON of benchmarks.service_times, or a network that was measured on a CPU: demo (5 ms a request of 1024 "
        "rows; the shipped target is for it) or sample (62 ms) (default: demo)",
    )  # fmt: skip
    pods.add_argument("--instances", type=int, default=PodSettings.instances, help="model instances of a pod")
    pods.add_argument("--no-batching", action="store_true", help="one request a batch")
    for field in fields(StartTimes):
        name = field.name.replace("_", "-")
        pods.add_argument(f"--{name}-seconds", type=float, default=field.default, help=_START_HELP[field.name])
    pods.add_argument("--pods-per-node", type=int, default=1, help="GPUs, or slices, of a node (default: 1)")
    pods.add_argument(
        "--initial-replicas", type=int, help=f"default: the first rate's at {_INITIAL_LOAD:.0%}% of capacity"
    )
    pods.add_argument("--scrape-seconds", type=float, default=15.0, help="between two scrapes (default: 15)")
    pods.add_argument("--metric-lag-seconds", type=float, default=1.0, help="from scrape to query (default: 1)")

    out = simulate.add_argument_group("results")
    out.add_argument("--objective-ms", type=float, default=100.0, help="queue time that is in time (default: 100)")
    out.add_argument("--price", type=float, help="of a node's hour; prints the cost")
    out.add_argument("--output", type=Path, help="JSON file to write; with --compare a list of all runs")
    out.add_argument("--chart", type=Path, help="SVG file to write; with --compare of the last run")
    return parser


_START_HELP = {
    "node": "start of a node (default: %(default)g, an assumption)",
    "image": "pull of the image onto a fresh node (default: %(default)g, an assumption)",
    "pod": "from the container's start to a loaded model (default: %(default)g, an assumption)",
    "readiness": "from a loaded model to the first request: probe period and endpoints (default: %(default)g)",
    "idle_node": "until a node without pods goes (default: %(default)g, Cluster Autoscaler's default)",
    "stop": "between leaving the Service and stopping: the preStop pause (default: %(default)g)",
}


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}, expected numbers with commas between them") from error


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what would be noticed only after minutes, or never."""
    for name in ("objective_ms", "price"):
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < math.inf:
            raise ContractError(f"{name.replace('_', '-')} is {value}, expected 0 or more")
    for path in (arguments.output, arguments.chart, arguments.write_trace):
        if path is not None and path.is_dir():
            raise ContractError(f"{path} is a folder, expected a file to write")


def _trace(arguments: argparse.Namespace) -> Trace:
    generate = SYNTHETIC.get(arguments.trace)
    if generate is None:
        return read_trace(Path(arguments.trace))
    if not (0 < arguments.peak_rate < 1e6 and 1 <= arguments.rows <= MAX_BATCH_ROWS and arguments.seed >= 0):
        raise ContractError(
            f"peak rate is {arguments.peak_rate}, rows {arguments.rows}, seed is {arguments.seed}; expected 0 to 1e6 a "
            f"second, 1 to {MAX_BATCH_ROWS} rows, a seed of 0 or more"
        )
    return generate(arguments.peak_rate, arguments.seed, arguments.rows)


def _read_spec(arguments: argparse.Namespace) -> Autoscaler:
    """The autoscaler that is simulated, with the replicas that the flags give.

    Raises:
        ContractError: it asks Prometheus other queries than the shipped ones, which are the ones that are simulated.
    """
    path = arguments.manifest or _SHIPPED[arguments.scaler]
    if arguments.scaler == "keda" and not read_queries(path).items() <= read_queries(KEDA_MANIFEST).items():
        raise ContractError(f"{path} has other queries than {KEDA_MANIFEST}, and only those are simulated")
    spec = read_autoscaler(path)
    return replace(
        spec,
        least=spec.least if arguments.min_replicas is None else arguments.min_replicas,
        most=spec.most if arguments.max_replicas is None else arguments.max_replicas,
    )


def _settings(arguments: argparse.Namespace, trace: Trace, spec: Autoscaler) -> Settings:
    times = read_service_times(arguments.service_times)
    pod = PodSettings(instances=arguments.instances, batches=not arguments.no_batching)
    initial = arguments.initial_replicas
    if initial is None:
        busy = trace.rates[0] * times.of_rows(int(trace.rows[0])) * times.mean_multiple / pod.instances
        initial = min(max(math.ceil(busy / _INITIAL_LOAD), spec.least), spec.most)
    return Settings(
        service_times=times,
        pod=pod,
        starts=StartTimes(**{f.name: getattr(arguments, f"{f.name}_seconds") for f in fields(StartTimes)}),
        pods_per_node=arguments.pods_per_node,
        initial_replicas=initial,
        scrape_seconds=arguments.scrape_seconds,
        metric_lag_seconds=arguments.metric_lag_seconds,
        metrics_by_pod=arguments.scaler == "hpa",
        seed=arguments.seed,
    )


def _targets(arguments: argparse.Namespace, spec: Autoscaler) -> list[dict[str, float]]:
    """The targets to run, the shipped ones where none are given."""
    shipped = {metric.name: metric.target for metric in spec.metrics}
    given = {QUEUE_METRIC: arguments.target_queue_microseconds, PENDING_METRIC: arguments.target_pending}
    for name, targets in given.items():
        if targets:
            with_targets(spec, dict.fromkeys([name], targets[0]))
    values = {name: given.get(name) or (target,) for name, target in shipped.items()}
    runs = [dict(zip(values, each)) for each in product(*values.values())]
    if len(runs) > 1 and not arguments.compare:
        raise ContractError(f"{len(runs)} pairs of targets are given, expected one, or --compare")
    return runs


def _introduce(trace: Trace, settings: Settings, all_targets: Sequence[Mapping[str, float]]) -> None:
    """Says what is simulated, and how the target of queue time compares with the rule of docs/autoscaling.md."""
    times = settings.service_times
    usual = 1e6 * times.of_rows(int(trace.rows[0]))
    print(f"trace {trace.name}: {trace.seconds / 3600:g} h, about {trace.num_expected:,.0f} requests")
    print(f"service times: {times.what}")
    line = f"a first request takes {usual:,.0f} us of an instance: by the rule the queue target is {usual / 5:,.0f} us"
    tried = dict.fromkeys(targets[QUEUE_METRIC] for targets in all_targets if QUEUE_METRIC in targets)
    print(f"{line}, and is {', '.join(f'{each:,.0f}' for each in tried)} us" if tried else line)
    if any(not usual / 15 <= each <= usual for each in tried):
        print(
            "such a target holds the replicas near their most or least: see docs/autoscaling.md, Choosing the targets"
        )


def _simulate(arguments: argparse.Namespace) -> None:
    _check(arguments)
    trace = _trace(arguments)
    spec = _read_spec(arguments)
    settings = _settings(arguments, trace, spec)
    if arguments.write_trace:
        _write_file(arguments.write_trace, trace.as_csv())
    documents = []
    all_targets = _targets(arguments, spec)
    _introduce(trace, settings, all_targets)
    if arguments.compare:
        print(report.table_head(list(all_targets[0]), arguments.objective_ms))
    for targets in all_targets:
        tried = with_targets(spec, targets)
        outcome = Simulation(trace, tried, settings).run()
        figures = report.summarise(outcome, objective_ms=arguments.objective_ms, price=arguments.price)
        points = report.time_line(outcome)
        inputs = {"trace": trace.name, "seed": arguments.seed, "scaler": arguments.scaler,
                  "service_times": settings.service_times.what, "pod": asdict(settings.pod),
                  "starts": asdict(settings.starts)}  # fmt: skip
        documents.append(report.document(figures, points, spec=tried, inputs=inputs))
        if arguments.compare:
            print(report.table_row(list(targets.values()), figures), flush=True)
        else:
            print(report.text(figures, points, objective_ms=arguments.objective_ms))
    if arguments.output:
        _write_file(arguments.output, json.dumps(documents if arguments.compare else documents[0], indent=1) + "\n")
    if arguments.chart:
        named = ", ".join(f"{name} {value:g}" for name, value in all_targets[-1].items())
        title = f"{trace.name} under {named}"
        _write_file(arguments.chart, report.chart(points, title=title, objective_ms=arguments.objective_ms))


def _write_file(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ContractError(f"{path} cannot be written: {error.strerror}") from error


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command."""
    _simulate(build_parser().parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
