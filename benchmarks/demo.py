"""Measure the duration of the demo and its stages, for `make benchmark-demo`.

The benchmark runs `make demo` from an empty folder, and reads the demo's `summary.json`. There is
no smaller demo, so `--quick` changes nothing.
"""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import benchmark_parser, documented, run_to_end
from benchmarks.spread import Figure, spread

FOLDER = Path("build/demo")
SECONDS_TARGET = 100
STAGES = {
    "first_run": "first model through the pipeline",
    "baseline": "traffic before the drift",
    "drift_to_detection": "from the change to the decision to retrain",
    "trigger_to_serving": "from that decision to serving, beside traffic",
    "bad_release": "a bad release and its rollback",
    "drain": "accounting for every record",
    "verify": "every score and decision made again",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo once, and return its exit code."""
    flags = benchmark_parser("demo", __doc__, quick="the same").parse_args(argv)
    with documented(flags) as document:
        shutil.rmtree(FOLDER, ignore_errors=True)
        began = time.monotonic()
        print(run_to_end([sys.executable, "-m", "cli", "demo", f"--folder={FOLDER}"]))
        seconds = time.monotonic() - began
        summary = document["summary"] = json.loads((FOLDER / "summary.json").read_text())
        document["figures"] = [
            Figure("the whole demo", spread([seconds]), "s", target=SECONDS_TARGET),
            *(
                Figure(label, spread([summary["seconds"][stage]]), "s")
                for stage, label in STAGES.items()
            ),
            Figure(
                "requests failed", spread([summary["requests"]["failed"]]), "requests", target=0
            ),
            Figure("request of 64 rows, p50", spread([summary["latency_ms"]["p50"]]), "ms"),
            Figure("request of 64 rows, p99", spread([summary["latency_ms"]["p99"]]), "ms"),
            Figure(
                "a bad release is rolled back automatically",
                spread([summary["bad_release"]["rolled_back"]["seconds"]]),
                "s",
            ),
        ]
    return 0


if __name__ == "__main__":
    sys.exit(main())
