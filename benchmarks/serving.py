"""How fast serving is, against peers that run beside it: `make benchmark-serving`.

Ours is released by deployment's command line onto the bundled tritonserver. Beside it: `reference`, an NVTabular
workflow and then the network as an ensemble of two Python models in the same server binary; `web`, our graph under
FastAPI and uvicorn, asked in JSON and in bytes; `floor`, a model that computes nothing, in our server. That all but the
floor give the same scores is checked before anything is timed. Client, servers and peers share the machine.

Prints latencies, rows per second, where a request's time goes, cold starts and releases under load; writes all of it as
JSON. A missed target is printed as missed and the exit code stays 0; contestants that disagree are an error.

What is measured how is said in `serving_model`, `serving_contestants`, `serving_load`, `serving_runs` and
`serving_figures`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine, serving_printing
from benchmarks.serving_contestants import running
from benchmarks.serving_model import Models
from benchmarks.serving_runs import (
    FULL,
    QUICK,
    Alone,
    Disagreement,
    Sizes,
    check_parity,
    closed,
    cold_starts,
    half_load,
    releases_under_load,
)
from benchmarks.serving_targets import OURS, capacities, judge
from components.runtime.durable import write_whole
from inference_client.load import run_precisely
from pipelines.local.environments import SERVING_PEERS, python_of

_SMALL_BATCHES = (1, 64)
_RELEASE_BATCH, _RELEASE_LOAD = 64, 0.25
"""Rows per request while releases happen, and the share of the capacity that the load takes."""


def measure(scratch: Path, sizes: Sizes) -> dict[str, Any]:
    """All figures, printed as they come.

    Raises:
        Disagreement: the contestants do not give the same scores.
    """
    models = Models(scratch, python_of(SERVING_PEERS))
    results: dict[str, Any] = {"table_rows": sum(models.workflow.slot_sizes)}
    with running(models, python_of(SERVING_PEERS)) as (ours, contestants):
        results["parity"] = run_precisely(check_parity(contestants, models))
        differences = ", ".join(f"{name} {value:.1e}" for name, value in results["parity"].items())
        print(f"{results['table_rows']:,} table rows; largest difference from the expected scores: {differences}")
        alone = Alone(ours.graph(1), models.asked, ours.options().instances)
        results["closed"] = run_precisely(closed(contestants, alone, models.asked, sizes))
        serving_printing.closed(results["closed"])
        rates = {batch: capacities(results["closed"], batch) for batch in _SMALL_BATCHES}
        results["half_load"] = run_precisely(half_load(contestants, alone, models.asked, sizes, rates))
        serving_printing.half_load(results["half_load"])
        results["cold_starts"] = cold_starts(ours, models, sizes)
        serving_printing.starts(results["cold_starts"])
        load = {"rate": _RELEASE_LOAD * rates[_RELEASE_BATCH][OURS], "batch": _RELEASE_BATCH}
        results["releases"] = run_precisely(releases_under_load(ours, contestants[OURS], models.asked, sizes, **load))
        serving_printing.releases(results["releases"])
    return results


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two or three minutes: fewer and shorter rounds")
    parser.add_argument(
        "--output", type=Path, default=Path("build/benchmarks/serving.json"), help="JSON file with all figures"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything; 0 = all figures are there, whether or not they meet their targets."""
    flags = build_parser().parse_args(argv)
    facts, sizes = machine.facts(), QUICK if flags.quick else FULL
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    other_work = machine.OtherWork()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        try:
            results = measure(Path(scratch), sizes)
        except Disagreement as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    found = judge(results)
    serving_printing.targets(found)
    document = {
        "machine": facts,
        "sizes": asdict(sizes),
        "other_work_share": other_work.share(),
        "targets": [{**target._asdict(), "value": target.value._asdict()} for target in found],
        "results": results,
    }
    if warning := other_work.warning():
        print(warning)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(flags.output, json.dumps(document, indent=2) + "\n")
    print(f"written: {flags.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
