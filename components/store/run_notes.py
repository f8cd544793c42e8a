"""Notes that each step leaves about itself in the model store, so that a run's end can be explained.

Joins every step to the exit handler, which no KFP backend tells the step that failed and the cause (the hosted backend
passes an empty message; the local one names the exit handler itself).

Layout: `<store>/runs/<run>/<step>.json`, and `outcome.json` from the exit handler; reports beside them are
`run_reports`'.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, Preempted, Refused
from components.store.promotion_journal import moment_of

OUTCOME_FILE = "outcome.json"
STEPS = ("extraction", "validation", "preprocessing", "training", "evaluation", "deployment")


@dataclass(kw_only=True)
class StepNote:
    """What one step says of its own run."""

    step: str
    state: str = "running"
    """`running`, `done`, `refused` (it worked and said no), `preempted` (it was asked to end, saved, and waits for a
    retry) or `failed`."""
    reason: str = ""
    started_at: str = ""
    seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Few numbers for people: rows, auc, version."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended."""

    run: str
    trigger_id: str
    state: str
    """`released`, `refused` (by validation or the gate) or `failed`."""
    step: str
    """The step that decided it."""
    reason: str
    version: int | None
    """The version released; None otherwise."""
    ended_at: str
    reports: dict[str, str] = field(default_factory=dict)
    """URI of the report for people, by step (`run_reports`)."""


def run_folder(store: Path, run: str) -> Path:
    """Where the notes of `run` lie.

    Raises:
        ContractError: `run` is no name of a folder. Steps remove what an earlier try of a run left under its name, so
            a name must not lead elsewhere; each of them comes by here first.
    """
    if run in ("", ".", "..") or "/" in run:
        raise ContractError(f"run is named {run!r}, expected a name of one folder")
    return store / "runs" / run


class Stopped(SystemExit):
    """SIGTERM reached a step at work: whoever runs it wants it to end."""


@contextmanager
def _sigterm_as_error() -> Iterator[None]:
    """Lets SIGTERM end the body as an error; without this it ends the process before a note can be written."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only the main thread gets signals, and whoever has a handler already knows what to do
        return

    def stop(signum: int, _frame: Any) -> None:
        raise Stopped(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def noted(store: Path, run: str, step: str) -> Iterator[StepNote]:
    """Keeps the note of `step` current: running, then done (or what the body set), preempted, or failed with the error.

    A retry of the step begins a new note; that of the try before is gone.
    """
    started = time.monotonic()
    note = StepNote(step=step, started_at=datetime.now(timezone.utc).isoformat())
    path = run_folder(store, run) / f"{step}.json"
    _write(path, note)
    try:
        with _sigterm_as_error():
            yield note
    except (Stopped, KeyboardInterrupt):
        note.state, note.reason = "failed", "stopped from outside while it worked"
        raise
    except Refused as error:
        note.state, note.reason = "refused", f"{error}"
        raise
    except Preempted as error:
        note.state, note.reason = "preempted", f"{error}"
        raise
    except BaseException as error:
        note.state, note.reason = "failed", f"{type(error).__name__}: {error}"
        raise
    else:
        if note.state == "running":
            note.state = "done"
    finally:
        note.seconds = round(time.monotonic() - started, 3)
        _write(path, note)


def read_notes(store: Path, run: str) -> list[StepNote]:
    """The notes of a run in step order; a step that never started has none."""
    paths = [run_folder(store, run) / f"{step}.json" for step in STEPS]
    return [StepNote(**json.loads(path.read_text())) for path in paths if path.exists()]


def begun_at(notes: Iterable[StepNote]) -> datetime | None:
    """When the first of these steps started; None where none says it."""
    return min((moment_of(note.started_at) for note in notes if note.started_at), default=None)


def write_outcome(store: Path, outcome: RunOutcome) -> None:
    """Records how a run ended."""
    write_whole(run_folder(store, outcome.run) / OUTCOME_FILE, json.dumps(asdict(outcome), indent=2) + "\n")


def read_outcomes(store: Path) -> list[RunOutcome]:
    """How each run of the store ended, oldest first."""
    outcomes = [RunOutcome(**json.loads(p.read_text())) for p in (store / "runs").glob(f"*/{OUTCOME_FILE}")]
    return sorted(outcomes, key=lambda outcome: outcome.ended_at)


def find_outcome(store: Path, trigger_id: str) -> RunOutcome | None:
    """The newest outcome of a run that `trigger_id` asked for; None while there is none."""
    asked = [outcome for outcome in read_outcomes(store) if outcome.trigger_id == trigger_id]
    return asked[-1] if asked else None


def _write(path: Path, note: StepNote) -> None:
    write_whole(path, json.dumps(asdict(note), indent=2, default=str) + "\n")
