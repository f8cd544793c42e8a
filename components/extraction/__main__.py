"""Run the extraction step from the command line.

The output manifest contains the recommender.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from evergreen.config.reader import parse_settings
from evergreen.contracts.manifests import CURRENT, RawDataset
from evergreen.runtime.durable import own_umask
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text

_STEP = "extraction"
_COUNTS = (
    *(
        "train_rows",
        "holdout_rows",
        "straddling_rows",
        "replay_rows",
        "replay_holdout_rows",
        "late_rows",
    ),
    *(
        "late_clicks",
        "malformed",
        "duplicates",
        "updated",
        "conflicting",
        "ahead",
        "left_files",
        "left_rows",
    ),
    "quarantined_files",
)
_TIMES = ("first_event_time", "last_event_time", "watermark")
"""Fields of a `RawDataset` that the step's note contains. The fields in `_COUNTS` have the prefix
`num_` in a `RawDataset`."""


def build_parser() -> argparse.ArgumentParser:
    """Build the step's parser. `--help` is the step's documentation."""
    parser = CommandParser(
        prog="python -m components.extraction",
        description="Copies one time window of click logs, sorted, each row once, into training "
        "and held-out rows.",
    )
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="registry: file:// URI or absolute path")
    parser.add_argument(
        "--work", required=True, help="folder for big data: file:// URI or absolute path"
    )
    parser.add_argument(
        "--lake",
        required=True,
        help="lake with day=YYYY-MM-DD folders: absolute path, file:// or gs://; files from "
        "gs:// are downloaded into <work>/.lake-cache",
    )
    parser.add_argument(
        "--recommender",
        default=CURRENT,
        help="accepted recommender: current (the newest), a number or a digest",
    )
    parser.add_argument(
        "--settings",
        default="",
        help="settings of the recommender to change in this run, such as 'training.seed=7 "
        "model.tower=[64]'",
    )
    parser.add_argument(
        "--window-start",
        default="",
        help="ISO 8601 UTC, inclusive; empty: after the parent's newest training row",
    )
    parser.add_argument(
        "--window-end", default="", help="ISO 8601 UTC, exclusive; empty: to the last row"
    )
    parser.add_argument(
        "--lake-until", default="", help="ISO 8601 UTC: files that were written later are not read"
    )
    parser.add_argument(
        "--parent", default=CURRENT, help="model to continue: current, none, or a model's id"
    )
    parser.add_argument(
        "--champion", default=CURRENT, help="model to beat: current, none, or a released model's id"
    )
    parser.add_argument(
        "--dask-scheduler",
        default="",
        help="address of a running Dask scheduler; without it processes of this machine share the "
        "work",
    )
    parser.add_argument("--output", required=True, help="where the RawDataset manifest is written")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None, *, clock: Callable[[], float] = time.time) -> int:
    """Run the step and return its exit code (`evergreen.runtime.exit_codes`).

    Args:
        argv: The flags. None means the flags of the process.
        clock: Function that returns seconds since the epoch. Rows ahead of the clock are not read.
            The flag `--lake-until` takes precedence over the clock.
    """
    own_umask()
    arguments = build_parser().parse_args(argv)
    log_as_text()
    _extract_window(arguments, clock)
    return 0


def _extract_window(arguments: argparse.Namespace, clock: Callable[[], float]) -> None:
    from components.extraction.extract import extract
    from components.extraction.lake import Lake
    from components.extraction.lake_files import opened_lake
    from components.extraction.seen_files import seen_files
    from components.extraction.window import expect_past, find_baselines, resolve_window
    from evergreen.config.extraction import ExtractionSettings
    from evergreen.contracts.raw_rows import CLOCK_AHEAD_SECONDS, microseconds
    from evergreen.registry.recommenders import accepted
    from evergreen.registry.runs import step_note
    from evergreen.rows.times import parse_time
    from evergreen.storage.uris import local_path

    store = local_path(arguments.store)
    with step_note(store, arguments.run, _STEP) as note:
        changes = parse_settings(arguments.settings)
        recommender = accepted(store, arguments.recommender).with_settings(changes)
        settings = recommender.section(_STEP, ExtractionSettings)
        baselines = find_baselines(
            store,
            parent=arguments.parent,
            champion=arguments.champion,
            features=recommender.features,
        )
        seen = seen_files(baselines.parent, settings.late_days, start=arguments.window_start)
        work = local_path(arguments.work)
        until = (
            parse_time("lake_until", arguments.lake_until) / 1e6 if arguments.lake_until else None
        )
        now = clock() if until is None else until
        ahead_from = microseconds(now + CLOCK_AHEAD_SECONDS) + 1
        expect_past(baselines, ahead_from)
        with opened_lake(arguments.lake, work=work, until=until, ignore=settings.ignore) as files:
            lake = Lake(files=files, seen=seen, ahead_from=ahead_from)
            window = resolve_window(
                start=arguments.window_start,
                end=arguments.window_end,
                parent=baselines.parent,
                full_days=settings.full_days,
                attribution=settings.attribution,
                newest=lake.newest,
            )
            folder = work / arguments.run / _STEP
            dataset = extract(
                lake,
                window,
                folder=folder,
                recommender=recommender,
                baselines=baselines,
                dask_scheduler=arguments.dask_scheduler,
            )
        dataset.write(arguments.output)
        note.facts = {"settings": changes, **_facts(dataset, arguments)}


def _facts(dataset: RawDataset, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the facts for the step's note."""
    return {
        "recommender": dataset.recommender.digest,
        "parent": dataset.parent_model_id,
        "champion": dataset.champion_model_id,
        "window_start": arguments.window_start,
        "window_end": arguments.window_end,
        **{name: getattr(dataset, f"num_{name}") for name in _COUNTS},
        **{name: getattr(dataset, name) for name in _TIMES},
    }


if __name__ == "__main__":
    sys.exit(main())
