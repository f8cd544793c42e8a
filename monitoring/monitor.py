"""The monitor's loop: what happens in which order, and nothing else.

One turn: pull, store, acknowledge; mature what is due; archive; measure; judge; move the request under way on. Each
part is a module of its own. Everything runs in one thread; only the HTTP pages are served beside it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from components.contracts.errors import ContractError
from components.contracts.event_log import Delivery, Subscriber
from components.contracts.records import OutcomeBatch, PredictionBatch, decode
from monitoring.acting.restraint import restrain
from monitoring.acting.retraining import IDLE, Retraining
from monitoring.acting.trigger import Trigger
from monitoring.deciding.decision import Action, Decision
from monitoring.deciding.evidence import Evidence, MaturedRows, Memory
from monitoring.deciding.threshold import ThresholdPolicy
from monitoring.journal import Journal
from monitoring.measures.kpis import Kpis, measure
from monitoring.measures.window import VersionWindows
from monitoring.memory.archive import Archive, no_checkpoint
from monitoring.memory.intake import Watermark, read_record
from monitoring.memory.join import attribute_clicks, due_before
from monitoring.memory.store import MaturedRequest, Store, Waiting
from monitoring.settings import MonitorSettings
from monitoring.showing.exposition import Exposition, Snapshot

logger = logging.getLogger(__name__)

MATURE_REQUESTS = 2000
"""Most requests matured in one transaction."""
FORGET_SECONDS = 600.0
STALE_SECONDS = 900.0
"""KPIs of a version without a new row for longer are shown no more: its window says nothing of the present."""
TICK_PULLS = 20
"""Most pulls in one turn: under a flood the loop still measures, and shows that it lives."""


class Monitor:
    """One monitor over one log."""

    def __init__(
        self,
        settings: MonitorSettings,
        *,
        subscriber: Subscriber,
        lease_seconds: float,
        store: Store,
        trigger: Trigger | None,
        exposition: Exposition | None = None,
        clock: Callable[[], float] = time.time,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Takes up where a predecessor stopped: finishes its archive file, rebuilds its windows, finds its run.

        Args:
            settings: See `MonitorSettings`.
            subscriber: The record log.
            lease_seconds: How long the log keeps a killed predecessor's messages from us.
            store: The memory.
            trigger: Runs the pipeline; None = only notify.
            exposition: Shown over HTTP.
            clock: Seconds since the epoch.
            checkpoint: Called with the name of each step that a crash may follow; tests crash there.
        """
        self._settings, self._subscriber, self._store = settings, subscriber, store
        self._clock, self._checkpoint = clock, checkpoint
        self._exposition = exposition or Exposition()
        self.journal = Journal(settings.state, clock)
        self._archive = Archive(
            settings.archive,
            store,
            roll_rows=settings.archive_roll_rows,
            roll_seconds=settings.archive_roll_seconds,
            keep_rows=settings.window_rows,
            checkpoint=checkpoint,
        )
        self.retraining = Retraining(
            store=store,
            archive=self._archive,
            trigger=trigger,
            journal=self.journal,
            settings=settings,
            upload_wait_seconds=settings.upload_wait_seconds,
            checkpoint=checkpoint,
        )
        self.windows = VersionWindows(settings.window_rows)
        known = store.read_document("versions") or {"seen": []}
        self._versions_seen = set(known["seen"])
        self.windows.canaries = set(known.get("canaries", []))  # absent in a state folder older than canaries
        self._rebuild_windows()
        self._watermark = Watermark(started_at=clock(), lease_seconds=lease_seconds)
        self._kpis: dict[int, Kpis] = {}
        self._last_record_time: float | None = None
        self._told: Action | None = None
        self._measured_at: dict[int, float] = {}
        self._decision = ""
        self._forget_at = clock() + FORGET_SECONDS
        self._tell_started()

    def tick(self) -> None:
        """One turn of the loop.

        Raises:
            TemporaryError: the log is busy; the next turn repeats what is missing.
        """
        self._drain(TICK_PULLS)
        touched = self._mature()
        self._tell_archived(self._archive.roll(self._clock()))
        if touched:
            self._measure(touched)
            self._judge()
        self.retraining.step(self._clock())
        self._forget()
        self._exposition.beat(self._snapshot())

    def stop(self) -> None:
        """Takes in what is in the log now, archives every matured row; the others stay for the next start."""
        # What comes in meanwhile is for the next start: under a flood the stop would never end.
        self._drain(1 + self._subscriber.backlog() // self._settings.pull_messages)
        if touched := self._mature():
            self._measure(touched)
        self._tell_archived(self._archive.flush())
        self._exposition.beat(self._snapshot())
        self.journal.tell(
            "stopped",
            f"{self._store.num_pending_rows} rows stay pending",
            pending=self._store.num_pending_rows,
            counters=dict(self._store.counters),
        )

    def _rebuild_windows(self) -> None:
        for request in self._store.newest_rows():
            self._watch(request)
        if newest := self._store.newest_waiting():
            self.windows.note_prediction(newest[1], min(newest[0], self._clock()))

    def _tell_started(self) -> None:
        store = self._store
        self.journal.tell(
            "started",
            f"{store.num_pending_rows} rows pending, {store.num_unarchived_rows} matured rows to archive",
            pending=store.num_pending_rows,
            unarchived=store.num_unarchived_rows,
            phase=self.retraining.progress.phase,
        )

    # -- intake

    def _drain(self, max_pulls: int) -> None:
        """Stores and acknowledges what the log holds, in at most `max_pulls` pulls."""
        for _ in range(max_pulls):
            pulled_at = self._clock()
            deliveries = self._subscriber.pull(self._settings.pull_messages)
            if deliveries:
                self._checkpoint("intake.pulled")
                self._take_in(deliveries, pulled_at)
            if len(deliveries) < self._settings.pull_messages:
                self._watermark.drained(pulled_at, self._subscriber.backlog())
                return

    def _take_in(self, deliveries: list[Delivery], now: float) -> None:
        predictions: list[tuple[PredictionBatch, bytes]] = []
        outcomes: list[OutcomeBatch] = []
        bad: list[tuple[Delivery, str]] = []
        for delivery in deliveries:
            try:
                record = read_record(delivery.payload, now=now)
            except ContractError as error:
                bad.append((delivery, str(error)))
                continue
            if isinstance(record, PredictionBatch):
                predictions.append((record, delivery.payload))
            else:
                outcomes.append(record)
        unusable = [(delivery.message_id, reason) for delivery, reason in bad]
        self._store.add(predictions, outcomes, unusable, now=now)
        self._checkpoint("intake.stored")
        aside = {delivery.token for delivery, _ in bad}
        self._subscriber.acknowledge([d.token for d in deliveries if d.token not in aside])
        self._checkpoint("intake.acknowledged")
        for delivery, reason in bad:
            self._subscriber.set_aside(delivery.token, reason)
        if bad:
            first, reason = bad[0]
            text = f"{len(bad)} messages, the first {first.message_id}: {reason}"
            self.journal.tell("set_aside", text, messages=len(bad), message_id=first.message_id)
        self._note_predictions([batch for batch, _ in predictions], now)

    def _note_predictions(self, batches: list[PredictionBatch], now: float) -> None:
        for batch in batches:
            # A client whose clock is ahead must not name the serving version until we get there.
            predicted_at = min(batch.time, now)
            changed = self.windows.note_arm(batch.model_version, is_canary=batch.canary)
            self.windows.note_prediction(batch.model_version, predicted_at)
            self._last_record_time = max(predicted_at, self._last_record_time or 0.0)
            if batch.model_version not in self._versions_seen:
                self._versions_seen.add(batch.model_version)
                part = "takes a share of the traffic" if batch.canary else "serves"
                self.journal.tell(
                    "version_seen", f"model version {batch.model_version} {part}", version=batch.model_version
                )
                changed = True
            if changed:
                seen = {"seen": sorted(self._versions_seen), "canaries": sorted(self.windows.canaries)}
                self._store.write_documents({"versions": seen})

    # -- join

    def _mature(self) -> set[int]:
        """Makes labels final whose window has closed; the versions they belong to."""
        touched: set[int] = set()
        if self._watermark.time is None:
            return touched
        window_seconds = self._settings.attribution_window_seconds
        before = due_before(self._watermark.time, window_seconds=window_seconds)
        while waiting := self._store.waiting(before, MATURE_REQUESTS):
            counts: dict[str, float] = {}
            requests = [self._label(request, counts) for request in waiting]
            self._store.mature(requests, counts, now=self._clock())
            self._checkpoint("join.matured")
            for request in requests:
                self._watch(request)
                touched.add(request.model_version)
        return touched

    def _label(self, waiting: Waiting, counts: dict[str, float]) -> MaturedRequest:
        batch = decode(waiting.payload)
        assert isinstance(batch, PredictionBatch)
        found = attribute_clicks(
            len(batch), batch.time, waiting.clicks, window_seconds=self._settings.attribution_window_seconds
        )
        counts["late_outcome"] = counts.get("late_outcome", 0) + found.num_too_late
        counts["unmatched_outcome"] = counts.get("unmatched_outcome", 0) + found.num_unmatched
        return MaturedRequest(batch.request_id, batch.time, batch.model_version, found.labels, batch.scores)

    def _watch(self, request: MaturedRequest) -> None:
        self.windows.update(request.model_version, request.time, request.labels, request.scores)

    # -- numbers and judgement

    def _measure(self, versions: set[int]) -> None:
        for version in sorted(versions & set(self.windows.versions)):
            window = self.windows[version]
            self._kpis[version] = measure(version, window.labels, window.scores)
            self._measured_at[version] = self._clock()
            counters = self._store.counters
            self.journal.measure(
                {
                    **dataclasses.asdict(self._kpis[version]),
                    "backlog": self._subscriber.backlog(),
                    "matured_total": int(counters.get("matured", 0)),
                    "pending": self._store.num_pending_rows,
                    **{name + ending: int(counters.get(name, 0)) for name, ending in _TIMELINE_COUNTERS},
                }
            )

    def _judge(self) -> None:
        version = self.windows.serving_version
        if version not in self._kpis:
            return
        now = self._clock()
        matured_total = int(self._store.counters.get("matured", 0))
        memory: Memory = self._store.read_document("judge") or {}
        nothing = MaturedRows(
            labels=np.zeros(0, np.uint8), scores=np.zeros(0, np.float32), groups=np.zeros(0, np.int64)
        )
        evidence = Evidence(
            time=now,
            version=version,
            serving_since=now,
            kpis=self._kpis[version],
            rows=nothing,
            matured_total=matured_total,
            baseline=None,
            drift=None,
        )
        decision, kept = ThresholdPolicy(self._settings).decide(evidence, memory)
        if kept != memory:
            self._store.write_documents({"judge": dict(kept)})
        decision = restrain(decision, self.retraining.memory, self._settings, now=now)
        self._tell_change(decision)
        if decision.action is Action.RETRAIN and self.retraining.progress.phase == IDLE:
            self.retraining.begin(decision, now=now)

    def _tell_change(self, decision: Decision) -> None:
        """Events for the first breach, for a hold and for the recovery; a request tells of itself."""
        self._decision = f"{decision.action.value}: {decision.reason}"
        action, told = decision.action, self._told
        if action is Action.RETRAIN:
            self._told = Action.BREACH
        elif action is Action.HELD or (action is Action.BREACH and told is None):
            if action is not told:
                self.journal.tell(action.value, decision.reason, **decision.numbers)
            self._told = action
        elif action is Action.OK and told is not None:
            self.journal.tell("recovered", decision.reason, **decision.numbers)
            self._told = None

    def _tell_archived(self, files: list[tuple[str, int]]) -> None:
        for name, rows in files:
            self.journal.tell("archived", f"{rows} rows in {name}", rows=rows, files=[name])

    def _forget(self) -> None:
        now = self._clock()
        if now >= self._forget_at:
            self._archive.waiting_for_upload()
            self._store.forget(before=now - self._settings.keep_ids_seconds)
            self._forget_at = now + FORGET_SECONDS

    def _snapshot(self) -> Snapshot:
        progress: dict[str, Any] = dataclasses.asdict(self.retraining.progress)
        stale = self._clock() - STALE_SECONDS
        return Snapshot(
            counters=dict(self._store.counters),
            pending_rows=self._store.num_pending_rows,
            log_backlog=self._subscriber.backlog(),
            last_record_time=self._last_record_time,
            serving_version=self.windows.serving_version,
            windows=tuple(kpis for version, kpis in sorted(self._kpis.items()) if self._measured_at[version] > stale),
            decision=self._decision or None,
            retraining={**progress, "restraint": dataclasses.asdict(self.retraining.memory)},
        )


_TIMELINE_COUNTERS = (("duplicate", "s"), ("set_aside", ""), ("archived", ""), ("late_outcome", "s"))
