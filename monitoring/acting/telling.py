"""When something is news: a drift's first breach, its hold, its end; a log that is away for long, and its return.

In: decisions, what is wrong with the log. Out: events of the journal, each once. Which events reach people is
`monitoring.acting.notifications`'.
"""

from __future__ import annotations

from collections.abc import Callable

from monitoring.acting.progress import Documents
from monitoring.deciding.decision import Action, Decision
from monitoring.journal import Journal

TOLD = "told"
"""Document with the action of the drift that was told of last; none after its end."""
LOG_DOWN_SECONDS = 60.0
"""A log that is away for less is a broker that restarts, and nothing to wake anybody for."""


class ToldDrift:
    """What was told of the drift under way; kept, so that a restart neither repeats nor swallows its end."""

    def __init__(self, documents: Documents, journal: Journal) -> None:
        """Takes up what a predecessor told."""
        self._documents, self._journal = documents, journal
        self._action = str((documents.read_document(TOLD) or {"action": ""})["action"])

    @property
    def is_open(self) -> bool:
        """Whether a drift was told of that has not ended."""
        return bool(self._action)

    def tell(self, decision: Decision) -> None:
        """Events for the first breach, for a hold and for the recovery; a request tells of itself."""
        action, told = decision.action, self._action
        if action is Action.RETRAIN:
            self._note(Action.BREACH.value)
        elif action is Action.HELD or (action is Action.BREACH and not told):
            if action.value != told:
                self._tell(action.value, decision)
            self._note(action.value)
        elif action is Action.OK and told:
            self._tell("recovered", decision)
            self._note("")

    def _tell(self, kind: str, decision: Decision) -> None:
        self._journal.tell(kind, decision.reason, policy=decision.policy, **decision.numbers)

    def _note(self, action: str) -> None:
        if action != self._action:
            self._documents.write_documents({TOLD: {"action": action}})
            self._action = action


class LogWatch:
    """How long nothing could arrive."""

    def __init__(self, journal: Journal, *, is_told: Callable[[], bool]) -> None:
        """Nothing is wrong yet; `is_told` says whether people know of a log that is away, also after a restart."""
        self._journal, self._is_told = journal, is_told
        self._since: float | None = None

    def look(self, problem: str | None, now: float) -> None:
        """Tells of a `problem` that lasts, and of its end.

        Args:
            problem: Why nothing can arrive; None = nothing is wrong.
            now: Seconds since the epoch.
        """
        if problem is None:
            if self._is_told():
                self._journal.tell("log_up", "messages can arrive again")
            self._since = None
        elif self._since is None:
            self._since = now
        # A clock that was set back tells too early rather than never.
        elif abs(now - self._since) >= LOG_DOWN_SECONDS and not self._is_told():
            self._journal.tell("log_down", problem)
