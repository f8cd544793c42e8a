"""The monitor's loop: what happens in which order, and nothing else.

One turn: pull, store, acknowledge; mature what is due; archive; measure; judge; move the request under way on. Each
part is a module of its own. Everything runs in one thread; only the HTTP pages are served beside it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from components.contracts.records import CLICK, CONVERSION, OutcomeBatch, PredictionBatch
from components.logs.event_log import Delivery, Subscriber
from components.runtime.errors import ContractError, TemporaryError
from monitoring.acting.acting import Acting
from monitoring.acting.ledger import Ledger
from monitoring.acting.retraining import Guard
from monitoring.acting.trigger import Trigger
from monitoring.deciding.policies import policy_names
from monitoring.drift.watch import DriftWatch
from monitoring.journal import Journal
from monitoring.judging import KeptJudge
from monitoring.measuring import Measuring
from monitoring.memory.archive import Archive, no_checkpoint
from monitoring.memory.intake import Watermark, read_record
from monitoring.memory.join import due_before, mature_request, settle_request
from monitoring.memory.kept_watch import KeptWatch
from monitoring.memory.references import StoredReferences
from monitoring.memory.rows import LateOutcome
from monitoring.memory.store import Store
from monitoring.settings import MonitorSettings
from monitoring.showing.exposition import Exposition
from monitoring.showing.snapshot import Snapshot
from monitoring.showing.surroundings import Lookout

logger = logging.getLogger(__name__)

MATURE_REQUESTS = 2000
"""Most requests matured in one transaction."""
FORGET_SECONDS = 600.0
ORPHAN_SECONDS = 3600.0
"""How long, beyond its window, an outcome waits for a request that nobody knows; then it is archived as late."""
_LAST_MOMENT = 2e-6
"""Seconds; more than times are rounded by where judgement counts in microseconds."""
TICK_PULLS = 20
"""Most pulls in one turn: under a flood the loop still measures, and shows that it lives."""


class Monitor:
    """One monitor over one log."""

    def __init__(
        self,
        settings: MonitorSettings,
        *,
        subscriber: Subscriber,
        store: Store,
        trigger: Trigger | None,
        ledger: Ledger | None = None,
        guard: Guard = lambda: None,
        exposition: Exposition | None = None,
        clock: Callable[[], float] = time.time,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Takes up where a predecessor stopped: finishes its archive file, rebuilds its windows, finds its run.

        Args:
            settings: See `MonitorSettings`.
            subscriber: The record log.
            store: The memory.
            trigger: Runs the pipeline; None = only notify.
            ledger: What all replicas must see; None = this is the only replica.
            guard: Called before anything is started; raises where this replica may not act.
            exposition: Shown over HTTP.
            clock: Seconds since the epoch.
            checkpoint: Called with the name of each step that a crash may follow; tests crash there.
        """
        self._settings, self._subscriber, self._store = settings, subscriber, store
        self._clock, self._checkpoint = clock, checkpoint
        self._exposition = exposition or Exposition()
        self.journal = Journal(settings.state, clock)
        self._archive = _open_archive(settings, store, checkpoint)
        self.acting = Acting(
            settings,
            store=store,
            ledger=ledger,
            archive=self._archive,
            trigger=trigger,
            journal=self.journal,
            clock=clock,
            guard=guard,
            checkpoint=checkpoint,
        )
        self.retraining = self.acting.retraining
        self._measuring = Measuring(settings, store, clock)
        self.windows = self._measuring.windows
        known = store.read_document("versions") or {"seen": []}
        self._versions_seen = set(known["seen"])
        self.windows.canaries = set(known.get("canaries", []))  # absent in a state folder older than canaries
        self._judging = KeptJudge(settings, store, self.journal, checkpoint)
        watch = DriftWatch(StoredReferences(settings.store), settings)
        self._drift = KeptWatch(watch, store, self.journal, clock)
        self._watermark = Watermark()
        self._lookout = Lookout(settings.store, store, self._archive, has_uploader=settings.upload_wait_seconds > 0)
        self._last_record_time: float | None = None
        self._decision = ""
        self._decided_at: float | None = None
        self._decisions: tuple[dict[str, Any], ...] = ()
        self._forget_at = clock() + FORGET_SECONDS
        self._rebuild_windows()
        self._tell_started()

    def tick(self) -> None:
        """One turn of the loop.

        Raises:
            TemporaryError: the log is busy, or the disk is full; the next turn repeats what is missing.
        """
        self._drain(TICK_PULLS)
        self._close_drift()
        touched = self._mature()
        self._settle()
        not_archived = self._roll()
        if touched:
            self._measure(touched)
        self._measuring.estimate_open(self._watermark.time)
        self._judge()
        self.acting.step(self._clock(), log_problem=self._subscriber.problem())
        self._forget()
        self._exposition.beat(self._snapshot())
        if not_archived is not None:
            raise not_archived

    def stop(self) -> None:
        """Takes in what is in the log now, archives every matured row; the others stay for the next start."""
        # What comes in meanwhile is for the next start: under a flood the stop would never end.
        backlog = self._subscriber.backlog()
        self._drain(TICK_PULLS if backlog is None else 1 + backlog // self._settings.pull_messages)
        self._close_drift()
        self._drift.keep({})
        touched = self._mature()
        self._settle()
        if touched:
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
        requests = list(self._store.newest_rows())
        for request in requests:
            self._measuring.watch(request)
        self._measuring.watch_settled(self._store.newest_settled())
        self._judging.restore(requests)
        if newest := self._store.newest_waiting():
            self.windows.note_prediction(newest[1], min(newest[0], self._clock()))
        if (newest_at := self._store.newest_prediction_at()) is not None:
            self._last_record_time = min(newest_at, self._clock())

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
                break
        self._watermark.move(self._subscriber.read_up_to())

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
        joined = (CLICK, CONVERSION) if self._settings.conversion_window_seconds else (CLICK,)
        self._drift.observe(self._store.add(predictions, outcomes, unusable, now=now, joined=joined))
        # At once: what follows may fail for now, and what is stored is not delivered again.
        self._note_predictions([batch for batch, _ in predictions], now)
        self._checkpoint("intake.stored")
        bad_tokens = {delivery.token for delivery, _ in bad}
        self._subscriber.acknowledge([d.token for d in deliveries if d.token not in bad_tokens])
        self._checkpoint("intake.acknowledged")
        for delivery, reason in bad:
            self._subscriber.dead_letter(delivery.token, reason)
        if bad:
            self._checkpoint("intake.dead_letter")
            first, reason = bad[0]
            text = f"{len(bad)} messages, the first {first.message_id}: {reason}"
            self.journal.tell("dead_letter", text, messages=len(bad), message_id=first.message_id)

    def _note_predictions(self, batches: list[PredictionBatch], now: float) -> None:
        for batch in batches:
            # A client whose clock is ahead must not name the serving version until we get there.
            predicted_at = min(batch.time, now)
            self._judging.judge.note_prediction(batch.time, batch.model_version, is_canary=batch.canary)
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
            late: list[LateOutcome] = []
            windows = {"click_window": window_seconds, "conversion_window": self._settings.conversion_window_seconds}
            requests = [mature_request(request, counts, late, **windows) for request in waiting]
            awaits = bool(self._settings.conversion_window_seconds)
            self._store.mature(requests, counts, now=self._clock(), late=late, awaits_conversions=awaits)
            self._checkpoint("join.matured")
            for request in requests:
                self._measuring.watch(request)
                self._judging.judge.observe(request)
                touched.add(request.model_version)
            # Others of the last one's time may be in the next bite.
            self._judging.decide(before if len(requests) < MATURE_REQUESTS else requests[-1].time - _LAST_MOMENT)
        self._judging.decide(before)
        return touched

    def _settle(self) -> None:
        """Makes conversions final whose own window has closed."""
        if self._watermark.time is None:
            return
        # Where they are awaited no longer, what had waited is settled by what came until then.
        window = self._settings.conversion_window_seconds or self._settings.attribution_window_seconds
        before = due_before(self._watermark.time, window_seconds=window)
        while unsettled := self._store.unsettled(before, MATURE_REQUESTS):
            late: list[LateOutcome] = []
            settled = [settle_request(each, events, late, conversion_window=window) for each, events in unsettled]
            self._store.settle(settled, now=self._clock(), late=late, keep=self._settings.window_rows)
            self._checkpoint("join.settled")
            self._measuring.watch_settled(settled)

    # -- numbers and judgement

    def _measure(self, versions: set[int]) -> None:
        for kpis in self._measuring.measure(versions):
            counters = self._store.counters
            self.journal.measure(
                {
                    **dataclasses.asdict(kpis),
                    "backlog": self._subscriber.backlog(),
                    "matured_total": int(counters.get("matured", 0)),
                    "pending": self._store.num_pending_rows,
                    **{name + ending: int(counters.get(name, 0)) for name, ending in _TIMELINE_COUNTERS},
                }
            )

    def _judge(self) -> None:
        """Acts on the newest judgement of this turn."""
        if (judgement := self._judging.take()) is None:
            return
        decision = self.acting.consider(
            judgement.decision, judgement.decisions, now=self._clock(), data_until=judgement.time
        )
        self._decision, self._decided_at = f"{decision.action.value}: {decision.reason}", judgement.time
        self._decisions = tuple(each.document() for each in judgement.decisions)

    def _close_drift(self) -> None:
        """Tells the judge of the buckets of features that ended, and keeps what is open."""
        read_up_to = self._watermark.time
        # Clients publish after the event: at the mark itself the last of a bucket's predictions may be on their way.
        closed = None if read_up_to is None else read_up_to - self._settings.drift_grace_seconds
        if reports := self._drift.close(closed):
            for report in reports:
                self._judging.judge.note_drift(report.evidence())
            known = {"judge": self._judging.memory()}
            self._drift.keep(known, reports)
        self._drift.keep_if_due()

    def _roll(self) -> TemporaryError | None:
        """Writes what is due to the archive; why it could not. A full disk is no reason not to judge."""
        try:
            self._tell_archived(self._archive.roll(self._clock()))
        except TemporaryError as error:
            return error
        return None

    def _tell_archived(self, files: Sequence[tuple[str, int]]) -> None:
        for name, rows in files:
            self.journal.tell("archived", f"{rows} rows in {name}", rows=rows, files=[name])

    def _forget(self) -> None:
        now = self._clock()
        if now >= self._forget_at:
            self._archive.waiting_for_upload()
            windows = (self._settings.attribution_window_seconds, self._settings.conversion_window_seconds)
            self._store.forget(
                before=now - self._settings.keep_ids_seconds, orphans_before=now - max(windows) - ORPHAN_SECONDS
            )
            self._checkpoint("store.forgotten")
            self._forget_at = now + FORGET_SECONDS

    def _snapshot(self) -> Snapshot:
        progress: dict[str, Any] = dataclasses.asdict(self.retraining.progress)
        around = self._lookout.look(self._clock())  # before the counters, which it adds to
        return Snapshot(
            time=self._clock(),
            counters=dict(self._store.counters),
            pending_rows=self._store.num_pending_rows,
            log_backlog=self._subscriber.backlog(),
            log_read_up_to=self._watermark.time,
            log_problem=self._subscriber.problem(),
            last_record_time=self._last_record_time,
            serving_version=self.windows.serving_version,
            windows=self._measuring.shown,
            open_labels=self._measuring.open_labels,
            drift=self._drift.shown(self.windows.serving_version),
            decided_at=self._decided_at,
            decision=self._decision or None,
            decisions=self._decisions,
            threshold=self._settings.auc_threshold if "threshold" in policy_names(self._settings.policies) else None,
            retraining={
                **progress,
                "restraint": dataclasses.asdict(self.retraining.memory),
                "told": self.acting.shown(self._clock()),
            },
            around=around,
        )


_TIMELINE_COUNTERS = (("duplicate", "s"), ("dead_letter", "s"), ("archived", ""), ("late_outcome", "s"))


def _open_archive(settings: MonitorSettings, store: Store, checkpoint: Callable[[str], None]) -> Archive:
    return Archive(
        settings.archive,
        store,
        roll_rows=settings.archive_roll_rows,
        roll_seconds=settings.archive_roll_seconds,
        keep_rows=settings.window_rows,
        windows={CLICK: settings.attribution_window_seconds, CONVERSION: settings.conversion_window_seconds},
        checkpoint=checkpoint,
    )
