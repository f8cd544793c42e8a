"""`evergreen backtest ARCHIVE`: would these policies have fired over the records of an archive or a lake?

Parses and calls; the flags of judging are the monitor's own. Judging is left to `monitoring.backtest.judging`, the
output to `report`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.runtime.durable import write_whole
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.storage.locations import open_objects
from components.storage.uris import typed_folder, typed_uri
from monitoring.backtest import report
from monitoring.backtest.archived_requests import Span, parse_time, read_requests
from monitoring.backtest.judging import backtest, judge_requests, no_reference
from monitoring.backtest.settings import JudgingSettings
from monitoring.deciding.judging import no_baseline
from monitoring.flags import build_parser, expect, flat_values, make_settings, settings_of
from monitoring.released_models import ReleasedModels


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table or JSON, and writes the page."""
    arguments = _parser().parse_args(argv)
    values = vars(arguments)
    names = settings_of(JudgingSettings)
    settings = make_settings(JudgingSettings, **{name: value for name, value in values.items() if name in names})
    expect(arguments, "at least 0", lambda value: value >= 0, "run_seconds")
    archive = open_objects(typed_uri(arguments.archive))
    store = typed_folder(arguments.store, "--store") if arguments.store else None
    backtests = []
    for policies in arguments.policy or [settings.policies.policies]:
        of_run = make_settings(JudgingSettings, **{**flat_values(settings), "policies": policies})
        is_drift_judged = store is not None and bool(of_run.drift.drift_bucket_seconds)
        judgements = judge_requests(
            read_requests(archive, Span(arguments.start, arguments.end), features=is_drift_judged),
            of_run,
            baseline=ReleasedModels(store).baseline if store else no_baseline,
            reference=ReleasedModels(store).reference if store else no_reference,
        )
        backtests.append(backtest(judgements, of_run, run_seconds=arguments.run_seconds, drift_at=arguments.drift_at))
    if arguments.html:
        write_whole(arguments.html, report.as_page(backtests, drift_at=arguments.drift_at))
    print(report.as_json(backtests) if arguments.json else report.as_table(backtests), end="")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = build_parser(JudgingSettings, prog="evergreen backtest", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("archive", metavar="ARCHIVE", help="a monitor's archive or a lake: folder or gs://bucket/path")

    def add(flag: str, text: str, **options: Any) -> None:
        parser.add_argument(flag, help=text, **{"default": None, **options})

    add("--policy", "like --policies; repeated, to compare them on the same records", action="append", metavar="NAMES")
    add("--store", "model store: what the gate measured, what models learned from", metavar="DIR")
    add("--start", "first event time, ISO 8601 or seconds", type=parse_time, metavar="TIME")
    add("--end", "event time to stop before", type=parse_time, metavar="TIME")
    add("--drift-at", "when the world changed, if that is known", type=parse_time, metavar="TIME")
    add("--run-seconds", "seconds from a fire to its release (default: 600)", type=float, default=600.0)
    add("--json", "print JSON instead of the table", action="store_true")
    add("--html", "also write a page with the chart", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
