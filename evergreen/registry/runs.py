"""What a run leaves in the model store: each step's note and report, and the run's outcome.

Joins every step to the exit handler, which learns from no KFP backend which step failed and why (the hosted backend
passes an empty message; the local one names the exit handler itself), and to the monitor, which shows outcomes and
reports. The content of a report is its step's.

Layout: `<store>/runs/<run>/<step>.json`, `<step>_report.html` and `.json`, and `outcome.json` from the exit handler.
The folder of a Kubeflow run is named by `store_name`, because Kubeflow's own names are not unique.
"""

import json
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from evergreen.config.release import UNRELEASED
from evergreen.registry.promotion_journal import CANARY, RELEASE, Promotion, canary_at_work, moment_of, read_standing
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, Preempted, Refused

T = TypeVar("T")
OUTCOME_FILE = "outcome.json"
HTML, JSON = "html", "json"
"""Kinds of reports: for people and for machines."""
STEPS = ("extraction", "validation", "preprocessing", "training", "evaluation", "deployment")
LAST_STEP = STEPS[-1]
CANCELED_STATES = frozenset({"CANCELED", "CANCELLED", "CANCELING"})
FAILED_STATES = CANCELED_STATES | {"FAILED", "ERROR"}
"""States of a run in Kubeflow, as its API and its backends spell them."""


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


def run_title(name: str) -> str:
    """Return a run's name for Kubeflow's list: its time as people write it, and no two names alike.

    >>> run_title("drift-20261129T072200Z-v5"), run_title("weekly")
    ('drift 2026-11-29 07:22:00 v5', 'weekly')
    """
    found = re.fullmatch(r"([a-z]+)-(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)(\d{6})?Z(?:-(.+))?", name)
    if not found:
        return name
    kind, year, month, day, hour, minute, second, fraction, rest = found.groups()
    time = f"{hour}:{minute}:{second}{'.' + fraction if fraction else ''}"
    return f"{kind} {year}-{month}-{day} {time}{' ' + rest if rest else ''}"


_LONGEST_NAME = 180
"""Bytes of Kubeflow's name in a folder's name: file systems allow 255, and files written aside add 34."""


def store_name(run: str, resource: str, run_id: str) -> str:
    """Return the store's name of a run: Kubeflow's name of it and the first eight digits of its id.

    Kubeflow allows any number of runs of one name, and any letter in it. Letters that a folder's name, a glob pattern
    or a command line would misread are escaped as in a URL.

    Args:
        run: Kubeflow's name of the run. Empty in a run of a schedule.
        resource: Name of the run's workflow, which Kubeflow also calls a schedule's run.
        run_id: Kubeflow's id of the run, a UUID. Empty in a local run, whose own name is unique.

    Returns:
        The name. It is `run` without an id.

    >>> store_name("weekly", "evergreen-x7k2p", "3011424b-cce0-40c0-bea8-f11f49badc9c")
    'weekly~3011424b'
    >>> store_name("", "evergreen-b9625-1-1829784550", "fd2f3b12-cbc4-4269-8a36-7ea68e992f9e")
    'evergreen-b9625-1-1829784550~fd2f3b12'
    """
    if not run_id:
        return run
    escaped = re.sub(r"[^\w .,:()+=@-]", lambda found: quote(found[0], safe="").replace("~", "%7E"), run or resource)
    return f"{escaped.encode()[:_LONGEST_NAME].decode(errors='ignore')}~{run_id[:8]}"


def left_anything(store: Path, run_id: str) -> bool:
    """Return whether the run of this id of Kubeflow left a file in the store."""
    return any((store / "runs").glob(f"*~{run_id[:8]}/*"))


def kubeflow_name(run: str) -> tuple[str, str]:
    """Return Kubeflow's name and the begin of its id from the store's name of a run; no id in a local run.

    >>> kubeflow_name("weekly~3011424b"), kubeflow_name("manual-20261129T063158042288Z")
    (('weekly', '3011424b'), ('manual-20261129T063158042288Z', ''))
    """
    found = re.fullmatch("(.*)~([0-9a-f]{8})", run, re.DOTALL)
    return (unquote(found[1]), found[2]) if found else (run, "")


def new_run_name(kind: str) -> str:
    """Return the name of a run that a person asks for now, in Kubeflow or on this machine."""
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
    """Return how the run ended, by the newest that is known of it; None while it has not ended.

    Its exit handler records the end. Kubeflow runs that handler once. After a person retried the run there, the notes
    that its steps left since then count, and the promotion journal.

    Raises:
        ContractError: what the run left is corrupt.
    """
    recorded = _read_record(run_folder(store, run) / OUTCOME_FILE, RunOutcome)
    if recorded is None:
        return None
    # The reports are this store's, also in a copied one.
    recorded = replace(recorded, reports=reports_of(store.absolute(), run))
    try:
        recorded_at = moment_of(recorded.ended_at)
        notes = [note for note in each_note(store, run) if note.started_at and moment_of(note.started_at) > recorded_at]
    except ValueError as error:
        raise ContractError(f"run {run} of {store} has a time that cannot be read: {error}") from error
    if not notes:
        return recorded
    last = notes[-1]
    ended_at = moment_of(last.started_at) + timedelta(seconds=last.seconds or 0.0)
    outcome = conclude(
        store, notes, run=run, trigger_id=recorded.trigger_id, kfp_state="unknown", ended_at=ended_at.isoformat()
    )
    # Without a handler nobody says that a step was killed, or that no other follows: such a run may be at work.
    is_over = outcome.state != "failed" or last.state == "failed"
    return outcome if is_over else None


def conclude(
    store: Path, notes: Sequence[StepNote], *, run: str, trigger_id: str, kfp_state: str, ended_at: str
) -> RunOutcome:
    """Return the outcome that notes, promotion journal and Kubeflow's state together show.

    Args:
        store: Folder of the model store.
        notes: Notes of the run's steps in step order. A step whose note is still `running` was killed.
        run: The store's name of the run.
        trigger_id: Retrain request that the run answers; empty = none.
        kfp_state: The run's state in Kubeflow, in any spelling.
        ended_at: When the run ended, ISO 8601.
    """
    last = notes[-1] if notes else StepNote(step="none", state="failed", reason="no step started")
    made = _promotion_of(store, run) if last.step == LAST_STEP else None
    version, reason = None, last.reason
    if last.state == "refused" and last.facts.get("rollout") == UNRELEASED:
        state = "judged"
    elif last.state == "refused" and last.step == LAST_STEP and (canary := canary_at_work(store)):
        # The run gives way to a canary, which stays: no reason to try less often or to raise an alarm.
        state, version = "canary", canary.version
    elif last.state == "refused":
        state = "refused"
    elif last.state == "done" and "version" in last.facts and kfp_state not in FAILED_STATES:
        state = "released" if last.facts.get("rollout") == "full" else "canary"
        version = int(last.facts["version"])
    elif made is not None:
        # The step was stopped between the journal's line and its own note.
        state, version = "released" if made.action == RELEASE else "canary", made.version
        reason = f"the journal has version {version} of this run; {last.step} itself: {reason or last.state}"
    else:
        state, reason = "failed", _failure(last, kfp_state)
    return RunOutcome(
        run=run,
        trigger_id=trigger_id,
        state=state,
        step=last.step,
        reason=reason,
        version=version,
        ended_at=ended_at,
        reports=reports_of(store, run),
    )


def _failure(last: StepNote, kfp_state: str) -> str:
    """Why a run failed whose last step left this note."""
    if kfp_state in CANCELED_STATES:
        return f"a person terminated the run in Kubeflow at {last.step}" + (f": {last.reason}" if last.reason else "")
    if last.state == "failed":
        return last.reason
    if last.state == "preempted":
        return f"stopped from outside and not tried again (terminated, or preempted without a retry): {last.reason}"
    if last.state == "running":
        return f"{last.step} ended without a note (killed, out of memory or out of time)"
    return f"nothing followed {last.step}, KFP says {kfp_state}"


def _promotion_of(store: Path, run: str) -> Promotion | None:
    """The newest line of the promotion journal by which `run` made a version answer; None where there is none."""
    lines = [line for line in read_standing(store) if line.who == run and line.action in (RELEASE, CANARY)]
    return lines[-1] if lines else None


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
