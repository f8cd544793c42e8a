"""What lies around the monitor, looked at once a minute: runs and releases in the model store, files for the uploader.

In: the promotion journal, the notes and outcomes of runs, the archive. Out: what `showing.operations` makes metrics of.
The store may be a network's folder, so a look costs a listing, the journal where it has grown, and the outcome of each
run that is new. Runs are counted in the monitor's own memory, so the counts outlive a restart and the removal of old
runs. Acting on any of it is left to `monitoring.acting`.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.runtime.errors import ContractError, TemporaryError
from components.store import promotion_journal, run_notes
from monitoring.acting.progress import Documents
from monitoring.showing.snapshot import Surroundings

if TYPE_CHECKING:
    from monitoring.memory.archive import Archive

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Between two looks; a number that is shown is at most this old."""
RUNS = "runs_counted"
"""Document with the runs that are counted."""
REPEAT_SECONDS = 86_400.0
"""How long after its end a run's outcome is still read anew: a run that is repeated under its name counts again."""
RELEASED, GATE_FAILED, GATE_INCONCLUSIVE = "released", "gate_failed", "gate_inconclusive"
BLOCKED_BY_DATA, REFUSED_AT_DEPLOYMENT, FAILED = "blocked_by_data", "refused_at_deployment", "failed"
VERDICTS = (RELEASED, GATE_FAILED, GATE_INCONCLUSIVE, BLOCKED_BY_DATA, REFUSED_AT_DEPLOYMENT, FAILED)


class Lookout:
    """Looks around when it is time."""

    def __init__(self, store: Path, documents: Documents, archive: Archive, *, has_uploader: bool) -> None:
        """Looks at nothing yet.

        Args:
            store: The model store.
            documents: The monitor's memory, where runs are counted.
            archive: The monitor's archive.
            has_uploader: False = the archive is the lake, and nothing in it waits.
        """
        self._documents, self._archive, self._has_uploader = documents, archive, has_uploader
        self._looked_at: float | None = None
        self._runs = CountedRuns(store, documents)
        self._journal = _Kept(store / promotion_journal.JOURNAL_FILE, lambda: _promotions(store))
        self._seen: Surroundings | None = None

    def look(self, now: float) -> Surroundings | None:
        """What is there as of at most `LOOK_SECONDS` ago; None before the first look that succeeded.

        A store that cannot be read is told in what is returned; a memory that cannot be written and an archive that
        cannot be read leave the last look for another minute.
        """
        # A clock that was set back looks too early rather than never.
        if self._looked_at is None or abs(now - self._looked_at) >= LOOK_SECONDS:
            self._looked_at = now
            try:
                self._seen = Surroundings(**self._of_store(now), **self._of_archive())
            except (TemporaryError, OSError) as error:
                logger.warning("what lies around could not be noted: %s", error)
        return self._seen

    def _of_store(self, now: float) -> dict[str, Any]:
        try:
            return {**self._journal.read(), **self._runs.look(now)}
        except (ContractError, OSError, ValueError, TypeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
            if self._seen is None or self._seen.store_problem != problem:
                logger.warning("the model store cannot be read: %s", problem)
            return {"store_problem": problem}

    def _of_archive(self) -> dict[str, Any]:
        if not self._has_uploader:
            return {}
        waiting = self._archive.waiting_for_upload()
        return {"unuploaded_files": len(waiting), "oldest_unuploaded": self._archive.first_written(waiting)}


class CountedRuns:
    """The finished runs of a model store, each counted once by its verdict, as `run_<verdict>`."""

    def __init__(self, store: Path, documents: Documents) -> None:
        """Takes up what a predecessor counted in `documents`."""
        self._store, self._documents = store, documents
        kept = documents.read_document(RUNS) or {}
        self._ended: dict[str, str] = kept.get("ended", {})
        """`ended_at` of each counted run that is still in the store."""
        self._refusals: int | None = kept.get("gate_refusals")
        self._last: dict[str, Any] | None = kept.get("last")

    def look(self, now: float) -> dict[str, Any]:
        """Counts what ended since; the fields of `Surroundings` that are of runs.

        Raises:
            OSError, ValueError, TypeError, KeyError: the store cannot be read.
            TemporaryError: the memory cannot be written; nothing was counted.
        """
        names = _names(self._store / "runs")
        ended = {name: at for name, at in self._ended.items() if name in names}
        settled = {name for name, at in ended.items() if abs(now - _seconds(at)) >= REPEAT_SECONDS}
        found = [o for name in names - settled if (o := _outcome(self._store, name)) and ended.get(name) != o.ended_at]
        counts: Counter[str] = Counter()
        refusals, last = self._refusals, self._last
        for outcome in sorted(found, key=lambda each: _seconds(each.ended_at)):
            verdict = verdict_of(self._store, outcome)
            counts[f"run_{verdict}"] += 1
            if verdict in (GATE_FAILED, GATE_INCONCLUSIVE):
                refusals = (refusals or 0) + 1
            elif verdict == RELEASED:
                refusals = 0
            ended[outcome.run] = outcome.ended_at
            last = _told(self._store, outcome)
        if found or ended != self._ended:
            document = {"ended": ended, "gate_refusals": refusals, "last": last}
            self._documents.write_documents({RUNS: document}, dict(counts))
            self._ended, self._refusals, self._last = ended, refusals, last
        last = last or {}
        return {
            "gate_refusals": refusals,
            "last_run": last.get("outcome"),
            "last_run_end": last.get("end"),
            "last_run_seconds": last.get("seconds"),
        }


def verdict_of(store: Path, outcome: run_notes.RunOutcome) -> str:
    """Which of `VERDICTS` a run's end is; a gate's refusal is split by what its note says."""
    if outcome.state != "refused":
        return RELEASED if outcome.state == "released" else FAILED
    if outcome.step == "evaluation":
        notes = {note.step: note for note in run_notes.read_notes(store, outcome.run)}
        note = notes.get("evaluation")
        return GATE_INCONCLUSIVE if note and note.facts.get("decision") == "inconclusive" else GATE_FAILED
    return BLOCKED_BY_DATA if outcome.step == "validation" else REFUSED_AT_DEPLOYMENT


def _outcome(store: Path, run: str) -> run_notes.RunOutcome | None:
    """How the run ended; None while it has not."""
    try:
        text = (run_notes.run_folder(store, run) / run_notes.OUTCOME_FILE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return run_notes.RunOutcome(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ContractError(f"outcome of run {run} is none: {error}") from error


def _told(store: Path, outcome: run_notes.RunOutcome) -> dict[str, Any]:
    end = _seconds(outcome.ended_at)
    begun = run_notes.begun_at(run_notes.read_notes(store, outcome.run))
    told = {name: getattr(outcome, name) for name in ("run", "state", "step", "reason")}
    told["reports"] = list(outcome.reports)
    return {"end": end, **({"seconds": end - begun.timestamp()} if begun else {}), "outcome": told}


def _promotions(store: Path) -> dict[str, Any]:
    entries = promotion_journal.read_entries(store)
    live = promotion_journal.current(store)
    counted = Counter(entry.action for entry in entries if entry.action != promotion_journal.INTENT)
    found: dict[str, Any] = {"promotions": dict(counted)}
    if live is not None:
        found |= {"live_version": live.version, "live_action": live.action, "live_since": _seconds(live.time)}
    return found


class _Kept:
    """What `read` made of a file, as long as the file is the same."""

    def __init__(self, path: Path, read: Callable[[], dict[str, Any]]) -> None:
        self._path, self._read = path, read
        self._stamp: tuple[int, int, int] | None = None
        self._made: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
        except FileNotFoundError:
            stamp = (0, 0, 0)
        if self._made is None or stamp != self._stamp:
            self._made, self._stamp = self._read(), stamp
        return self._made


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return set()


def _seconds(text: str) -> float:
    return promotion_journal.moment_of(text).timestamp()
