"""`evergreen backtest ARCHIVE`: would these policies have fired over the records of an archive or a lake?

Parses, calls and prints; the flags of judging are the monitor's own. Judging is left to `monitoring.backtest.judging`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from evergreen.config.monitor import JudgingSettings
from evergreen.config.reader import build_parser, flat_values, make_settings, read_flags
from evergreen.registry.recommenders import logged_recommender
from evergreen.runtime.errors import expect
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.storage.uris import open_objects, typed_folder, typed_uri
from monitoring.backtest.judging import (
    Backtest,
    Span,
    backtest,
    judge_requests,
    no_reference,
    parse_time,
    read_requests,
)
from monitoring.policies.judging import no_baseline
from monitoring.released_models import ReleasedModels
from monitoring.state.judging_file import read_judging

FEW_POINTS = 20
"""Decision points below which a backtest says little of its policies: it warns."""


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table or JSON."""
    arguments = _parser().parse_args(argv)
    known = flat_values(read_judging(typed_folder(arguments.state, "--state"))) if arguments.state else {}
    settings = make_settings(JudgingSettings, **known | read_flags(JudgingSettings, arguments))
    expect(arguments, "at least 0", lambda value: value >= 0, "run_seconds")
    archive = open_objects(typed_uri(arguments.archive))
    store = typed_folder(arguments.store, "--store") if arguments.store else None
    recommender = logged_recommender(store) if store else None
    user = recommender.data.user if recommender else None
    backtests = []
    for policies in arguments.policy or [settings.policies.policies]:
        of_run = make_settings(JudgingSettings, **{**flat_values(settings), "policies": policies})
        features = recommender.features if recommender and of_run.drift.drift_bucket_seconds else None
        judgements = judge_requests(
            read_requests(archive, Span(arguments.start, arguments.end), features=features, user=user),
            of_run,
            baseline=ReleasedModels(store).baseline if store else no_baseline,
            reference=ReleasedModels(store).reference if store else no_reference,
            features=features,
        )
        backtests.append(backtest(judgements, of_run, run_seconds=arguments.run_seconds, drift_at=arguments.drift_at))
    if (fewest := min(each.decision_points for each in backtests)) < FEW_POINTS:
        said = (
            f"labels wait {settings.judge.attribution_window_seconds:g} s, points {settings.judge.decide_seconds:g} s"
        )
        hint = "" if arguments.state else "; --state takes the settings of the monitor that recorded them"
        print(
            f"only {fewest} decision points, expected {FEW_POINTS} or more to tell policies: {said}{hint}",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps([asdict(each) for each in backtests], indent=2, allow_nan=False))
    else:
        print(_as_table(backtests))
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = build_parser(JudgingSettings, prog="evergreen backtest", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("archive", metavar="ARCHIVE", help="a monitor's archive or a lake: folder or gs://bucket/path")

    def add(flag: str, text: str, **options: Any) -> None:
        parser.add_argument(flag, help=text, **{"default": None, **options})

    add("--policy", "like --policies; repeated, to compare them on the same records", action="append", metavar="NAMES")
    add("--state", "state folder of a monitor: its settings in place of the defaults", metavar="DIR")
    add("--store", "model store: what the gate measured, what models learned from", metavar="DIR")
    add("--start", "first event time, ISO 8601 or seconds", type=parse_time, metavar="TIME")
    add("--end", "event time to stop before", type=parse_time, metavar="TIME")
    add("--drift-at", "when the world changed, if that is known", type=parse_time, metavar="TIME")
    add("--run-seconds", "seconds from a fire to its release (default: 600)", type=float, default=600.0)
    add("--json", "print JSON instead of the table", action="store_true")
    return parser


def _as_table(backtests: Sequence[Backtest]) -> str:
    """Plain text, one line per setting of policies; a number that does not exist is a dash."""
    cells = [list(_figures(backtests[0])), *(list(_figures(each).values()) for each in backtests)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in cells]
    summary = f"{backtests[0].rows:,} matured rows, {backtests[0].decision_points:,} decision points"
    return "\n".join([summary, *lines])


def _figures(each: Backtest) -> dict[str, str]:
    first = datetime.fromtimestamp(each.fires[0].time, timezone.utc) if each.fires else None
    return {
        "policies": each.policies,
        "fires": str(len(each.fires)),
        "first fire": f"{first:%Y-%m-%d %H:%M:%S UTC}" if first else "-",
        "delay": "-" if each.delay_seconds is None else f"{each.delay_seconds:.0f} s",
        "false alarms": "-" if each.false_alarms is None else str(each.false_alarms),
        "held": str(each.held),
    }


if __name__ == "__main__":
    sys.exit(main())
