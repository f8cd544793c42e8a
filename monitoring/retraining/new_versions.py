"""Write findings about a baking version, and emit events about bad versions.

The input is the decisions of `monitoring.policies.baking`, rows without a usable score, and the
promotion journal. The output is one findings file per version in the model registry. An event is
emitted when a version is bad, and another event when the version was rolled back. The monitor does
not change what is served. The release controller reads the findings.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from evergreen.config.release import BakingSettings
from evergreen.contracts.baking import (
    BAD,
    MIN_UNUSABLE_REQUESTS,
    MIN_UNUSABLE_ROWS,
    MIN_UNUSABLE_SECONDS,
    UNUSABLE_REQUESTS,
    Findings,
)
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import baking, read_findings, write_findings
from evergreen.runtime.errors import ContractError
from evergreen.statistics.metrics import sequential_binomial
from monitoring.journal import Journal
from monitoring.policies.baking import NUM_TESTS, state_of
from monitoring.policies.policy import Decision
from monitoring.state.database import Database

if TYPE_CHECKING:
    from monitoring.state.join import UnscoredRows

logger = logging.getLogger(__name__)

_UNUSABLE, _ROLLED_BACK = "unusable_scores", "rolled_back"
"""Names of two documents. `_UNUSABLE` contains the `_UnusableRows`. `_ROLLED_BACK` contains the
position in the promotion journal up to which rollbacks were reported."""
_LOOK_SECONDS = 2.0
"""Seconds between two reads of the promotion journal."""


@dataclass(kw_only=True)
class _UnusableRows:
    """Rows of the baking version without a usable score, stored as a JSON object."""

    version: int = 0
    rows: int = 0
    requests: list[str] = field(default_factory=list)
    """Ids of the first `MIN_UNUSABLE_REQUESTS` distinct requests that have rows without a usable
    score."""
    first: float = 0.0
    """Arrival time of the first row without a usable score, in seconds since the epoch."""
    last: float = 0.0

    def add(self, request_id: str, rows: int, now: float) -> None:
        """Add the rows of a request."""
        if (
            not self.rows or not now - self.first >= 0
        ):  # the second condition is true if the clock was set back
            self.first = now
        self.rows, self.last = self.rows + rows, now
        if len(self.requests) < MIN_UNUSABLE_REQUESTS and request_id not in self.requests:
            self.requests.append(request_id)

    @property
    def is_enough(self) -> bool:
        """Return whether the rows are too many and too spread out to come from a short burst.

        A client with publish permission could publish a short burst of rows on purpose.
        """
        return (
            self.rows >= MIN_UNUSABLE_ROWS
            and len(self.requests) >= MIN_UNUSABLE_REQUESTS
            and self.last - self.first >= MIN_UNUSABLE_SECONDS
        )


class NewVersions:
    """Writes to a model registry how the new versions perform while they bake."""

    def __init__(
        self,
        settings: BakingSettings,
        *,
        store: Path,
        documents: Database,
        journal: Journal,
        rows_of: Callable[[int], int],
    ) -> None:
        """Continue where a predecessor stopped.

        `rows_of` returns the number of usable rows that a version scored, at least over the last
        days.
        """
        self._settings, self._store, self._documents, self._journal = (
            settings,
            store,
            documents,
            journal,
        )
        self._rows_of = rows_of
        self._unusable = _UnusableRows(**(documents.read_document(_UNUSABLE) or {}))
        self._is_new = self._unusable.rows > 0
        """Whether rows without a usable score arrived after the last test of such rows."""
        self._reported: int | None = (documents.read_document(_ROLLED_BACK) or {}).get("position")
        """Number of entries of the promotion journal that were already checked for rollbacks. None
        = this state folder is new, so earlier rollbacks are not reported."""
        self._written: Findings | None = None
        self._reported_bad: int | None = None
        """The bad version that was last reported to people."""
        self._looked_at: float | None = None

    def count_unusable(self, found: Sequence["UnscoredRows"], now: float) -> None:
        """Count the requests of a baking version that have a score outside [0, 1]."""
        try:
            bakes = baking(self._store)
        except (ContractError, OSError) as error:
            logger.warning(
                "cannot count unscored rows, because the promotion journal is unreadable: %s",
                error,
            )
            return
        of_version = [each for each in found if bakes is not None and each.version == bakes.version]
        if not of_version:
            return
        if self._unusable.version != of_version[0].version:
            self._unusable = _UnusableRows(version=of_version[0].version)
        for each in of_version:
            self._unusable.add(each.request_id, each.rows, now)
        self._documents.write_documents({_UNUSABLE: asdict(self._unusable)})
        self._is_new = True

    def consider(self, decision: Decision, *, now: float) -> None:
        """Write the findings of a decision to the registry, if its version is baking."""
        numbers = decision.numbers
        version, rows = numbers["version"], numbers["rows_baked"]
        assert version is not None
        assert rows is not None
        known = {
            name: numbers[name] for name in ("auc", "auc_low", "auc_high", "threshold", "evidence")
        }
        self._write(
            int(version),
            state_of(decision),
            decision.reason,
            rows=int(rows),
            numbers=known,
            now=now,
        )

    def step(self, now: float) -> bool:
        """Test new rows without a usable score, and return whether a rollback was found.

        If the registry cannot be read, a later call reads it again.
        """
        if self._is_new:
            self._evaluate_scores(now)
        # If the clock was set back, an early read is better than no read.
        if self._looked_at is not None and abs(now - self._looked_at) < _LOOK_SECONDS:
            return False
        self._looked_at = now
        try:
            entries = promotion_journal.read_entries(self._store)
            live = promotion_journal.current(self._store)
        except (ContractError, OSError) as error:
            logger.warning("the promotion journal cannot be read: %s", error)
            return False
        if live is not None and live not in entries:  # `live` was written between the two reads
            return False
        # Use the order of the entries instead of their times, because clocks may differ.
        position = len(entries) - entries[::-1].index(live) if live is not None else 0
        if self._reported is not None and position <= self._reported:
            return False
        if self._reported is None or live is None or live.blocked_model_id is None:
            self._set_reported(position)
            return False
        text = (
            f"version {live.previous_version} was rolled back, {live.version} is live again: "
            f"{live.reason}"
        )
        self._journal.emit(
            "rolled_back", text, version=live.previous_version, live_version=live.version
        )
        self._set_reported(position)
        return True

    def _set_reported(self, position: int) -> None:
        self._documents.write_documents({_ROLLED_BACK: {"position": position}})
        self._reported = position

    def _evaluate_scores(self, now: float) -> None:
        self._is_new = False
        found = self._unusable
        if not found.is_enough:
            return
        rows, allowed = (
            found.rows + self._rows_of(found.version),
            self._settings.max_unusable_scores,
        )
        if sequential_binomial(found.rows, rows, allowed) < self._settings.bake_alpha / NUM_TESTS:
            text = (
                f"{found.rows} of {rows} rows have a score that is not a probability, expected "
                f"at most {allowed:.2%}"
            )
            numbers = {
                "unusable_rows": float(found.rows),
                "scored_rows": float(rows),
                UNUSABLE_REQUESTS: float(len(found.requests)),
            }
            reason = f"{text}: model version {found.version}"
            self._write(found.version, BAD, reason, rows=rows, numbers=numbers, now=now)

    def _write(
        self,
        version: int,
        state: str,
        reason: str,
        *,
        rows: int,
        numbers: Mapping[str, float | None],
        now: float,
    ) -> None:
        """Write findings if they changed. A version that was found bad stays bad."""
        before = self._written
        if (
            before is not None
            and before.version == version
            and (before.state, before.reason) == (state, reason)
        ):
            return
        try:
            bakes = baking(self._store)
            if bakes is None or bakes.version != version:
                return
            before = read_findings(self._store, version)
            if before is None or before.state != BAD:
                found_at = datetime.fromtimestamp(now, timezone.utc).isoformat()
                found = Findings(
                    version=version,
                    state=state,
                    reason=reason,
                    found_at=found_at,
                    rows=rows,
                    numbers=dict(numbers),
                )
                if state == BAD and self._reported_bad != version:
                    # Emit the event before writing the findings, because the event is not emitted
                    # for findings that exist already. After a crash between the event and the
                    # findings, the event is repeated.
                    self._journal.emit("bad_release", reason, version=version, **numbers)
                    self._reported_bad = version
                write_findings(self._store, found)
                before = found
            self._written = before
        except (ContractError, OSError) as error:
            # After a failed write, the findings are written at the next decision point.
            logger.warning(
                "findings on version %d cannot be written to %s: %s", version, self._store, error
            )
