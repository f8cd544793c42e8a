"""The judge in a running monitor: its memory lies in the store, its judgements in the journal, each once.

What is judged when is `monitoring.deciding.judge`'s; what follows from it, `monitoring.acting`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monitoring.deciding.baseline import GateBaselines
from monitoring.deciding.decision import Judgement, decision_line
from monitoring.deciding.judge import Judge
from monitoring.deciding.policies import make_policies
from monitoring.journal import Journal
from monitoring.memory.archive import no_checkpoint
from monitoring.memory.rows import MaturedRequest
from monitoring.memory.store import Store
from monitoring.settings import MonitorSettings


class KeptJudge:
    """A judge that is taken up where a predecessor was killed."""

    def __init__(
        self,
        settings: MonitorSettings,
        store: Store,
        journal: Journal,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """See `monitoring.monitor.Monitor` for the arguments; `restore` comes next."""
        self._store, self._journal, self._checkpoint = store, journal, checkpoint
        self._window_seconds = settings.attribution_window_seconds
        kept = store.read_document("judge")
        # None: no document, or one that is older than marks.
        self._mark: int | None = None if kept is None else kept.get("mark")
        self.judge = Judge(settings, make_policies(settings), baseline=GateBaselines(settings.store), memory=kept)
        self._newest: Judgement | None = None

    def restore(self, requests: Sequence[MaturedRequest]) -> None:
        """Takes in the matured requests held in the store, and from there the predictions not yet passed.

        Those that matured after the memory was written last, which are the newest ones held, come as to a running
        judge: one whose point was passed before is passed over, not taken for a judged one.
        """
        num_new = 0 if self._mark is None else self._store.num_matured_after(self._mark)
        known = len(requests) - num_new
        self.judge.restore(requests[:known])
        for request in requests[known:]:
            self.judge.observe(request)
        judged = self.judge.judged_until
        seen = 0.0 if judged is None else judged + self._window_seconds
        for predicted_at, version, is_canary in self._store.predictions_after(seen):
            self.judge.note_prediction(predicted_at, version, is_canary=is_canary)

    def decide(self, matured_until: float) -> None:
        """Judges what has matured up to this event time, and keeps the judgements before anyone acts on them."""
        before = self.judge.judged_until
        if judgements := self.judge.decide_up_to(matured_until):
            self._journal.decide({judgement.time: decision_line(judgement) for judgement in judgements})
            self._checkpoint("judge.decided")
            self._newest = judgements[-1]
        num_more = self.judge.num_passed_over - self._store.counters.get("passed_over", 0)
        if self.judge.judged_until != before or num_more:
            self._store.write_documents({"judge": self.memory()}, {"passed_over": num_more} if num_more else {})
            self._checkpoint("judge.kept")

    def memory(self) -> dict[str, Any]:
        """The judge's memory, and `mark`: the last matured request that it knows of."""
        return {**self.judge.memory(), "mark": self._store.matured_mark()}

    def take(self) -> Judgement | None:
        """The newest judgement, once; those before it, of one turn, are history, and a drift goes on being judged."""
        newest, self._newest = self._newest, None
        return newest
