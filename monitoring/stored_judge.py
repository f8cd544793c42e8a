"""The judge of a running monitor: its memory is kept in the store, its decisions in the journal, each once.

What is judged when is `monitoring.deciding.judging`'s; what follows from it, `monitoring.acting`'s.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from components.runtime.durable import no_checkpoint
from monitoring.backtest.settings import JudgingSettings
from monitoring.deciding.judging import Judge, serving_ahead
from monitoring.deciding.policies import make_policies
from monitoring.deciding.policy import DecisionPoint
from monitoring.journal import Journal
from monitoring.memory.store import Store
from monitoring.released_models import ReleasedModels
from monitoring.rows import MaturedRequest


class StoredJudge:
    """A judge that continues where a predecessor was killed."""

    def __init__(
        self,
        settings: JudgingSettings,
        *,
        model_store: Path,
        store: Store,
        journal: Journal,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """See `monitoring.monitor.Monitor` for the arguments; call `restore` next."""
        self._store, self._journal, self._checkpoint = store, journal, checkpoint
        self._serving_ahead = serving_ahead(settings.judge)
        kept = store.read_document("judge")
        self._mark: int | None = None if kept is None else kept["mark"]
        baselines = ReleasedModels(model_store).baseline
        self.judge = Judge(
            settings.judge, make_policies(settings.policies, settings.baking), baseline=baselines, memory=kept
        )
        self._newest: DecisionPoint | None = None

    def restore(self, requests: Sequence[MaturedRequest]) -> None:
        """Takes in the matured requests held in the store, and from there the predictions not yet passed.

        Those that matured after the memory was written last, which are the newest ones held, are handled as by a
        running judge: a request whose point was passed before is passed over, not taken for a judged one.
        """
        num_new = 0 if self._mark is None else self._store.num_matured_after(self._mark)
        known = len(requests) - num_new
        self.judge.restore(requests[:known])
        for request in requests[known:]:
            self.judge.observe(request)
        judged = self.judge.judged_until
        seen = 0.0 if judged is None else judged + self._serving_ahead
        for predicted_at, version, is_canary in self._store.predictions_after(seen):
            self.judge.note_prediction(predicted_at, version, is_canary=is_canary)

    def decide(self, matured_until: float) -> None:
        """Decides on what has matured up to this event time, and stores the decisions before anyone acts on them."""
        before = self.judge.judged_until
        if points := self.judge.decide_up_to(matured_until):
            self._journal.append_decisions({point.time: point.line() for point in points})
            self._checkpoint("judge.decided")
            self._newest = points[-1]
        num_more = self.judge.num_passed_over - self._store.counters.get("passed_over", 0)
        if self.judge.judged_until != before or num_more:
            self._store.write_documents({"judge": self.memory()}, {"passed_over": num_more} if num_more else {})
            self._checkpoint("judge.kept")

    def memory(self) -> dict[str, Any]:
        """The judge's memory, and `mark`: the last matured request that it knows of."""
        return {**self.judge.memory(), "mark": self._store.matured_mark()}

    def take_newest(self) -> DecisionPoint | None:
        """The newest decision point, once; earlier ones of the same turn are history, and a drift is judged again."""
        newest, self._newest = self._newest, None
        return newest
