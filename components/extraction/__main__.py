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
    ("window-start", "", "ISO 8601 UTC, inclusive; empty: after the last row that the parent learned"),
    ("window-end", "", "ISO 8601 UTC, exclusive; empty: to the last row"),
    ("window-days", 0.0, "days that the window has, counted back from its end; 0: --window-start says"),
    (
        "full-days",
        0.0,
        "the same without a parent, where neither --window-start nor --window-days says; 0: from the first row",
    ),
    ("parent", "current", "model to continue: current, none, or a model's id"),
    ("champion", "current", "model to beat: current, none, or a released model's id"),
    ("holdout-fraction", 0.1, "share of the newest rows kept from training; fewer where a rival learned some"),
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
        "days before the last row that the parent learned of which rows are learned, too, that came to the lake later, "
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
    from components.extraction.window import attribution_micros, find_rivals, resolve_window, seen_files
    from components.storage.uris import local_path
    from components.store.runs import noted

    store = local_path(arguments.store)
    with noted(store, arguments.run, STEP) as note:
        rivals = find_rivals(store, parent=arguments.parent, champion=arguments.champion)
        excluded = excluded_columns(arguments.columns)
        settings = ExtractionSettings(
            holdout_fraction=arguments.holdout_fraction,
            max_malformed_fraction=arguments.max_malformed_fraction,
            replay_share=arguments.replay_share,
            replay_days=arguments.replay_days,
            negative_rate=arguments.negative_rate,
            excluded=tuple(excluded),
            attribution=attribution_micros(arguments.attribution_hours),
            late_days=arguments.late_days,
        )
        asked = arguments.window_start or arguments.window_days
        seen = seen_files(None if asked else rivals.parent, settings.late_days)
        work = local_path(arguments.work)
        with opened_lake(arguments.lake, work=work) as files:
            lake = Lake(files=files, unread=unread_columns(excluded, rivals.champion), seen=seen)
            window = resolve_window(
                start=arguments.window_start,
                end=arguments.window_end,
                parent=rivals.parent,
                days=arguments.window_days,
                full_days=arguments.full_days,
                attribution=settings.attribution,
                newest=lake.newest,
            )
            folder = work / arguments.run / STEP
            dataset = extract(lake, window, folder=folder, settings=settings, rivals=rivals)
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
            "last_learned_time": dataset.last_learned_time,
            "straddling_rows": dataset.num_straddling_rows,
            "parent": dataset.parent_model_id,
            "champion": dataset.champion_model_id,
            "late_clicks": dataset.num_late_clicks,
            "late_rows": dataset.num_late_rows,
        }


if __name__ == "__main__":
    sys.exit(main())
