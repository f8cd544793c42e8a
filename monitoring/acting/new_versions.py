"""What becomes of a version that bakes: findings for whoever may take it back, and events for people.

In: the decisions of `monitoring.deciding.baking`, scores that are no numbers as they arrive, the promotion journal.
Out: one findings file a version in the model store, and an event when a version is found to be bad and when one was
taken back. The monitor changes nothing of what is served: deployment's controller reads the findings.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from components.contracts.baking import BAD, BakingSettings, Findings
from components.contracts.metrics import sequential_binomial
from components.runtime.errors import ContractError
from components.store import promotion_journal
from components.store.promotion_journal import baking, read_findings, write_findings
from monitoring.deciding.baking import NUM_TESTS, state_of
from monitoring.deciding.policy import Decision
from monitoring.journal import Journal
from monitoring.memory.database import Database

logger = logging.getLogger(__name__)

UNUSABLE, TAKEN_BACK = "unusable_scores", "taken_back"
"""Names of the documents: rows without a usable score by version; the journal's line that was reported last."""
LOOK_SECONDS = 2.0
"""Between two looks at the promotion journal."""
_REMEMBERED = 8
"""Versions whose unusable scores are counted."""


class NewVersions:
    """The versions of one model store as the monitor sees them bake."""

    def __init__(
        self,
        settings: BakingSettings,
        *,
        store: Path,
        documents: Database,
        journal: Journal,
        rows_of: Callable[[int], int],
    ) -> None:
        """Continues where a predecessor stopped.

        `rows_of` gives the usable rows that a version has scored, those of the last days at least.
        """
        self._settings, self._store, self._documents, self._journal = settings, store, documents, journal
        self._rows_of = rows_of
        kept = documents.read_document(UNUSABLE) or {}
        self._unusable = Counter({int(version): rows for version, rows in kept.items()})
        self._is_new = bool(self._unusable)
        """Whether rows without a usable score were counted since they were judged last."""
        self._reported = (documents.read_document(TAKEN_BACK) or {"line": None})["line"]
        self._written: Findings | None = None
        self._told: int | None = None
        """The bad version of which people were told last."""
        self._looked_at: float | None = None

    def count_unusable(self, rows: Mapping[int, int]) -> None:
        """Counts rows whose score is no probability, by version."""
        self._unusable.update(rows)
        self._unusable = Counter(dict(sorted(self._unusable.items())[-_REMEMBERED:]))
        self._documents.write_documents({UNUSABLE: {str(version): n for version, n in self._unusable.items()}})
        self._is_new = True

    def consider(self, decision: Decision, *, now: float) -> None:
        """Leaves what live traffic says of a version, if it bakes."""
        numbers = decision.numbers
        version, rows = numbers["version"], numbers["rows_baked"]
        assert version is not None
        assert rows is not None
        known = {name: numbers[name] for name in ("auc", "auc_low", "auc_high", "threshold", "evidence")}
        self._leave(int(version), state_of(decision), decision.reason, rows=int(rows), numbers=known, now=now)

    def step(self, now: float) -> bool:
        """Judges scores that arrived, and looks whether a version was taken back; True where one was since.

        A store that cannot be read is looked at again.
        """
        if self._is_new:
            self._judge_scores(now)
        # A clock that was set back looks too early rather than never.
        if self._looked_at is not None and abs(now - self._looked_at) < LOOK_SECONDS:
            return False
        self._looked_at = now
        try:
            live = promotion_journal.current(self._store)
        except (ContractError, OSError) as error:
            logger.warning("the promotion journal cannot be read: %s", error)
            return False
        if live is None or live.barred_model_id is None or live.time == self._reported:
            return False
        text = f"version {live.previous_version} was taken back, {live.version} is live again: {live.reason}"
        self._journal.emit("taken_back", text, version=live.previous_version, live_version=live.version)
        self._documents.write_documents({TAKEN_BACK: {"line": live.time}})
        self._reported = live.time
        return True

    def _judge_scores(self, now: float) -> None:
        self._is_new = False
        for version, unusable in self._unusable.items():
            rows, allowed = unusable + self._rows_of(version), self._settings.max_unusable_scores
            if sequential_binomial(unusable, rows, allowed) < self._settings.bake_alpha / NUM_TESTS:
                text = f"{unusable} of {rows} rows have a score that is no probability, expected at most {allowed:.2%}"
                numbers = {"unusable_rows": float(unusable), "scored_rows": float(rows)}
                self._leave(version, BAD, f"{text}: model version {version}", rows=rows, numbers=numbers, now=now)

    def _leave(
        self, version: int, state: str, reason: str, *, rows: int, numbers: Mapping[str, float | None], now: float
    ) -> None:
        """Writes findings that differ from those before; a version that was found bad stays so."""
        before = self._written
        if before is not None and before.version == version and (before.state, before.reason) == (state, reason):
            return
        try:
            bakes = baking(self._store)
            if bakes is None or bakes.version != version:
                return
            before = read_findings(self._store, version)
            if before is None or before.state != BAD:
                found_at = datetime.fromtimestamp(now, timezone.utc).isoformat()
                found = Findings(
                    version=version, state=state, reason=reason, found_at=found_at, rows=rows, numbers=dict(numbers)
                )
                if state == BAD and self._told != version:
                    # Before the findings, after which nobody would: a crash between the two tells it twice.
                    self._journal.emit("bad_release", reason, version=version, **numbers)
                    self._told = version
                write_findings(self._store, found)
                before = found
            self._written = before
        except (ContractError, OSError) as error:
            # The next decision point tries again.
            logger.warning("findings on version %d cannot be left in %s: %s", version, self._store, error)
