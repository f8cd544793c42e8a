"""The state of the model store and the archive, and how much room the installation's folders have: for the pages.

Once a minute: the promotion journal, the notes and outcomes of runs, files that wait for the uploader. The store may be
on a network share, so a look costs a listing, the journal, and the outcome of each new run. Runs are counted in the
monitor's own memory, so the counts outlive a restart and the removal of old runs.

The folders are the monitor's state, its archive, the model store, and those beside the store where one share holds all:
lake, work folders, model repository. A lake or repository in a bucket has no disk, and is not looked at. Free space is
asked each minute. Counting bytes walks over each file, on a network share perhaps for minutes, so it is done once an
hour beside the loop. What is removed, and when, is `components.store.collect`'s concern.
"""

import json
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.runtime.errors import ContractError, TemporaryError
from components.store import promotion_journal, runs
from monitoring.memory.database import Database

"""Between two looks at the disks."""
COUNT_SECONDS = 3600.0
"""Between two counts of the folders' bytes."""
BESIDE_STORE = ("lake", "work", "repository")


@dataclass(frozen=True, kw_only=True)
class FolderSize:
    """One folder and the disk that it lies on, which others may share; bytes."""

    held: int | None
    """Sizes of the folder's files together; None before they were first counted."""
    disk_free: int
    """What may still be written by this user."""
    disk_size: int


def installation_folders(state: Path, archive: Path, store: Path) -> dict[str, Path]:
    """The folders to look at, by the names that metrics give them."""
    return {"state": state, "archive": archive, "store": store, **{name: store.parent / name for name in BESIDE_STORE}}


def count_bytes(folder: Path) -> int:
    """Sizes of the files below `folder` together; files that go meanwhile, and links, count nothing."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    return total


def start_thread(work: Callable[[], None]) -> None:
    """Does `work` beside the caller; the process ends without waiting for it."""
    threading.Thread(target=work, name="folder-sizes", daemon=True).start()


class SizeWatcher:
    """Looks at the folders when it is time."""

    def __init__(self, folders: Mapping[str, Path], *, start: Callable[[Callable[[], None]], None] = start_thread):
        """Looks at nothing yet; `start` runs a count beside the loop."""
        self._folders, self._start = folders, start
        self._held: dict[str, int] = {}
        self._newest: dict[str, FolderSize] = {}
        self._looked_at: float | None = None
        self._counted_at: float | None = None
        self._counting = False

    def look(self, now: float) -> Mapping[str, FolderSize]:
        """By name, as of at most a minute ago; without the folders that do not exist or cannot be read."""
        if not self._counting and _is_due(self._counted_at, now, COUNT_SECONDS):
            self._counting, self._counted_at = True, now
            self._start(self._count)
        if _is_due(self._looked_at, now, LOOK_SECONDS):
            self._looked_at = now
            self._newest = {name: size for name, path in self._folders.items() if (size := self._size(name, path))}
        return self._newest

    def _size(self, name: str, path: Path) -> FolderSize | None:
        try:
            disk = shutil.disk_usage(path)
        except OSError:
            return None
        return FolderSize(held=self._held.get(name), disk_free=disk.free, disk_size=disk.total)

    def _count(self) -> None:
        """Replaces the counts one by one, so that a folder of many files holds up none of the others."""
        try:
            for name, path in self._folders.items():
                try:
                    self._held[name] = count_bytes(path)
                except OSError as error:
                    self._held.pop(name, None)
                    logger.warning("the size of folder %s cannot be determined: %s", name, error)
        finally:
            self._counting = False


def _is_due(last: float | None, now: float, seconds: float) -> bool:
    # A clock that was set back is early rather than never.
    return last is None or abs(now - last) >= seconds


if TYPE_CHECKING:
    from monitoring.memory.archive import Archive

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Between two looks; a number that is shown is at most this old."""
RUNS = "runs_counted"
"""Document with the runs that are counted."""
REPEAT_SECONDS = 86_400.0
"""How long after its end a run's outcome is still read again: a run that is repeated under its name counts again."""
RELEASED = "released"
CANARY = "canary"
JUDGED = "judged"
GATE_FAILED = "gate_failed"
GATE_INCONCLUSIVE = "gate_inconclusive"
BLOCKED_BY_DATA = "blocked_by_data"
REFUSED_AT_DEPLOYMENT = "refused_at_deployment"
FAILED = "failed"
VERDICTS = (RELEASED, CANARY, JUDGED, GATE_FAILED, GATE_INCONCLUSIVE, BLOCKED_BY_DATA, REFUSED_AT_DEPLOYMENT, FAILED)


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """How the last run ended."""

    run: str
    state: str
    step: str
    reason: str
    reports: tuple[str, ...]
    """Steps that left a report."""
    ended_at: float
    """Seconds since the epoch."""
    seconds: float | None
    """From the start of its first step; None where no step left a note."""


@dataclass(frozen=True, kw_only=True)
class RunCounts:
    """What the finished runs in the store amount to."""

    gate_refusals: int | None = None
    """Runs in a row that reached the gate and were refused by it; None before one has reached it."""
    last_run: LastRun | None = None


@dataclass(frozen=True, kw_only=True)
class Promotions:
    """What the promotion journal says."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """Lines by action, intents left out."""
    live_version: int | None = None
    live_action: str | None = None
    """What made it live: `release`, `rollback` or `promote`."""
    live_since: float | None = None


@dataclass(frozen=True, kw_only=True)
class StoreStatus:
    """What the last look found."""

    store_problem: str | None = None
    """Why the model store cannot be read; then nothing is known of promotions and runs."""
    promotions: Promotions = Promotions()
    runs: RunCounts = RunCounts()
    unuploaded_files: int | None = None
    """Sealed archive files that are not in the lake; None without an uploader."""
    oldest_unuploaded: float | None = None
    """When the first of them was written."""


class StoreWatcher:
    """Reads the store and the archive when it is time."""

    def __init__(self, store: Path, documents: Database, archive: "Archive", *, has_uploader: bool) -> None:
        """Reads nothing yet; without an uploader the archive is the lake, and nothing in it waits."""
        self._store = store
        self._archive = archive
        self._has_uploader = has_uploader
        self._looked_at: float | None = None
        self._runs = RunCounter(store, documents)
        self._newest: StoreStatus | None = None

    def look(self, now: float) -> StoreStatus | None:
        """The state as of at most `LOOK_SECONDS` ago; None before the first look that succeeded.

        A store that cannot be read is reported in the result; if the memory cannot be written or the archive cannot be
        read, the last result stands for another minute.
        """
        # A clock that was set back looks too early rather than never.
        if self._looked_at is None or abs(now - self._looked_at) >= LOOK_SECONDS:
            self._looked_at = now
            try:
                self._newest = self._read(now)
            except (TemporaryError, OSError) as error:
                logger.warning("the state of the store could not be determined: %s", error)
        return self._newest

    def _read(self, now: float) -> StoreStatus:
        waiting = self._archive.waiting_for_upload() if self._has_uploader else None
        of_archive: dict[str, Any] = {}
        if waiting is not None:
            of_archive = {"unuploaded_files": len(waiting), "oldest_unuploaded": self._archive.first_written(waiting)}
        try:
            return StoreStatus(promotions=_read_promotions(self._store), runs=self._runs.count(now), **of_archive)
        except (ContractError, OSError, ValueError, TypeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
            if self._newest is None or self._newest.store_problem != problem:
                logger.warning("the model store cannot be read: %s", problem)
            return StoreStatus(store_problem=problem, **of_archive)


class RunCounter:
    """Counts the finished runs of a model store, each once by its verdict, as `run_<verdict>`."""

    def __init__(self, store: Path, documents: Database) -> None:
        """Continues with what a predecessor counted in `documents`."""
        self._store, self._documents = store, documents
        kept = documents.read_document(RUNS) or {"ended": {}, "gate_refusals": None, "last": None}
        self._ended: dict[str, str] = kept["ended"]
        """`ended_at` of each counted run that is still in the store."""
        last = kept["last"]
        self._counts = RunCounts(
            gate_refusals=kept["gate_refusals"],
            last_run=LastRun(**{**last, "reports": tuple(last["reports"])}) if last else None,
        )

    def count(self, now: float) -> RunCounts:
        """Counts the runs that ended since the last call."""
        folder = self._store / "runs"
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        ended = {name: at for name, at in self._ended.items() if name in names}
        settled = {name for name, at in ended.items() if abs(now - _seconds_of(at)) >= REPEAT_SECONDS}
        outcomes = (_read_outcome(self._store, name) for name in names - settled)
        new = [each for each in outcomes if each and ended.get(each.run) != each.ended_at]
        counted: Counter[str] = Counter()
        refusals, last = self._counts.gate_refusals, self._counts.last_run
        for outcome in sorted(new, key=lambda each: _seconds_of(each.ended_at)):
            verdict = verdict_of(self._store, outcome)
            counted[f"run_{verdict}"] += 1
            if verdict in (GATE_FAILED, GATE_INCONCLUSIVE):
                refusals = (refusals or 0) + 1
            elif verdict in (RELEASED, CANARY, JUDGED):
                refusals = 0
            ended[outcome.run] = outcome.ended_at
            last = _last_run(self._store, outcome)
        if new or ended != self._ended:
            document = {"ended": ended, "gate_refusals": refusals, "last": vars(last) if last else None}
            self._documents.write_documents({RUNS: document}, dict(counted))
            self._ended, self._counts = ended, RunCounts(gate_refusals=refusals, last_run=last)
        return self._counts


def _read_promotions(store: Path) -> Promotions:
    actions = (each.action for each in promotion_journal.read_entries(store))
    live = promotion_journal.current(store)
    return Promotions(
        counts=dict(Counter(action for action in actions if action != promotion_journal.INTENT)),
        live_version=live.version if live else None,
        live_action=live.action if live else None,
        live_since=_seconds_of(live.time) if live else None,
    )


def verdict_of(store: Path, outcome: runs.RunOutcome) -> str:
    """Which of `VERDICTS` a run's end is; a gate's refusal is split by what its note says."""
    if outcome.state != "refused":
        return outcome.state if outcome.state in (RELEASED, CANARY, JUDGED) else FAILED
    if outcome.step == "evaluation":
        notes = {note.step: note for note in runs.read_notes(store, outcome.run)}
        note = notes.get("evaluation")
        return GATE_INCONCLUSIVE if note and note.facts.get("decision") == "inconclusive" else GATE_FAILED
    return BLOCKED_BY_DATA if outcome.step == "validation" else REFUSED_AT_DEPLOYMENT


def _read_outcome(store: Path, run: str) -> runs.RunOutcome | None:
    """How the run ended; None while it has not."""
    try:
        text = (runs.run_folder(store, run) / runs.OUTCOME_FILE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return runs.RunOutcome(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ContractError(f"the outcome of run {run} cannot be read: {error}") from error


def _last_run(store: Path, outcome: runs.RunOutcome) -> LastRun:
    ended_at = _seconds_of(outcome.ended_at)
    begun = runs.begun_at(runs.read_notes(store, outcome.run))
    seconds = ended_at - begun.timestamp() if begun else None
    known = {name: getattr(outcome, name) for name in ("run", "state", "step", "reason")}
    return LastRun(**known, reports=tuple(outcome.reports), ended_at=ended_at, seconds=seconds)


def _seconds_of(text: str) -> float:
    return promotion_journal.moment_of(text).timestamp()
