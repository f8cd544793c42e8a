"""Main loop of the monitor: the order of steps.

One iteration pulls, stores and acknowledges messages, and matures due rows. After that, the
iteration archives, measures, decides and advances the retraining. `monitoring.metrics` computes the
numbers, `monitoring.policies.evaluation` decides, `monitoring.retraining` acts on decisions, and
`monitoring.state.store` stores records. Everything runs in one thread except the HTTP server. The
evaluator's state is stored in the database, and each decision is written once to the journal.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from evergreen.config.features import Features
from evergreen.config.monitor import DecisionSettings, EvaluationSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.raw_rows import CLOCK_AHEAD_SECONDS
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import CLICK, CONVERSION, MAX_ID_CHARACTERS, Predictions
from evergreen.contracts.serving import ColumnMap
from evergreen.events.event_log import Delivery, Subscriber, is_short
from evergreen.runtime.durable import no_checkpoint
from evergreen.runtime.errors import ContractError, TemporaryError
from monitoring.drift.watch import DriftWatch
from monitoring.journal import Journal
from monitoring.metrics.open_labels import ClickDelays, OpenEstimate, estimate_open
from monitoring.metrics.window import Kpis, VersionWindows, measure_version
from monitoring.policies.evaluation import Evaluator, serving_ahead
from monitoring.policies.policies import make_policies
from monitoring.policies.policy import Decision, DecisionPoint
from monitoring.released_models import ReleasedModels
from monitoring.retraining.actions import DecisionHandler
from monitoring.retraining.new_versions import NewVersions
from monitoring.retraining.triggers import Trigger
from monitoring.rows import MaturedRequests, Waiting
from monitoring.settings import MonitorSettings
from monitoring.state.admission import AdmittedVersions
from monitoring.state.archive import Archive, set_apart_text
from monitoring.state.database import CorruptBlock
from monitoring.state.drift_state import StoredDriftWatch
from monitoring.state.join import (
    MAX_FUTURE_SECONDS,
    IntakeRules,
    UnscoredRows,
    attribute,
    read_records,
)
from monitoring.state.redelivery import reuse_reason, reused_key
from monitoring.state.store import StateStore
from monitoring.web.exposition import Exposition, Snapshot
from monitoring.web.store_status import StoreWatcher


class _StoredEvaluator:
    """An evaluator that continues where a killed predecessor stopped."""

    def __init__(
        self,
        settings: DecisionSettings,
        *,
        registry: Path,
        store: StateStore,
        journal: Journal,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Read the predecessor's state. The caller must call `restore` next.

        See `monitoring.monitor.Monitor` for the arguments.
        """
        self._store, self._journal, self._checkpoint = store, journal, checkpoint
        self._serving_ahead = serving_ahead(settings.evaluation)
        saved = store.read_document("evaluator")
        self._cursor: int | None = None if saved is None else saved["cursor"]
        baselines = ReleasedModels(registry).baseline
        self.evaluator = Evaluator(
            settings.evaluation,
            make_policies(settings.policies, settings.baking),
            baseline=baselines,
            state=saved,
        )
        self._newest: DecisionPoint | None = None
        self._unwritten: list[DecisionPoint] = []
        """Decision points that could not be written to the journal yet. A decision must be written
        before a run starts from it."""

    def restore(self, requests: MaturedRequests | None) -> None:
        """Restore the stored matured requests and the predictions after the last decision point.

        The newest stored requests may have matured after the evaluator's state was last written.
        Requests that matured after that are treated as new. Requests that matured too late for
        their decision point therefore stay excluded.
        """
        if requests is not None:
            num_new = 0 if self._cursor is None else self._store.num_matured_after(self._cursor)
            known = len(requests) - num_new
            self.evaluator.restore(requests.between(0, known))
            self.evaluator.observe(requests.between(known, len(requests)))
        decided = self.evaluator.decided_until
        seen = None if decided is None else decided + self._serving_ahead
        times, versions, canary = self._store.predictions_after(seen)
        self.evaluator.record_predictions(times, versions, canary=canary)

    def decide(self, matured_until: float) -> None:
        """Make the decisions that are due at this event time, and store them.

        A decision is stored before any action follows from it.

        Raises:
            TemporaryError: The decisions cannot be stored. The next call stores the decisions
                first.
        """
        before = self.evaluator.decided_until
        self._unwritten += self.evaluator.decide_up_to(matured_until)
        if before is not None and (self.evaluator.decided_until or 0.0) < before:
            self._journal.accept_earlier_decisions()
        self.write_decisions()
        num_more = self.evaluator.num_passed_over - self._store.counters.get("passed_over", 0)
        if self.evaluator.decided_until != before or num_more:
            self._store.write_documents(
                {"evaluator": self.state_dict()}, {"passed_over": num_more} if num_more else {}
            )
            self._checkpoint("evaluator.stored")

    def write_decisions(self) -> None:
        """Append the decisions that are not in the journal yet.

        Raises:
            TemporaryError: The decisions cannot be written. The evaluator's state includes the
                unwritten decisions, so it must not be stored.
        """
        if points := self._unwritten:
            self._journal.append_decisions({point.time: point.line() for point in points})
            self._checkpoint("evaluator.decided")
            self._newest, self._unwritten = points[-1], []

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluator's state and `cursor`, the position of its last matured request."""
        return {**self.evaluator.state_dict(), "cursor": self._store.matured_cursor()}

    def pop_newest(self) -> DecisionPoint | None:
        """Return the newest decision point, or None if it was already returned.

        If one iteration has several decision points, only the newest one can start a run. A drift
        that lasts is detected again at later decision points.
        """
        newest, self._newest = self._newest, None
        return newest


_STALE_SECONDS = 900.0
"""If a version has no new row for this number of seconds, its KPIs are hidden, because its window
is out of date."""


class _Measurements:
    """The monitor's KPIs of matured rows and its estimates for open rows."""

    def __init__(
        self,
        evaluation: EvaluationSettings,
        *,
        conversion_window_seconds: float,
        store: StateStore,
        clock: Callable[[], float],
    ) -> None:
        """Start without rows.

        There is no conversion rate if `conversion_window_seconds` is 0.
        """
        self._store, self._clock, self._evaluation = store, clock, evaluation
        self._conversion_window_seconds = conversion_window_seconds
        if conversion_window_seconds:
            store.prepare_conversion_rates()
        self.windows = VersionWindows(evaluation.window_rows)
        self._measured: dict[int, tuple[float, Kpis]] = {}
        """Time and result of each version's last measurement."""
        # Pool the delays of all versions. Delays depend on the users, and a new version has no
        # delays for a whole attribution window.
        self._delays = ClickDelays()
        self.open_labels: tuple[OpenEstimate, ...] = ()
        """The newest estimate of each version with open rows."""
        self._next_estimate = 0.0

    def observe(self, requests: MaturedRequests) -> None:
        """Add requests whose click labels are final."""
        self.windows.update(requests)
        self._delays.update(requests.click_delays)

    def measure(self, versions: Iterable[int], *, read_up_to: float | None) -> list[Kpis]:
        """Compute the KPIs of those `versions` that have rows.

        `read_up_to` is the watermark of the log. Without a watermark, the KPIs have no conversion
        rate.
        """
        measured, conversion_rates = [], dict[int, float]()
        if read_up_to is not None and (seconds := self._conversion_window_seconds):
            conversion_rates = self._store.conversion_rates(
                read_up_to - seconds, window_seconds=seconds
            )
        for version in sorted(set(versions) & set(self.windows.versions)):
            kpis = measure_version(version, self.windows)
            measured.append(replace(kpis, conversion_rate=conversion_rates.get(version)))
            self._measured[version] = self._clock(), measured[-1]
        # Drop versions that are no longer in the windows, because a monitor runs for months.
        self._measured = {
            version: each
            for version, each in self._measured.items()
            if version in self.windows.versions
        }
        return measured

    def estimate_open(self, read_up_to: float | None) -> None:
        """Estimate the labels of open rows, at most every `decide_seconds`.

        `read_up_to` is the watermark of the log. None skips the estimate.
        """
        now = self._clock()
        # Compare with an upper bound too, because the clock may have been set back.
        if read_up_to is None or 0 < self._next_estimate - now <= self._evaluation.decide_seconds:
            return
        self._next_estimate = now + self._evaluation.decide_seconds
        window = self._evaluation.attribution_window_seconds
        waiting = self._store.newest_waiting()
        if waiting is None:
            self.open_labels = ()
            return
        open_rows = attribute(
            waiting, self._store.clicks_on(waiting.numbers), window_seconds=window
        ).requests
        self.open_labels = tuple(
            estimate_open(
                rows.scores,
                np.repeat(read_up_to - rows.times, rows.sizes),
                rows.labels == 1,
                version=version,
                delays=self._delays,
                window_seconds=window,
                now=read_up_to,
            )
            for version, rows in sorted(open_rows.by_version(), key=lambda each: each[0])
        )

    @property
    def shown(self) -> tuple[Kpis, ...]:
        """KPIs of the versions with a recent row."""
        now = self._clock()
        # The upper bound excludes measurements made while the clock was ahead.
        lately = now - _STALE_SECONDS, now + CLOCK_AHEAD_SECONDS
        return tuple(
            kpis for _, (at, kpis) in sorted(self._measured.items()) if lately[0] < at <= lately[1]
        )


logger = logging.getLogger(__name__)

_MATURE_REQUESTS = 10_000
"""Maximum number of requests matured in one transaction."""
_FILE_PARTS = 8
"""Minimum number of parts in a full archive file. The rows of a part are always written to the same
file."""
FORGET_SECONDS = 600.0
ORPHAN_SECONDS = 3600.0
"""Seconds for which an outcome with an unknown request waits after the end of its window. After
this time, the outcome is archived as a late outcome."""
_LAST_MOMENT = 2e-6
"""Tolerance in seconds, larger than the rounding error of times in microseconds."""
_MAX_VERSIONS_SEEN = 1000
"""Maximum number of versions to remember. The first prediction of a remembered version is not
reported again. The versions with the highest numbers are remembered."""
_MAX_REASON_CHARACTERS = 400
"""Maximum length of a dead letter's reason. The message of the dead letter is stored beside its
reason."""
TICK_PULLS = 20
"""Maximum number of full pulls in one iteration, so that a flood of records does not prevent
measuring."""
_TIMELINE_COUNTERS = (
    ("duplicate", "s"),
    ("dead_letter", "s"),
    ("archived", ""),
    ("late_outcome", "s"),
)


class Monitor:
    """Monitor of one event log.

    Args:
        settings: Settings of the process and its rules.
        subscriber: Reader of the log.
        store: The monitor's state.
        trigger: Starts runs. If None, the monitor only notifies people.
        recommender: Rows of another recommender become dead letters.
        exposition: State for the HTTP pages.
        clock: Returns seconds since the epoch.
        checkpoint: Called with the name of each step that a crash may follow. Tests simulate a
            crash in this function.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        *,
        subscriber: Subscriber,
        store: StateStore,
        trigger: Trigger | None,
        recommender: Recommender,
        exposition: Exposition | None = None,
        clock: Callable[[], float] = time.time,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Continue where a predecessor stopped: finish its archive file, windows and run."""
        self._settings, self._subscriber = settings, subscriber
        self._store, self._recommender = store, recommender
        store.user_position = recommender.user_position
        _expect_columns_of_before(store, recommender.features)
        self._records, self._evaluation_settings = settings.records, settings.decisions.evaluation
        self._clock, self._checkpoint = clock, checkpoint
        self._exposition = exposition or Exposition()
        self.journal = Journal(settings.state, clock)
        self._rules = self._make_rules()
        self._archive = self._open_archive()
        self.actions = self._make_decision_handler(trigger)
        self._acts = settings.partition == 0
        """Whether this monitor decides and starts runs. Only one monitor of a partitioned log
        decides, because the bounds on false alarms hold for a single evaluator."""
        if not self._acts:
            self.journal.listener = lambda event: None
        self._measurements = self._make_measurements()
        self.windows = self._measurements.windows
        versions = store.read_document("versions") or {"seen": []}
        self._versions_seen: set[int] = set(versions["seen"])
        self._evaluation = _StoredEvaluator(
            settings.decisions,
            registry=settings.store,
            store=store,
            journal=self.journal,
            checkpoint=checkpoint,
        )
        self._drift = self._make_drift_watch()
        self._read_up_to: float | None = None
        """Watermark: every record published before this time was read. None until the log reports
        it. After a stop or under load, clicks may still wait in the log. A clock alone would close
        the windows of these clicks too early."""
        self._store_watcher = self._make_store_watcher()
        self._last_record_time: float | None = None
        self._newest: tuple[float, int] | None = None
        """Time and model version of the newest non-canary prediction."""
        last = self.journal.last_decision
        self._decided_at = float(last["time"]) if last else None
        self._decisions = tuple(map(Decision.of, last["decisions"] if last else ()))
        self._decision_text = f"{last['action']}: {last['reason']}" if last else None
        self._forgot_at = clock()
        self._unmeasured: set[int] = set()
        """Versions to measure again, because some of their rows matured since the last
        measurement."""
        self._rebuild_windows()
        self._emit_started()

    def _make_store_watcher(self) -> StoreWatcher:
        settings = self._settings
        return StoreWatcher(
            settings.store,
            self._store,
            self._archive,
            has_uploader=settings.actions.upload_wait_seconds > 0,
            folders={"state": settings.state, "archive": settings.archive},
        )

    def _make_rules(self) -> IntakeRules:
        released = ReleasedModels(self._settings.store)
        known = self._store.read_document("versions")
        return IntakeRules(
            form=RecordFormat(self._recommender.features),
            recommender=self._recommender.name,
            max_age_seconds=self._records.max_age_seconds,
            versions=AdmittedVersions(released.versions, self._clock, state=known),
        )

    def _open_archive(self) -> Archive:
        records, evaluation = self._records, self._evaluation_settings
        return Archive(
            self._settings.archive,
            self._store,
            features=self._recommender.features,
            roll_rows=records.archive_roll_rows,
            roll_seconds=records.archive_roll_seconds,
            keep_rows=evaluation.window_rows,
            windows={
                CLICK: evaluation.attribution_window_seconds,
                CONVERSION: records.conversion_window_seconds,
            },
            on_set_apart=self._report_set_apart,
            checkpoint=self._checkpoint,
        )

    def _report_set_apart(self, name: str, number: int, reason: str) -> None:
        self.journal.emit("set_apart", set_apart_text(name, number, reason), file=name, rows=number)

    def _make_measurements(self) -> _Measurements:
        return _Measurements(
            self._evaluation_settings,
            conversion_window_seconds=self._records.conversion_window_seconds,
            store=self._store,
            clock=self._clock,
        )

    def _make_drift_watch(self) -> StoredDriftWatch:
        released = ReleasedModels(self._settings.store)
        features = self._recommender.features
        watch = DriftWatch(released.reference, self._settings.decisions.drift, features=features)
        return StoredDriftWatch(watch, self._store, journal=self.journal, clock=self._clock)

    def _make_decision_handler(self, trigger: Trigger | None) -> DecisionHandler:
        return DecisionHandler(
            self._settings.actions,
            self._settings.decisions.rate_limit,
            recipe=self._settings.decisions.recipe,
            notify_only=self._settings.decisions.policies.notify_only,
            recommender=self._recommender.name,
            new_versions=NewVersions(
                self._settings.decisions.baking,
                store=self._settings.store,
                documents=self._store,
                journal=self.journal,
                rows_of=self._store.num_rows_of,
            ),
            documents=self._store,
            archive=self._archive,
            trigger=trigger,
            journal=self.journal,
            clock=self._clock,
            checkpoint=self._checkpoint,
        )

    @property
    def serving_version(self) -> int | None:
        """Version of the newest non-canary prediction, or None before the first prediction.

        Matured rows do not show the serving version, because rows of an old version mature for a
        whole attribution window after a release. The highest version number would also be wrong,
        because a rollback serves a lower version.
        """
        return self._newest[1] if self._newest else None

    def tick(self) -> None:
        """Run one iteration of the loop.

        Raises:
            TemporaryError: The log is busy, or the disk is full. The next iteration repeats the
                steps that failed.
        """
        self._write_what_waits()
        self._forget_times_ahead(self._clock())
        self._drain(TICK_PULLS * self._records.pull_messages)
        self._close_drift()
        self._mature()
        archive_error = self._roll_archive()
        self._measure()
        self._measurements.estimate_open(self._read_up_to)
        if self._acts:
            self._act_on_decision()
            self.actions.step(self._clock(), log_problem=self._subscriber.problem())
        self._forget_old()
        self._exposition.show(self._snapshot())
        if archive_error is not None:
            raise archive_error
        if self.journal.problem is not None:
            raise TemporaryError(self.journal.problem)

    def stop(self) -> None:
        """Read the backlog of the log and archive every matured row.

        Rows with open labels stay in the state until the next start.
        """
        self._write_what_waits()
        # Leave new messages for the next start, because the stop would never end under a flood of
        # records.
        backlog = self._subscriber.backlog()
        self._drain(TICK_PULLS * self._records.pull_messages if backlog is None else backlog)
        self._close_drift()
        self._drift.save({})
        self._mature()
        self._measure()
        self._emit_archived(self._archive.flush())
        self._exposition.show(self._snapshot())
        self.journal.emit(
            "stopped",
            f"{self._store.num_pending_rows} rows stay pending",
            pending=self._store.num_pending_rows,
            counters=dict(self._store.counters),
        )

    def _rebuild_windows(self) -> None:
        requests = self._store.newest_rows()
        if requests is not None:
            self._measurements.observe(requests)
        self._evaluation.restore(requests)
        if newest := self._store.newest_prediction():
            self._last_record_time = min(newest[0], self._clock())
            self._newest = (self._last_record_time, newest[1])

    def _emit_started(self) -> None:
        store = self._store
        self.journal.emit(
            "started",
            f"{store.num_pending_rows} rows pending, {store.num_unarchived_rows} matured rows "
            "to archive",
            pending=store.num_pending_rows,
            unarchived=store.num_unarchived_rows,
            phase=self.actions.retraining.progress.phase,
        )

    def _write_what_waits(self) -> None:
        self.journal.write_waiting()
        self._evaluation.write_decisions()

    # -- receive and store records

    def _drain(self, num_messages: float) -> None:
        """Store and acknowledge about `num_messages` messages of the log, or fewer."""
        while True:
            pulled_at = self._clock()
            deliveries = self._subscriber.pull(self._records.pull_messages)
            if deliveries:
                self._checkpoint("intake.pulled")
                self._store_messages(deliveries, pulled_at)
                self._exposition.beat()
            num_messages -= len(deliveries)
            if num_messages <= 0 or is_short(deliveries, self._records.pull_messages):
                break
        # The watermark also moves back when a clock that was ahead is corrected. With the old
        # watermark, every later window would close too early.
        if (read_up_to := self._subscriber.read_up_to()) is not None:
            self._read_up_to = read_up_to

    def _store_messages(self, deliveries: Sequence[Delivery], now: float) -> None:
        """Store messages, then acknowledge them. Unusable messages become dead letters."""
        while deliveries:
            deliveries = self._store_part(deliveries, now)

    def _store_part(self, deliveries: Sequence[Delivery], now: float) -> Sequence[Delivery]:
        """Process the first messages that fit into memory, and return the remaining messages."""
        received = deliveries
        intake = read_records([delivery.payload for delivery in deliveries], self._rules, now=now)
        bad = [
            (deliveries[index], str(error)[:_MAX_REASON_CHARACTERS]) for index, error in intake.bad
        ]
        left = [deliveries[index] for index in intake.left]
        unread = set(intake.left)
        deliveries = [each for index, each in enumerate(deliveries) if index not in unread]
        unscored = [error for _, error in intake.bad if isinstance(error, UnscoredRows)]
        unusable = [delivery.message_id for delivery, _ in bad]
        predictions, outcomes = intake.predictions, intake.outcomes
        try:
            stored = self._store.add(predictions, outcomes, unusable, now=now)
        except ContractError as error:
            if len(deliveries) == 1:
                self._store.add(None, [], [deliveries[0].message_id], now=now)
                self._dead_letter([(deliveries[0], str(error)[:_MAX_REASON_CHARACTERS])])
                return left
            # Store each half separately, so that one bad message does not block the other messages.
            for half in (deliveries[: len(deliveries) // 2], deliveries[len(deliveries) // 2 :]):
                self._store_messages(half, now)
            return left
        if predictions is not None and len(stored.reused):
            ids, indexes = (
                predictions.ids[stored.reused].tolist(),
                intake.indexes[stored.reused].tolist(),
            )
            bad += self._count_reused(
                [(received[index], each) for index, each in zip(indexes, ids)], now
            )
        if stored.added is not None:
            self._drift.observe(stored.added)
        if unscored:
            self.actions.new_versions.count_unusable(unscored, now)
        # Observe the predictions immediately, because the next steps may fail and stored messages
        # are not delivered again.
        if predictions is not None:
            self._record_predictions(predictions, now)
        self._checkpoint("intake.stored")
        bad_tokens = {delivery.token for delivery, _ in bad}
        self._subscriber.acknowledge([d.token for d in deliveries if d.token not in bad_tokens])
        self._checkpoint("intake.acknowledged")
        if bad:
            self._dead_letter(bad)
        return left

    def _count_reused(
        self, reused: Sequence[tuple[Delivery, str]], now: float
    ) -> list[tuple[Delivery, str]]:
        """Count predictions that reuse another request's id, and return the dead-letter reasons."""
        self._store.count_reused(
            [reused_key(each.message_id, each.payload) for each, _ in reused], now=now
        )
        return [
            (delivery, reuse_reason(request_id)[:_MAX_REASON_CHARACTERS])
            for delivery, request_id in reused
        ]

    def _dead_letter(self, bad: Sequence[tuple[Delivery, str]]) -> None:
        self._subscriber.dead_letter([(delivery.token, reason) for delivery, reason in bad])
        self._checkpoint("intake.dead_letter")
        first, reason = bad[0]
        name = first.message_id[:MAX_ID_CHARACTERS]
        text = f"{len(bad)} messages, the first {name}: {reason}"
        self.journal.emit("dead_letter", text, messages=len(bad), message_id=name)

    def _record_predictions(self, predictions: Predictions, now: float) -> None:
        times, versions, canary = predictions.times, predictions.versions, predictions.canary
        self._rules.versions.seen(set(versions.tolist()))
        self._evaluation.evaluator.record_predictions(times, versions, canary=canary)
        # Limit the times to `now`, so that a client whose clock is ahead does not determine the
        # serving version for long.
        times = np.minimum(times, now)
        self._last_record_time = max(float(times.max()), self._last_record_time or 0.0)
        if not canary.all():
            newest = times[~canary].max()
            version = int(versions[~canary & (times == newest)].max())
            self._newest = max((float(newest), version), self._newest or (0.0, 0))
        for version in sorted(set(versions.tolist()) - self._versions_seen):
            part = "takes a share of the traffic" if canary[versions == version][0] else "serves"
            self.journal.emit("version_seen", f"model version {version} {part}", version=version)
            self._versions_seen.add(version)
            self._store_versions()

    def _store_versions(self) -> None:
        seen = sorted(self._versions_seen)[-_MAX_VERSIONS_SEEN:]
        self._store.write_documents(
            {"versions": {"seen": seen, **self._rules.versions.state_dict()}}
        )

    # -- join labels

    def _mature(self) -> None:
        """Make the labels of requests final when the attribution windows have closed."""
        if self._read_up_to is None:
            return
        window_seconds = self._evaluation_settings.attribution_window_seconds
        before = self._read_up_to - window_seconds
        part_rows = max(self._records.archive_roll_rows // _FILE_PARTS, 1)
        waiting = self._valid_waiting(before)
        while waiting is not None:
            clicks = self._store.clicks_on(waiting.numbers)
            requests, late, unmatched = attribute(waiting, clicks, window_seconds=window_seconds)
            counts = {
                "late_outcome": float(len(late) - len(unmatched)),
                "unmatched_outcome": float(len(unmatched)),
            }
            if unmatched:
                logger.warning(
                    "%d clicks refer to rows that do not exist, such as row %d of request %r. "
                    "These clicks are archived, but change no label",
                    len(unmatched),
                    unmatched[0].row,
                    unmatched[0].request_id,
                )
            self._store.mature(requests, counts, now=self._clock(), late=late, part_rows=part_rows)
            self._checkpoint("join.matured")
            self._measurements.observe(requests)
            self._evaluation.evaluator.observe(requests)
            self._unmeasured.update(requests.versions.tolist())
            self._exposition.beat()
            # The last request of this batch and the first request of the next batch can have the
            # same time.
            last = float(requests.times[-1]) - _LAST_MOMENT
            waiting = self._valid_waiting(before)
            self._evaluation.decide(before if waiting is None else last)
        self._evaluation.decide(before)

    def _valid_waiting(self, before: float) -> Waiting | None:
        return self._without_corrupt(lambda: self._store.waiting(before, _MATURE_REQUESTS))

    def _without_corrupt(self, read: Callable[[], Waiting | None]) -> Waiting | None:
        """Call `read` until no block is corrupt, and return its result.

        The rows of a corrupt block are lost.
        """
        while True:
            try:
                return read()
            except CorruptBlock as error:
                rows = self._store.give_up(error.number)
                text = f"{rows} rows lose their labels and cannot be archived: {error}"
                self.journal.emit("set_apart", text, rows=rows)

    # -- measure and decide

    def _measure(self) -> None:
        versions, self._unmeasured = self._unmeasured, set()
        for kpis in (
            self._measurements.measure(versions, read_up_to=self._read_up_to) if versions else ()
        ):
            counters = self._store.counters
            self.journal.append_point(
                {
                    **dataclasses.asdict(kpis),
                    "backlog": self._subscriber.backlog(),
                    "matured_total": int(counters.get("matured", 0)),
                    "pending": self._store.num_pending_rows,
                    **{
                        name + ending: int(counters.get(name, 0))
                        for name, ending in _TIMELINE_COUNTERS
                    },
                }
            )

    def _act_on_decision(self) -> None:
        if (point := self._evaluation.pop_newest()) is None:
            return
        decision = self.actions.consider(
            point.decision, point.decisions, now=self._clock(), data_until=point.time
        )
        self._decided_at, self._decisions = point.time, point.decisions
        self._decision_text = f"{decision.action.value}: {decision.reason}"

    def _close_drift(self) -> None:
        """Pass the reports of closed drift buckets to the evaluator, and store the open buckets."""
        read_up_to = self._read_up_to
        # Clients publish after the event, so the last predictions of a bucket may arrive after the
        # watermark passed its end.
        closed = (
            None
            if read_up_to is None
            else read_up_to - self._evaluation_settings.drift_grace_seconds
        )
        if reports := self._drift.close(closed):
            for report in reports:
                self._evaluation.evaluator.record_drift(report.evidence())
            known = {"evaluator": self._evaluation.state_dict()}
            self._drift.save(known, reports)
        self._drift.save_if_due()

    def _roll_archive(self) -> TemporaryError | None:
        """Write due archive files, and return the error if there is one.

        A full disk must not stop the decisions.
        """
        try:
            self._emit_archived(self._archive.roll(self._clock()))
        except TemporaryError as error:
            return error
        return None

    def _emit_archived(self, files: Sequence[tuple[str, int]]) -> None:
        for name, rows in files:
            self.journal.emit("archived", f"{rows} rows in {name}", rows=rows, files=[name])

    def _forget_old(self) -> None:
        now = self._clock()
        # Use the absolute difference, because the clock may have been set back.
        if abs(now - self._forgot_at) >= FORGET_SECONDS:
            self._set_apart_ahead(now)
            self._archive.waiting_for_upload()
            records, window_seconds = (
                self._records,
                self._evaluation_settings.attribution_window_seconds,
            )
            # The conversion rate needs the ids of the requests.
            keep_seconds = max(records.keep_ids_seconds, 2 * records.conversion_window_seconds)
            self._store.forget(
                before=now - keep_seconds,
                orphans_before=now - window_seconds - ORPHAN_SECONDS,
                ahead=now + CLOCK_AHEAD_SECONDS,
            )
            self._store_versions()
            self._checkpoint("store.forgotten")
            self._forgot_at = now

    def _set_apart_ahead(self, now: float) -> None:
        """Set apart the rows whose times are too far in the future.

        Rows with times far in the future were accepted while the monitor's clock was wrong.
        """
        ahead = now + MAX_FUTURE_SECONDS
        while (
            waiting := self._without_corrupt(lambda: self._store.waiting_ahead(ahead))
        ) is not None:
            clicks = self._store.clicks_on(waiting.numbers)
            requests, late, _ = attribute(
                waiting, clicks, window_seconds=self._evaluation_settings.attribution_window_seconds
            )
            self._store.mature(
                requests, {"unmatched_outcome": float(len(late))}, now=now, apart=True
            )
            until = datetime.fromtimestamp(float(waiting.times.max()), timezone.utc)
            self.journal.emit(
                "set_apart",
                f"{waiting.num_rows} rows of {len(waiting)} requests have times up to "
                f"{until:%Y-%m-%d %H:%M} UTC, more "
                "than a day ahead, because a clock was wrong. The rows are set apart in the state "
                "folder",
                rows=waiting.num_rows,
            )

    def _forget_times_ahead(self, now: float) -> None:
        """Forget the time of the newest prediction if that time is in the future.

        A time in the future comes from a clock that was ahead. While this time is stored, no
        prediction with an earlier time can become the newest prediction.
        """
        if (
            self._last_record_time is not None
            and self._last_record_time > now + CLOCK_AHEAD_SECONDS
        ):
            newest = self._store.newest_prediction(until=now)
            self._last_record_time = newest[0] if newest else None
            self._newest = newest

    def _snapshot(self) -> Snapshot:
        now = self._clock()
        # Call the watcher before reading the counters, because the watcher increases some counters.
        store_status = self._store_watcher.look(now)
        return Snapshot(
            recommender=self._recommender.name,
            time=now,
            counters=dict(self._store.counters),
            pending_rows=self._store.num_pending_rows,
            log_backlog=self._subscriber.backlog(),
            log_read_up_to=self._read_up_to,
            log_problem=self._subscriber.problem(),
            last_record_time=self._last_record_time,
            serving_version=self.serving_version,
            windows=self._measurements.shown,
            open_labels=self._measurements.open_labels,
            drift=self._drift.shown(self.serving_version),
            decided_at=self._decided_at,
            decision=self._decision_text,
            decisions=self._decisions,
            actions=self.actions.status(now),
            store_status=store_status,
        )


def _expect_columns_of_before(store: StateStore, features: Features) -> None:
    """Check that the columns of the stored rows still exist, and rearrange the columns.

    Raises:
        ContractError: Stored rows have a column that is not in `features`.
    """
    known, columns = store.read_document("features") or {}, features.columns
    if removed := [
        name for kind, names in known.items() for name in names if name not in columns[kind]
    ]:
        raise ContractError(
            f"unexpected columns {removed} of rows in the state folder, expected only "
            f"{sum(columns.values(), [])}: stop the previous monitor after it has archived its "
            "rows, and start this monitor with an empty folder"
        )
    if known != columns:
        store.arrange_columns(columns, ColumnMap(known or columns, columns))
