"""`evergreen audit backtest ARCHIVE` shows when policies would have started runs on recorded data.

The records come from a monitor's archive or a lake. The rules are set by the same flags as for the
monitor. `monitoring.backtest.backtest` computes the decisions.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from evergreen.config import reader
from evergreen.config.monitor import DecisionSettings
from evergreen.config.reader import flat_values, make_settings, read_flags
from evergreen.registry.recommenders import logged_recommender
from evergreen.runtime.errors import expect
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.storage.uris import open_objects, typed_folder, typed_uri
from monitoring.backtest.backtest import (
    Backtest,
    Span,
    backtest,
    evaluate_requests,
    no_reference,
    parse_time,
    read_requests,
)
from monitoring.policies.evaluation import no_baseline
from monitoring.released_models import ReleasedModels
from monitoring.state.rules_file import read_rules

_FEW_POINTS = 20
"""Minimum number of decision points. With fewer decision points, the command warns that the result
is unreliable."""


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the backtests and print a table or JSON."""
    arguments = build_parser().parse_args(argv)
    known = (
        flat_values(read_rules(typed_folder(arguments.state, "--state"))) if arguments.state else {}
    )
    settings = make_settings(DecisionSettings, **known | read_flags(DecisionSettings, arguments))
    expect(arguments, "at least 0", lambda value: value >= 0, "run_seconds")
    archive = open_objects(typed_uri(arguments.archive))
    store = typed_folder(arguments.store, "--store") if arguments.store else None
    recommender = logged_recommender(store) if store else None
    user = recommender.data.user if recommender else None
    backtests = []
    for policies in arguments.policy or [settings.policies.policies]:
        of_run = make_settings(DecisionSettings, **{**flat_values(settings), "policies": policies})
        features = (
            recommender.features if recommender and of_run.drift.drift_bucket_seconds else None
        )
        points = evaluate_requests(
            read_requests(
                archive, Span(arguments.start, arguments.end), features=features, user=user
            ),
            of_run,
            baseline=ReleasedModels(store).baseline if store else no_baseline,
            reference=ReleasedModels(store).reference if store else no_reference,
            features=features,
        )
        backtests.append(
            backtest(points, of_run, run_seconds=arguments.run_seconds, drift_at=arguments.drift_at)
        )
    if (fewest := min(each.decision_points for each in backtests)) < _FEW_POINTS:
        times = (
            f"labels wait {settings.evaluation.attribution_window_seconds:g} s, points "
            f"{settings.evaluation.decide_seconds:g} s"
        )
        hint = (
            ""
            if arguments.state
            else "; --state uses the settings of the monitor that recorded them"
        )
        print(
            f"only {fewest} decision points, expected {_FEW_POINTS} or more to compare policies: "
            f"{times}{hint}",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps([asdict(each) for each in backtests], indent=2, allow_nan=False))
    else:
        print(_as_table(backtests))
    return ExitCode.DONE


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = reader.build_parser(
        DecisionSettings,
        prog="evergreen audit backtest",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument(
        "archive",
        metavar="ARCHIVE",
        help="a monitor's archive or a lake: folder or gs://bucket/path",
    )

    def add(flag: str, text: str, **options: Any) -> None:
        parser.add_argument(flag, help=text, **{"default": None, **options})

    add(
        "--policy",
        "like --policies; repeat it to compare policies on the same records",
        action="append",
        metavar="NAMES",
    )
    add("--state", "state folder of a monitor, whose settings replace the defaults", metavar="DIR")
    add("--store", "registry, for the gate's AUC and training profiles", metavar="DIR")
    add("--start", "first event time, ISO 8601 or seconds", type=parse_time, metavar="TIME")
    add("--end", "event time to stop before", type=parse_time, metavar="TIME")
    add("--drift-at", "time of the change in the data, if known", type=parse_time, metavar="TIME")
    add(
        "--run-seconds",
        "seconds from a decision to retrain to the release (default: 600)",
        type=float,
        default=600.0,
    )
    add("--json", "print JSON instead of the table", action="store_true")
    return parser


def _as_table(backtests: Sequence[Backtest]) -> str:
    """Format one line per set of policies. An undefined number is shown as a dash."""
    cells = [list(_figures(backtests[0])), *(list(_figures(each).values()) for each in backtests)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in cells
    ]
    summary = (
        f"{backtests[0].rows:,} matured rows, {backtests[0].decision_points:,} decision points"
    )
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
