"""Files of a run in the model registry: a note and a report of each step, and the run's outcome.

The exit handler reads the notes to find out which step failed and why, because neither KFP backend
passes this information to the handler. On the hosted backend, the exit handler gets an empty
message. On the local backend, the exit handler gets only its own name. The monitor shows the
outcomes and the reports. Each step decides what its report contains.

Layout: `<store>/runs/<run>/<step>.json`, `<step>_report.html` and `.json`, and `outcome.json` from
the exit handler. A run from Kubeflow gets a folder name from `store_name`, because run names in
Kubeflow are not unique.
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
from evergreen.registry.promotion_journal import (
    CANARY,
    RELEASE,
    Promotion,
    canary_at_work,
    moment_of,
    read_effective,
)
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, Preempted, Refused

_T = TypeVar("_T")
_OUTCOME_FILE = "outcome.json"
HTML, _JSON = "html", "json"
"""Kinds of reports: HTML for people, and _JSON for programs."""
STEPS = ("extraction", "validation", "preprocessing", "training", "evaluation", "deployment")
_LAST_STEP = STEPS[-1]
STOPPED = "STOPPED"
"""State of a run on this machine, if SIGTERM or Ctrl-C ended the run."""
_CANCELED_STATES = frozenset({"CANCELED", "CANCELLED", "CANCELING"})
_FAILED_STATES = _CANCELED_STATES | {"FAILED", "ERROR"}
"""States of a failed run in Kubeflow, in the spellings of its API and its backends."""


@dataclass(kw_only=True)
class StepNote:
    """Record of one execution of a step."""

    step: str
    state: str = "running"
    """State of the step: `running`, `done`, `refused`, `preempted` or `failed`. `refused` means
    that the step ran without an error, and that its decision is negative. `preempted` means that
    the step was stopped, saved its state and waits for a retry."""
    reason: str = ""
    started_at: str = ""
    seconds: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """A few facts for people, such as rows, AUC and version."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """Final state of a run."""

    run: str
    trigger_id: str
    """Id of the retrain request from the monitor, or from a command with `trigger_id`. Empty if a
    person or a schedule started the run."""
    state: str
    """`released`, `canary`, `evaluated`, `refused` or `failed`. `canary` means that the version is
    a canary beside the live version. `evaluated` means that the gate accepted the model, but the
    settings request no release. `refused` means that validation refused the rows, or that the gate
    refused the model."""
    step: str
    """Step that decided the outcome."""
    reason: str
    version: int | None
    """Number of the version that this run released or started as a canary. None if the run released
    no version and started no canary."""
    ended_at: str
    reports: dict[str, str] = field(default_factory=dict)
    """URI of each step's HTML report (`reports_of`)."""


def run_title(name: str) -> str:
    """Return a run's unique title in Kubeflow's list, with its time in a readable form.

    >>> run_title("drift-20261129T072200Z-v5"), run_title("weekly")
    ('drift 2026-11-29 07:22:00 v5', 'weekly')
    """
    found = re.fullmatch(
        r"([a-z]+)-(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)(\d{6})?Z(?:-(.+))?", name
    )
    if not found:
        return name
    kind, year, month, day, hour, minute, second, fraction, rest = found.groups()
    time = f"{hour}:{minute}:{second}{'.' + fraction if fraction else ''}"
    return f"{kind} {year}-{month}-{day} {time}{' ' + rest if rest else ''}"


_LONGEST_NAME = 180
"""A folder's name contains at most this number of bytes of Kubeflow's name. File systems allow 255
bytes, and the names of temporary files are 34 bytes longer."""


def store_name(run: str, resource: str, run_id: str) -> str:
    """Return the registry's name of a run: its Kubeflow name and the first eight digits of its id.

    Kubeflow allows several runs of one name, and any character in a name. Characters that are
    special in a folder's name, a glob pattern or a command line are escaped as in a URL.

    Args:
        run: Kubeflow's name of the run. Empty if a schedule started the run.
        resource: Name of the run's workflow. If a schedule starts a run, Kubeflow also uses this
            name for the run.
        run_id: Kubeflow's id of the run, a UUID. Empty in a local run, because the name of a local
            run is unique.

    Returns:
        The name. The result equals `run` if the run has no id.

    >>> store_name("weekly", "evergreen-x7k2p", "3011424b-cce0-40c0-bea8-f11f49badc9c")
    'weekly~3011424b'
    >>> store_name("", "evergreen-b9625-1-1829784550", "fd2f3b12-cbc4-4269-8a36-7ea68e992f9e")
    'evergreen-b9625-1-1829784550~fd2f3b12'
    """
    if not run_id:
        return run
    escaped = re.sub(
        r"[^\w .,:()+=@-]",
        lambda found: quote(found[0], safe="").replace("~", "%7E"),
        run or resource,
    )
    return f"{escaped.encode()[:_LONGEST_NAME].decode(errors='ignore')}~{run_id[:8]}"


def left_anything(store: Path, run_id: str) -> bool:
    """Return whether the registry has a file of the run with this Kubeflow id."""
    return any((store / "runs").glob(f"*~{run_id[:8]}/*"))


def kubeflow_name(run: str) -> tuple[str, str]:
    """Convert a run's name in the registry to its Kubeflow name and the start of its Kubeflow id.

    The id is empty for a local run.

    >>> kubeflow_name("weekly~3011424b"), kubeflow_name("manual-20261129T063158042288Z")
    (('weekly', '3011424b'), ('manual-20261129T063158042288Z', ''))
    """
    found = re.fullmatch("(.*)~([0-9a-f]{8})", run, re.DOTALL)
    return (unquote(found[1]), found[2]) if found else (run, "")


SEARCH_RUN = "search"
"""Kind of the runs of a hyperparameter search. The name of each trial begins with `search`."""


def new_run_name(kind: str) -> str:
    """Return a name for a run that a person starts now, in Kubeflow or on this machine.

    The name begins with `kind`.
    """
    return f"{kind}-{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}Z"


def run_folder(store: Path, run: str) -> Path:
    """Return the folder of a run's notes.

    Every step calls this function before it uses files. A step removes files of an earlier attempt.
    The name of a run must therefore not lead out of the folder `runs`.

    Raises:
        ContractError: `run` is not the name of one folder.
    """
    if run in ("", ".", "..") or "/" in run:
        raise ContractError(f"run is named {run!r}, expected a name of one folder")
    return store / "runs" / run


class Stopped(SystemExit):
    """SIGTERM reached a running step."""


@contextmanager
def _sigterm_as_error() -> Iterator[None]:
    """Raise Stopped in the body of the `with` statement when SIGTERM arrives.

    Without this handler, SIGTERM would end the process before the step's note is written.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield  # only the main thread receives signals, and an existing handler is not replaced
        return

    def stop(signum: int, _frame: Any) -> None:
        raise Stopped(128 + signum)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def step_note(store: Path, run: str, step: str) -> Iterator[StepNote]:
    """Record the state of `step` in its note while the body runs.

    The state is `running` at first. When the body ends, the state becomes `done`, unless the body
    has set another state. After an error, the state is `refused`, `preempted` or `failed`. If the
    step is retried, its note replaces the note of the earlier attempt.
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
    """Iterate over the notes of a run, in the order of the steps.

    The file of each note is opened only when the iteration reaches the step.

    Raises the errors of `find_outcome`.
    """
    folder = run_folder(store, run)
    return (note for step in STEPS if (note := _read_record(folder / f"{step}.json", StepNote)))


def read_notes(store: Path, run: str) -> list[StepNote]:
    """Return all notes of a run, in the order of the steps."""
    return list(each_note(store, run))


def trained_model(notes: Iterable[StepNote]) -> str | None:
    """Return the id of the model that the run trained, or None if it trained none."""
    return next(
        (
            note.facts["model"]
            for note in notes
            if note.step == "training" and "model" in note.facts
        ),
        None,
    )


def first_start(notes: Iterable[StepNote]) -> datetime | None:
    """Return the start of the first step that has a note, or None if no note has a time."""
    return min((moment_of(note.started_at) for note in notes if note.started_at), default=None)


def write_outcome(store: Path, outcome: RunOutcome) -> None:
    """Write the outcome of a run."""
    write_whole(
        run_folder(store, outcome.run) / _OUTCOME_FILE, json.dumps(asdict(outcome), indent=2) + "\n"
    )


def read_outcomes(store: Path) -> list[RunOutcome]:
    """Return the outcomes of all ended runs, oldest first.

    Raises the errors of `find_outcome`.
    """
    found = (
        find_outcome(store, path.parent.name)
        for path in (store / "runs").glob(f"*/{_OUTCOME_FILE}")
    )
    return sorted((each for each in found if each), key=lambda outcome: outcome.ended_at)


def find_outcome(store: Path, run: str) -> RunOutcome | None:
    """Return the newest outcome of a run, or None while the run has not ended.

    The exit handler writes the outcome, but Kubeflow does not run it again for a retried run. For a
    retried run, the outcome is derived from the promotion journal and from the notes that the steps
    wrote in the retry.

    Raises:
        ContractError: a file of the run is corrupt.
    """
    recorded = _read_record(run_folder(store, run) / _OUTCOME_FILE, RunOutcome)
    if recorded is None:
        return None
    # In a copied store, the URIs must point to the copy.
    recorded = replace(recorded, reports=reports_of(store.absolute(), run))
    try:
        recorded_at = moment_of(recorded.ended_at)
        notes = [
            note
            for note in each_note(store, run)
            if note.started_at and moment_of(note.started_at) > recorded_at
        ]
    except ValueError as error:
        raise ContractError(
            f"run {run} of {store} has a time that cannot be read: {error}"
        ) from error
    if not notes:
        return recorded
    last = notes[-1]
    ended_at = moment_of(last.started_at) + timedelta(seconds=last.seconds or 0.0)
    outcome = conclude(
        store,
        notes,
        run=run,
        trigger_id=recorded.trigger_id,
        kfp_state="unknown",
        ended_at=ended_at.isoformat(),
    )
    # The exit handler does not run again for a retried run. Therefore, it is not recorded that a
    # step of the retry was killed, or that the retry ended. A retried run may therefore still be
    # active.
    is_over = outcome.state != "failed" or last.state == "failed"
    return outcome if is_over else None


def conclude(
    store: Path,
    notes: Sequence[StepNote],
    *,
    run: str,
    trigger_id: str,
    kfp_state: str,
    ended_at: str,
) -> RunOutcome:
    """Return the outcome of a run, from its notes, the promotion journal and Kubeflow's state.

    Args:
        store: Folder of the model registry.
        notes: Notes of the run's steps in step order. A step whose note is still `running` was
            killed.
        run: The registry's name of the run.
        trigger_id: Id of the retrain request that led to the run. Empty = none.
        kfp_state: The run's state in Kubeflow, in any spelling, or `STOPPED`.
        ended_at: When the run ended, ISO 8601.
    """
    last = notes[-1] if notes else StepNote(step="none", state="failed", reason="no step started")
    made = _promotion_of(store, run) if last.step == _LAST_STEP else None
    version, reason = None, last.reason
    if last.state == "refused" and last.facts.get("rollout") == UNRELEASED:
        state = "evaluated"
    elif last.state == "refused" and last.step == _LAST_STEP and (canary := canary_at_work(store)):
        # The running canary is not affected. The refusal of this candidate causes neither a longer
        # cooldown nor an alert.
        state, version = "canary", canary.version
    elif last.state == "refused":
        state = "refused"
    elif last.state == "done" and "version" in last.facts and kfp_state not in _FAILED_STATES:
        state = "released" if last.facts.get("rollout") == "full" else "canary"
        version = int(last.facts["version"])
    elif made is not None:
        # The step was stopped after it appended its journal line, but before it wrote its note.
        state, version = "released" if made.action == RELEASE else "canary", made.version
        reason = (
            f"the journal has version {version} of this run; {last.step} itself: "
            f"{reason or last.state}"
        )
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
    """Return why a run failed. `last` is the note of the run's last step."""
    if kfp_state in _CANCELED_STATES:
        return f"a person terminated the run in Kubeflow at {last.step}" + (
            f": {last.reason}" if last.reason else ""
        )
    if last.state == "failed":
        return last.reason
    if last.state == "preempted":
        return (
            "stopped from outside and not tried again (terminated, or preempted without a "
            f"retry): {last.reason}"
        )
    if kfp_state == STOPPED and last.state == "done":
        return f"stopped from outside after {last.step}"
    if last.state == "running":
        return f"{last.step} ended without a note (killed, out of memory or out of time)"
    return f"nothing followed {last.step}, KFP says {kfp_state}"


def _promotion_of(store: Path, run: str) -> Promotion | None:
    """Return the newest journal line about a release or canary that `run` made, or None."""
    lines = [
        line
        for line in read_effective(store)
        if line.who == run and line.action in (RELEASE, CANARY)
    ]
    return lines[-1] if lines else None


def report_path(store: Path, run: str, step: str, *, kind: str = HTML) -> Path:
    """Return the path of the report of `step`, whether or not it exists.

    Raises:
        ContractError: `run` is not the name of a folder.
    """
    return run_folder(store, run) / f"{step}_report.{kind}"


def keep_report(
    store: Path, run: str, step: str, *, html: str | bytes, document: str | bytes | None = None
) -> None:
    """Write the report of a step, and replace the report of an earlier attempt.

    Each file is written atomically.
    """
    if document is not None:
        write_whole(report_path(store, run, step, kind=_JSON), document)
    write_whole(report_path(store, run, step), html)


def forget_report(store: Path, run: str, step: str) -> None:
    """Remove the report of an earlier attempt.

    If the new attempt ended without a report, the old report would be mistaken for a new report.
    """
    for kind in (HTML, _JSON):
        report_path(store, run, step, kind=kind).unlink(missing_ok=True)


def reports_of(store: Path, run: str) -> dict[str, str]:
    """Return the URI of each existing HTML report by step, in step order."""
    paths = {step: report_path(store, run, step) for step in STEPS}
    return {step: path.as_uri() for step, path in paths.items() if path.is_file()}


def _write_note(path: Path, note: StepNote) -> None:
    write_whole(path, json.dumps(asdict(note), indent=2, default=str) + "\n")


def _read_record(path: Path, kind: type[_T]) -> _T | None:
    try:
        return kind(**json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise ContractError(
            f"{path} cannot be read: {error}, expected a {kind.__name__}"
        ) from error
