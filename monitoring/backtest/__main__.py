"""`evergreen backtest ARCHIVE`: would these policies have fired over the records of an archive or a lake?

Parses and calls; the flags of judging are the monitor's own. Judging is left to `monitoring.backtest.judging`, the
output to `report`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from components.runtime.durable import write_whole
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.storage.locations import open_objects
from components.storage.uris import typed_folder, typed_uri
from monitoring.backtest import report
from monitoring.backtest.archived_requests import Span, parse_time, read_requests
from monitoring.backtest.judging import backtest, judge_requests, no_reference
from monitoring.backtest.settings import CostSettings, JudgingSettings
from monitoring.deciding.judging import no_baseline
from monitoring.flags import build_parser, flat_values, make_settings, settings_of
from monitoring.gate_baselines import GateBaselines
from monitoring.memory.references import StoredReferences


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table or JSON, and writes the page."""
    arguments = _parser().parse_args(argv)
    values = vars(arguments)
    names = settings_of(JudgingSettings)
    settings = make_settings(JudgingSettings, **{name: value for name, value in values.items() if name in names})
    costs = CostSettings(**{f.name: values[f.name] for f in fields(CostSettings) if f.name in values})
    archive = open_objects(typed_uri(arguments.archive))
    store = typed_folder(values["store"], "--store") if "store" in values else None
    backtests = []
    for policies in values.get("policy", [settings.policies.policies]):
        of_run = make_settings(JudgingSettings, **{**flat_values(settings), "policies": policies})
        is_drift_judged = store is not None and bool(of_run.drift.drift_bucket_seconds)
        span = Span(values.get("start"), values.get("end"))
        judgements = judge_requests(
            read_requests(archive, span, features=is_drift_judged),
            of_run,
            baseline=GateBaselines(store) if store else no_baseline,
            reference=StoredReferences(store) if store else no_reference,
        )
        backtests.append(backtest(judgements, of_run, costs))
    if "html" in values:
        write_whole(values["html"], report.as_page(backtests, drift_at=costs.drift_at))
    print(report.as_json(backtests) if arguments.json else report.as_table(backtests), end="")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = build_parser(JudgingSettings, prog="evergreen backtest", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("archive", metavar="ARCHIVE", help="a monitor's archive or a lake: folder or gs://bucket/path")
    parser.add_argument(
        "--policy",
        action="append",
        metavar="NAMES",
        help="like --policies; repeated, to compare several settings of policies over the same records",
    )
    parser.add_argument("--store", metavar="DIR", help="model store: what the gate measured, what models learnt from")
    parser.add_argument("--start", type=parse_time, metavar="TIME", help="first event time, ISO 8601 or seconds")
    parser.add_argument("--end", type=parse_time, metavar="TIME", help="event time to stop before")
    parser.add_argument("--drift-at", type=parse_time, metavar="TIME", help="when the world changed, if that is known")
    for name in ("run_seconds", "gpu_hours_per_run"):
        default = getattr(CostSettings(), name)
        text = {"run_seconds": "seconds from a fire to its release", "gpu_hours_per_run": "GPU hours of one run"}[name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, help=f"{text} (default: {default!r})")
    parser.add_argument("--json", action="store_true", default=False, help="print JSON instead of the table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with the chart")
    return parser


if __name__ == "__main__":
    sys.exit(main())
