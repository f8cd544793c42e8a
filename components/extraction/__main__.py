"""The extraction step as a command line: settings are read here, once, and passed down."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from components.runtime.exit_codes import exits_with_code

STEP = "extraction"


FLAGS: tuple[tuple[str, Any, str], ...] = (
    ("window-start", "", "ISO 8601 UTC, inclusive; empty: after the champion's last trained row, or the first row"),
    ("window-end", "", "ISO 8601 UTC, exclusive; empty: to the last row"),
    ("window-days", 0.0, "days that the window has, counted back from its end; 0: --window-start says"),
    ("champion", "current", "current, none, or a released model's id"),
    ("holdout-fraction", 0.1, "share of the newest rows kept from training"),
    ("max-malformed-fraction", 0.01, "share of a file's rows that may be malformed before the step stops"),
    ("replay-share", 0.0, "share of older rows among those learned, in [0, 1)"),
    (
        "replay-days",
        7,
        "newest days with rows before the window, from which old rows are drawn: to replay, and (whatever the share) "
        "to measure what is remembered; 0: none is read",
    ),
    (
        "late-days",
        1,
        "days before the champion's last trained row of which rows are learned, too, that came to the lake later, "
        "where neither --window-start nor --window-days says; 0: none",
    ),
    ("columns", "", "features to learn from, comma-separated; empty: all 39"),
    (
        "negative-rate",
        1.0,
        "share of the training rows without a click that is kept, in (0, 1]; held-out rows are never thinned",
    ),
    (
        "attribution-hours",
        0.0,
        "hours after a row in which its click may still come: younger rows are left for the next round; 0: none are",
    ),
)
"""Name, default and help of what a run may choose."""


def build_parser() -> argparse.ArgumentParser:
    """The step's flags; `--help` is the step's documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m components.extraction",
        description="Copies one time window of click logs, sorted, each row once, into training and held-out rows.",
    )
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="model store: file:// URI or absolute path")
    parser.add_argument("--work", required=True, help="folder for big data: file:// URI or absolute path")
    parser.add_argument(
        "--lake",
        required=True,
        help="lake with day=YYYY-MM-DD folders: absolute path, file:// or gs://, of which what the window needs is "
        "fetched into <work>/.lake-cache",
    )
    for name, default, text in FLAGS:
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--output", required=True, help="where the RawDataset manifest is written")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the step; see `runtime.exit_codes` for its exit codes."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _extract_window(arguments)
    return 0


def _extract_window(arguments: argparse.Namespace) -> None:
    from components.extraction.columns import excluded_columns, unread_columns
    from components.extraction.extract import ExtractionSettings, extract
    from components.extraction.lake import Lake
    from components.extraction.lake_files import opened_lake
    from components.extraction.window import accepted_model, attribution_micros, resolve_window, seen_files
    from components.storage.uris import local_path
    from components.store.runs import noted

    store = local_path(arguments.store)
    with noted(store, arguments.run, STEP) as note:
        excluded = excluded_columns(arguments.columns)
        unread = unread_columns(excluded, store, arguments.champion)
        settings = ExtractionSettings(
            holdout_fraction=arguments.holdout_fraction,
            max_malformed_fraction=arguments.max_malformed_fraction,
            replay_share=arguments.replay_share,
            replay_days=arguments.replay_days,
            negative_rate=arguments.negative_rate,
            excluded=tuple(excluded),
            unread=unread,
            attribution=attribution_micros(arguments.attribution_hours),
            late_days=arguments.late_days,
        )
        asked = arguments.window_start or arguments.window_days
        accepted = None if asked else accepted_model(store, arguments.champion)
        seen = seen_files(accepted, settings.late_days)
        work = local_path(arguments.work)
        with opened_lake(arguments.lake, work=work) as files:
            lake = Lake(files=files, unread=unread, seen=seen)
            window = resolve_window(
                start=arguments.window_start,
                end=arguments.window_end,
                accepted=accepted,
                days=arguments.window_days,
                attribution=settings.attribution,
                newest=lake.newest,
            )
            dataset = extract(lake, window, folder=work / arguments.run / STEP, settings=settings)
        dataset.write(arguments.output)
        note.facts = {
            "train_rows": dataset.num_train_rows,
            "holdout_rows": dataset.num_holdout_rows,
            "replay_rows": dataset.num_replay_rows,
            "replay_holdout_rows": dataset.num_replay_holdout_rows,
            "malformed": dataset.num_malformed,
            "duplicates": dataset.num_duplicates,
            "first_event_time": dataset.first_event_time,
            "last_event_time": dataset.last_event_time,
            "late_clicks": dataset.num_late_clicks,
            "late_rows": dataset.num_late_rows,
        }


if __name__ == "__main__":
    sys.exit(main())
