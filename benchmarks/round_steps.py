"""Where one round's seconds went, read from the notes that its steps left: steps, and the gaps between them.

Takes notes and times, gives seconds, and prints them beside the targets. Running rounds is `benchmarks.round`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from benchmarks.printing import print_target
from benchmarks.spread import Spread, spread
from components.store.promotion_journal import moment_of
from components.store.run_notes import StepNote

EMPTY_ROWS = 1_000
"""Rows of a round that counts as empty."""
TARGET_ROWS, TARGET_SECONDS, FIXED_TARGET_SECONDS = 100_000, 45.0, 15.0
STARTS = "processes and KFP"
"""What is in no step's note: starting the run, KFP, and each step's interpreter before it notes its begin and after."""


class RoundSeconds(NamedTuple):
    """One round."""

    rows: int
    """Rows of its window, training and held-out."""
    serving: float
    """Seconds from the trigger until the server answered as the new version."""
    steps: dict[str, float]
    """Seconds that each step noted, as far as they lie before `serving`; and `STARTS`, the rest of it."""
    whole: float
    """Seconds until the run's process ended: the outcome is recorded after the new version serves."""


def round_seconds(
    rows: int, notes: Sequence[StepNote], *, triggered: datetime, serving: datetime, ended: datetime
) -> RoundSeconds:
    """The seconds of a round whose steps left `notes`.

    Raises:
        ValueError: a step did not end, or begins before the trigger: the notes are not of this round.
    """
    steps: dict[str, float] = {}
    for note in notes:
        begun = moment_of(note.started_at)
        if note.seconds is None or begun < triggered:
            raise ValueError(f"note of {note.step} begins at {note.started_at} and took {note.seconds} s")
        until = min(begun + timedelta(seconds=note.seconds), serving)
        steps[note.step] = max((until - begun).total_seconds(), 0.0)
    total = (serving - triggered).total_seconds()
    steps[STARTS] = total - sum(steps.values())
    return RoundSeconds(rows, total, steps, (ended - triggered).total_seconds())


def by_step(rounds: Sequence[RoundSeconds]) -> dict[str, Spread]:
    """Seconds of each step over rounds of one size."""
    return {name: spread([each.steps[name] for each in rounds]) for name in rounds[0].steps}


def seconds_per_row(rounds: Sequence[RoundSeconds]) -> tuple[float, float]:
    """(seconds of no rows, seconds per row) of the least-squares line through serving seconds over rows.

    The line is only as good as the steps are linear: training learns several passes, as many as its rows are worth.

    >>> seconds_per_row([RoundSeconds(0, 10.0, {}, 0), RoundSeconds(100, 30.0, {}, 0)])
    (10.0, 0.2)
    """
    mean_rows = sum(each.rows for each in rounds) / len(rounds)
    mean_seconds = sum(each.serving for each in rounds) / len(rounds)
    spread_of_rows = sum((each.rows - mean_rows) ** 2 for each in rounds)
    slope = sum((each.rows - mean_rows) * (each.serving - mean_seconds) for each in rounds) / spread_of_rows
    return mean_seconds - slope * mean_rows, slope


def report(results: dict[int, list[RoundSeconds]]) -> dict[str, Any]:
    """Prints the table and the targets; the same as a document."""
    names = list(next(iter(results.values()))[0].steps)
    print(f"{'rows':>10} {'rounds':>6} {'to serving':>20} " + " ".join(f"{name[:17]:>17}" for name in names))
    document: dict[str, Any] = {}
    for rows, rounds in results.items():
        serving, steps = spread([each.serving for each in rounds]), by_step(rounds)
        told = f"{serving.median:.1f} ({serving.least:.1f}..{serving.most:.1f})"
        print(f"{rows:>10,} {len(rounds):>6} {told:>20} " + " ".join(f"{steps[n].median:>17.2f}" for n in names))
        whole = spread([each.whole for each in rounds])
        document[str(rows)] = {
            "rounds": len(rounds),
            "serving_seconds": serving._asdict(),
            "whole_seconds": whole._asdict(),
            "steps": {name: steps[name]._asdict() for name in names},
        }
    fixed, per_row = seconds_per_row([each for rounds in results.values() for each in rounds])
    print(f"line through all rounds: {fixed:.1f} s and {1e6 * per_row:.0f} s per million rows")
    document["line"] = {"fixed_seconds": fixed, "seconds_per_row": per_row}
    _target("fixed cost", results.get(EMPTY_ROWS), FIXED_TARGET_SECONDS)
    _target(f"round of {TARGET_ROWS:,} rows", results.get(TARGET_ROWS), TARGET_SECONDS)
    return document


def _target(name: str, rounds: list[RoundSeconds] | None, seconds: float) -> None:
    if rounds:
        found = spread([each.serving for each in rounds]).median
        print_target(name, f"{found:.1f} s", f"{seconds:g} s", found <= seconds)
