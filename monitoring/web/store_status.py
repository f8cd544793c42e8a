"""Status of the model registry, the archive and the disks, for the pages.

The status is read once a minute. The status consists of the promotion journal, notes and outcomes
of runs, files that wait for the uploader, and disk space. The registry may be on a network share,
so a read costs one listing, the journal, and the outcome of each new run. Runs are counted in the
monitor's state, so the counts survive a restart and the removal of old runs.

The disks are those of the state, the archive and the registry. If the lake, the work folders or the
model repository have the same parent folder as the registry, their disks are included. No disk is
reported for a lake or a model repository in a bucket. `evergreen.registry.collect` removes old
files.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergreen.registry import promotion_journal, runs
from evergreen.runtime.errors import ContractError, TemporaryError
from monitoring.state.database import Database

if TYPE_CHECKING:
    from monitoring.state.archive import Archive

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Seconds between two reads of the status, and therefore its maximum age."""
_BESIDE_STORE = ("lake", "work", "repository")
_RUNS = "runs_counted"
"""Name of the document with the counted runs."""
_REPEAT_SECONDS = 86_400.0
"""Seconds after the end of a run during which its outcome is read again. If a run is repeated under
the same name, the repetition is counted too."""
_RELEASED = "released"
_CANARY = "canary"
_EVALUATED = "evaluated"
_GATE_FAILED = "gate_failed"
_GATE_INCONCLUSIVE = "gate_inconclusive"
_BLOCKED_BY_DATA = "blocked_by_data"
_REFUSED_AT_DEPLOYMENT = "refused_at_deployment"
_FAILED = "failed"
VERDICTS = {
    _RELEASED: "runs that released a version",
    _CANARY: "runs whose version became a canary",
    _EVALUATED: "runs with `rollout: none`, which release nothing",
    _GATE_FAILED: "runs whose model failed the gate",
    _GATE_INCONCLUSIVE: "runs about whose model the gate was inconclusive",
    _BLOCKED_BY_DATA: "runs that validation blocked",
    _REFUSED_AT_DEPLOYMENT: "runs whose model was refused at deployment",
    _FAILED: "runs that failed",
}
"""Verdicts of finished runs, with a description for the pages."""


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """The run that ended last."""

    run: str
    state: str
    step: str
    reason: str
    reports: tuple[str, ...]
    """Steps of the run that wrote a report."""
    ended_at: float
    """End of the run in seconds since the epoch."""
    seconds: float | None
    """Seconds from the start of the run's first step to the end of the run. None if no step left a
    note."""


@dataclass(frozen=True, kw_only=True)
class RunCounts:
    """Summary of the finished runs in the registry."""

    gate_refusals: int | None = None
    """Number of consecutive runs that the gate refused. None before a run reached the gate."""
    last_run: LastRun | None = None


@dataclass(frozen=True, kw_only=True)
class Promotions:
    """Summary of the promotion journal."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of journal lines by action, without lines that only announce an action."""
    live_version: int | None = None
    live_action: str | None = None
    """Action that made the version live: `release`, `rollback` or `promote`."""
    live_since: float | None = None


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Disk of a folder, in bytes. Several folders may be on the same disk."""

    free: int
    """Free bytes for the user of this process."""
    size: int


@dataclass(frozen=True, kw_only=True)
class StoreStatus:
    """Status of the installation at the last read."""

    store_problem: str | None = None
    """Why the model registry cannot be read, or None. If the registry cannot be read, promotions
    and runs are unknown."""
    promotions: Promotions = Promotions()
    runs: RunCounts = RunCounts()
    unuploaded_files: int | None = None
    """Number of sealed archive files that are not in the lake. None if there is no uploader."""
    oldest_unuploaded: float | None = None
    """Time when the oldest sealed file outside the lake was written, or None."""
    disks: Mapping[str, Disk] = field(default_factory=dict)
    """Disk of each folder of the installation. Folders that do not exist or cannot be read are left
    out."""


class StoreWatcher:
    """Reads the registry, the archive and the disks at intervals."""

    def __init__(
        self,
        store: Path,
        documents: Database,
        archive: "Archive",
        *,
        has_uploader: bool,
        folders: Mapping[str, Path],
    ) -> None:
        """Create the watcher, which reads nothing yet.

        Args:
            store: Model registry.
            documents: State that stores the counts of runs.
            archive: Archive of the monitor.
            has_uploader: Whether an uploader moves the archive files. Without an uploader, the
                archive is the lake, and no file waits.
            folders: Further folders of the installation. The free space of their disks is read.
        """
        self._store = store
        self._archive = archive
        self._folders = {
            **folders,
            "store": store,
            **{name: store.parent / name for name in _BESIDE_STORE},
        }
        self._has_uploader = has_uploader
        self._looked_at: float | None = None
        self._runs = RunCounter(store, documents)
        self._newest: StoreStatus | None = None

    def look(self, now: float) -> StoreStatus | None:
        """Return a status that is at most `LOOK_SECONDS` old.

        Returns None before the first successful read. An unreadable registry is reported in the
        result. If the state cannot be written or the archive cannot be read, the last result is
        used for another minute.
        """
        # If the clock was set back, an early read is better than no read.
        if self._looked_at is None or abs(now - self._looked_at) >= LOOK_SECONDS:
            self._looked_at = now
            try:
                self._newest = self._read(now)
            except (TemporaryError, OSError) as error:
                logger.warning("the status of the registry could not be read: %s", error)
        return self._newest

    def _read(self, now: float) -> StoreStatus:
        waiting = self._archive.waiting_for_upload() if self._has_uploader else None
        others: dict[str, Any] = {"disks": _read_disks(self._folders)}
        if waiting is not None:
            others |= {
                "unuploaded_files": len(waiting),
                "oldest_unuploaded": self._archive.first_written(waiting),
            }
        try:
            return StoreStatus(
                promotions=_read_promotions(self._store), runs=self._runs.count(now), **others
            )
        except (ContractError, OSError, ValueError, TypeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
            if self._newest is None or self._newest.store_problem != problem:
                logger.warning("the model registry cannot be read: %s", problem)
            return StoreStatus(store_problem=problem, **others)


class RunCounter:
    """Counts the finished runs of a registry in the counters `run_<verdict>`, each run once."""

    def __init__(self, store: Path, documents: Database) -> None:
        """Continue with the runs that a predecessor counted in `documents`."""
        self._store, self._documents = store, documents
        saved = documents.read_document(_RUNS) or {"ended": {}, "gate_refusals": None, "last": None}
        self._ended: dict[str, str] = saved["ended"]
        """`ended_at` of each counted run that is still in the registry."""
        last = saved["last"]
        self._counts = RunCounts(
            gate_refusals=saved["gate_refusals"],
            last_run=LastRun(**{**last, "reports": tuple(last["reports"])}) if last else None,
        )

    def count(self, now: float) -> RunCounts:
        """Count the runs that ended since the last call."""
        folder = self._store / "runs"
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        ended = {name: at for name, at in self._ended.items() if name in names}
        settled = {
            name for name, at in ended.items() if abs(now - _seconds_of(at)) >= _REPEAT_SECONDS
        }
        outcomes = (runs.find_outcome(self._store, name) for name in names - settled)
        new = [each for each in outcomes if each and ended.get(each.run) != each.ended_at]
        counted: Counter[str] = Counter()
        refusals, last = self._counts.gate_refusals, self._counts.last_run
        for outcome in sorted(new, key=lambda each: _seconds_of(each.ended_at)):
            verdict = _verdict_of(self._store, outcome)
            counted[f"run_{verdict}"] += 1
            if verdict in (_GATE_FAILED, _GATE_INCONCLUSIVE):
                refusals = (refusals or 0) + 1
            elif verdict in (_RELEASED, _CANARY, _EVALUATED):
                refusals = 0
            ended[outcome.run] = outcome.ended_at
            last = _last_run(self._store, outcome)
        if new or ended != self._ended:
            document = {
                "ended": ended,
                "gate_refusals": refusals,
                "last": vars(last) if last else None,
            }
            self._documents.write_documents({_RUNS: document}, dict(counted))
            self._ended, self._counts = ended, RunCounts(gate_refusals=refusals, last_run=last)
        return self._counts


def _read_disks(folders: Mapping[str, Path]) -> dict[str, Disk]:
    disks = {}
    for name, folder in folders.items():
        with suppress(OSError):
            found = shutil.disk_usage(folder)
            disks[name] = Disk(free=found.free, size=found.total)
    return disks


def _read_promotions(store: Path) -> Promotions:
    actions = (each.action for each in promotion_journal.read_entries(store))
    live = promotion_journal.current(store)
    return Promotions(
        counts=dict(Counter(action for action in actions if action != promotion_journal.INTENT)),
        live_version=live.version if live else None,
        live_action=live.action if live else None,
        live_since=_seconds_of(live.time) if live else None,
    )


def _verdict_of(store: Path, outcome: runs.RunOutcome) -> str:
    """Return the verdict of a finished run, one of `VERDICTS`.

    The note of a run that the gate refused shows whether the gate was inconclusive.
    """
    if outcome.state != "refused":
        return outcome.state if outcome.state in (_RELEASED, _CANARY, _EVALUATED) else _FAILED
    if outcome.step == "evaluation":
        notes = {note.step: note for note in runs.read_notes(store, outcome.run)}
        note = notes.get("evaluation")
        return (
            _GATE_INCONCLUSIVE
            if note and note.facts.get("decision") == "inconclusive"
            else _GATE_FAILED
        )
    return _BLOCKED_BY_DATA if outcome.step == "validation" else _REFUSED_AT_DEPLOYMENT


def _last_run(store: Path, outcome: runs.RunOutcome) -> LastRun:
    ended_at = _seconds_of(outcome.ended_at)
    begun = runs.first_start(runs.read_notes(store, outcome.run))
    seconds = ended_at - begun.timestamp() if begun else None
    known = {name: getattr(outcome, name) for name in ("run", "state", "step", "reason")}
    return LastRun(**known, reports=tuple(outcome.reports), ended_at=ended_at, seconds=seconds)


def _seconds_of(text: str) -> float:
    return promotion_journal.moment_of(text).timestamp()
