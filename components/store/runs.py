"""What a run leaves in the model store: each step's note and report, and the run's outcome.

Joins every step to the exit handler, which learns from no KFP backend which step failed and why (the hosted backend
passes an empty message; the local one names the exit handler itself), and to the monitor, which shows outcomes and
reports. The content of a report is its step's.

Layout: `<store>/runs/<run>/<step>.json`, `<step>_report.html` and `.json`, and `outcome.json` from the exit handler.
"""

import json
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, Preempted, Refused
from components.store.promotion_journal import moment_of

T = TypeVar("T")
OUTCOME_FILE = "outcome.json"
HTML, JSON = "html", "json"
"""Kinds of reports: for people and for machines."""
STEPS = ("extraction", "validation", "preprocessing", "training", "evaluation", "deployment")


@dataclass(kw_only=True)
class StepNote:
    """What one step records about its own run."""

    step: str
    state: str = "running"
    """`running`, `done`, `refused` (it worked and its answer is no), `preempted` (it was stopped, saved its state and
    waits for a retry) or `failed`."""
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
    """The same where the monitor, or a command with `trigger_id`, asked for it; empty where a person did."""
    state: str
    """`released`, `canary` (its version runs beside the live one), `judged` (accepted by the gate, and kept without a
    release, as was asked), `refused` (by data or the gate) or `failed`."""
    step: str
    """The step that decided it."""
    reason: str
    version: int | None
    """The version that is live or a canary by this run; None otherwise."""
    ended_at: str
    reports: dict[str, str] = field(default_factory=dict)
    """URI of the report for people, by step (`reports_of`)."""


def new_run_name(kind: str) -> str:
    """The one name of a run that a person asks for now: its folder, its notes, and its display name in Kubeflow."""
    return f"{kind}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}Z"


def run_folder(store: Path, run: str) -> Path:
    """Where the notes of `run` lie.

    Raises:
        ContractError: `run` is no name of a folder. Steps remove what an earlier try of a run left in its folder, so
            the name must not lead elsewhere; every step calls this first.
    """
    if run in ("", ".", "..") or "/" in run:
        raise ContractError(f"run is named {run!r}, expected a name of one folder")
    return store / "runs" / run


class Stopped(SystemExit):
    """SIGTERM reached a running step."""


@contextmanager
def _sigterm_as_error() -> Iterator[None]:
    """Lets SIGTERM end the body as an error; without this it ends the process before a note can be written."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # only the main thread gets signals, and an existing handler takes precedence
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

    A retry of the step starts a new note and replaces that of the earlier try.
    """
    started = time.monotonic()
    note = StepNote(step=step, started_at=datetime.now(timezone.utc).isoformat())
    path = run_folder(store, run) / f"{step}.json"
    _write_note(path, note)
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
        _write_note(path, note)


def each_note(store: Path, run: str) -> Iterator[StepNote]:
    """The notes of a run in step order, each read when it is asked for; errors as `find_outcome`."""
    folder = run_folder(store, run)
    return (note for step in STEPS if (note := _read_record(folder / f"{step}.json", StepNote)))


def read_notes(store: Path, run: str) -> list[StepNote]:
    """What `each_note` gives, all at once."""
    return list(each_note(store, run))


def trained_model(notes: Iterable[StepNote]) -> str | None:
    """Id of the model that the run of these notes trained; None where it did not come to that."""
    return next((note.facts["model"] for note in notes if note.step == "training" and "model" in note.facts), None)


def begun_at(notes: Iterable[StepNote]) -> datetime | None:
    """When the first of these steps started; None where no note has a time."""
    return min((moment_of(note.started_at) for note in notes if note.started_at), default=None)


def write_outcome(store: Path, outcome: RunOutcome) -> None:
    """Records how a run ended."""
    write_whole(run_folder(store, outcome.run) / OUTCOME_FILE, json.dumps(asdict(outcome), indent=2) + "\n")


def read_outcomes(store: Path) -> list[RunOutcome]:
    """How each run of the store ended, oldest first; errors as `find_outcome`."""
    found = (find_outcome(store, path.parent.name) for path in (store / "runs").glob(f"*/{OUTCOME_FILE}"))
    return sorted((each for each in found if each), key=lambda outcome: outcome.ended_at)


def find_outcome(store: Path, run: str) -> RunOutcome | None:
    """How the run of that name ended; None while it has not. Its reports are this store's, also in a copied one.

    Raises:
        ContractError: what it left is damaged.
    """
    found = _read_record(run_folder(store, run) / OUTCOME_FILE, RunOutcome)
    return replace(found, reports=reports_of(store.absolute(), run)) if found else None


def report_path(store: Path, run: str, step: str, *, kind: str = HTML) -> Path:
    """Path of the report of `step`, whether or not there is one.

    Raises:
        ContractError: `run` is no name of a folder.
    """
    return run_folder(store, run) / f"{step}_report.{kind}"


def keep_report(store: Path, run: str, step: str, *, html: str | bytes, document: str | bytes | None = None) -> None:
    """Writes the report of a step, each file whole or not at all, over that of an earlier try."""
    if document is not None:
        write_whole(report_path(store, run, step, kind=JSON), document)
    write_whole(report_path(store, run, step), html)


def forget_report(store: Path, run: str, step: str) -> None:
    """Removes the report of an earlier try, which must not be taken for that of a try that ends without one."""
    for kind in (HTML, JSON):
        report_path(store, run, step, kind=kind).unlink(missing_ok=True)


def reports_of(store: Path, run: str) -> dict[str, str]:
    """URI of the report for people, by step, of the steps that left one; in the steps' order."""
    paths = {step: report_path(store, run, step) for step in STEPS}
    return {step: path.as_uri() for step, path in paths.items() if path.is_file()}


def _write_note(path: Path, note: StepNote) -> None:
    write_whole(path, json.dumps(asdict(note), indent=2, default=str) + "\n")


def _read_record(path: Path, kind: type[T]) -> T | None:
    try:
        return kind(**json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise ContractError(f"{path} cannot be read: {error}, expected a {kind.__name__}") from error
