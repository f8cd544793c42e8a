"""Persist a monitor's drift watch, and report the results of the watch.

The input is stored predictions and the watermark. The output is events, counters, the page's
report, and evidence for the decisions. The watch's state and the number of the last observed
prediction are one document, written every `_SAVE_SECONDS`. After a restart, predictions that were
stored later are observed again. A prediction is missing only if its row was archived and deleted
between two writes, because the prediction arrived very late.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from evergreen.contracts.records import Predictions
from monitoring.drift.comparison import DriftReport
from monitoring.drift.sketch import FORMAT_VERSION
from monitoring.drift.watch import DriftWatch
from monitoring.journal import Journal
from monitoring.state.store import StateStore

DOCUMENT = "drift"
_SAVE_SECONDS = 10.0
_MAX_SHOWN = 8
"""Number of versions with a report on the page."""


class StoredDriftWatch:
    """Drift watch with a state that survives restarts."""

    def __init__(
        self, watch: DriftWatch, store: StateStore, *, journal: Journal, clock: Callable[[], float]
    ) -> None:
        """Continue where the predecessor stopped.

        Args:
            watch: A drift watch without predictions.
            store: The monitor's state.
            journal: Receives an event for every drift.
            clock: Returns seconds since the epoch.
        """
        self._watch = watch
        self._store = store
        self._journal = journal
        self._clock = clock
        saved = store.read_document(DOCUMENT) or {"cursor": 0, "watch": None, "shown": []}
        # Reports of another format version have other fields.
        reports = saved["shown"] if saved.get("format_version") == FORMAT_VERSION else []
        self._shown: dict[int, dict[str, Any]] = {shown["version"]: shown for shown in reports}
        if saved["watch"]:
            watch.restore(saved["watch"])
        self._counted = Counter(watch.passed_over)
        self._cursor = int(saved["cursor"])
        for predictions in store.stored_after(self._cursor):
            watch.observe(predictions)
        self._saved_at: float | None = None
        self._is_due = False

    def observe(self, predictions: Predictions) -> None:
        """Observe predictions that were just stored, before any later step can fail."""
        self._watch.observe(predictions)

    def close(self, up_to: float | None) -> list[DriftReport]:
        """Report on buckets that end at or before the watermark, and emit an event for each drift.

        The caller passes the reports to `save`, together with the documents that the reports
        change.
        """
        reports = self._watch.close(up_to) if up_to is not None else []
        while up_to is not None and (since := self._watch.deferred_since(up_to)) is not None:
            reports += self._watch.resume(self._store.made_since(since), up_to)
            self._is_due = True
        for report in reports:
            self._shown.pop(report.version, None)
            self._shown[report.version] = asdict(report)
            if len(self._shown) > _MAX_SHOWN:
                del self._shown[next(iter(self._shown))]
            if report.drifted or report.outlying:
                self._journal.emit("drift", report.text(), **_event_details(report))
        return reports

    def save(
        self, documents: Mapping[str, Mapping[str, Any]], reports: Iterable[DriftReport] = ()
    ) -> None:
        """Store the state and the documents that `reports` changed, and count the reports."""
        counts = Counter(
            {
                f"drift_{name}_row": n
                for name, n in (self._watch.passed_over - self._counted).items()
            }
        )
        for report in reports:
            counts.update(drift_bucket=1, drifted_bucket=int(bool(report.drifted)))
            counts.update(outlying_bucket=int(bool(report.outlying)))
        self._cursor = self._store.prediction_cursor()
        saved = {
            "format_version": FORMAT_VERSION,
            "cursor": self._cursor,
            "watch": self._watch.state_dict(),
        }
        saved |= {"shown": list(self._shown.values())}
        own = {DOCUMENT: saved, **{name: dict(document) for name, document in documents.items()}}
        self._store.write_documents(own, {name: float(n) for name, n in counts.items() if n})
        self._counted = Counter(self._watch.passed_over)
        self._saved_at = self._clock()
        self._is_due = False

    def save_if_due(self) -> None:
        """Store the state if predictions are new, but at most every `_SAVE_SECONDS`.

        After a resume, the state is stored immediately. Deferred predictions may mature and be
        deleted in the same iteration.
        """
        # Use the absolute difference, because the clock may have been set back.
        is_time = self._saved_at is None or abs(self._clock() - self._saved_at) >= _SAVE_SECONDS
        if self._is_due or (is_time and self._store.prediction_cursor() != self._cursor):
            self.save({})

    def shown(self, version: int | None) -> dict[str, Any] | None:
        """Return the newest report on `version`.

        If `version` has no report, the newest report on any version is returned.

        Returns None before the first report.
        """
        if version in self._shown:
            return self._shown[version]
        return next(reversed(self._shown.values()), None)


def _event_details(report: DriftReport) -> dict[str, Any]:
    """Return the report with details of the drifted and outlying columns only."""
    wrong = {column.feature: asdict(column) for column in (*report.drifted, *report.outlying)}
    return {
        **asdict(report),
        "drifted": [column.feature for column in report.drifted],
        "outlying": [column.feature for column in report.outlying],
        "columns": list(wrong.values()),
    }
