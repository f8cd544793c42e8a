"""The drift watch of one monitor, over restarts: what is kept in the store, and what is reported.

In: predictions as they are stored, and the watermark. Out: events, counters, what the page shows, and the evidence for
the judge. The watch's memory and the mark of the last prediction it has seen are one document, written every
`KEEP_SECONDS`; after a restart whatever was stored beyond the mark is observed again. Nothing is lost unless a
prediction came so late that its row was archived, and its block's rows let go, within that time.
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
from monitoring.state.store import Store

DOCUMENT = "drift"
KEEP_SECONDS = 10.0
MAX_SHOWN = 8
"""Versions whose newest report is shown."""


class KeptWatch:
    """See the module."""

    def __init__(self, watch: DriftWatch, store: Store, *, journal: Journal, clock: Callable[[], float]) -> None:
        """Continues where its predecessor stopped.

        `watch` is a new one; the journal gets a line for every drift.
        """
        self._watch = watch
        self._store = store
        self._journal = journal
        self._clock = clock
        kept = store.read_document(DOCUMENT) or {"mark": 0, "watch": None, "shown": []}
        # Reports of another version of the watch have other fields.
        reports = kept["shown"] if kept.get("format_version") == FORMAT_VERSION else []
        self._shown: dict[int, dict[str, Any]] = {shown["version"]: shown for shown in reports}
        if kept["watch"]:
            watch.restore(kept["watch"])
        self._counted = Counter(watch.passed_over)
        self._mark = int(kept["mark"])
        for predictions in store.stored_after(self._mark):
            watch.observe(predictions)
        self._kept_at: float | None = None
        self._is_due = False

    def observe(self, predictions: Predictions) -> None:
        """Counts predictions in that were stored just now, before anything else can fail."""
        self._watch.observe(predictions)

    def close(self, up_to: float | None) -> list[DriftReport]:
        """Reports on what has ended by the watermark, and emits an event for each drift.

        The caller passes the reports to `keep` with the documents that it changed by them.
        """
        reports = self._watch.close(up_to) if up_to is not None else []
        while up_to is not None and (since := self._watch.put_off_since(up_to)) is not None:
            reports += self._watch.resume(self._store.made_since(since), up_to)
            self._is_due = True
        for report in reports:
            self._shown.pop(report.version, None)
            self._shown[report.version] = asdict(report)
            if len(self._shown) > MAX_SHOWN:
                del self._shown[next(iter(self._shown))]
            if report.drifted or report.outlying:
                self._journal.emit("drift", report.text(), **_event_details(report))
        return reports

    def keep(self, documents: Mapping[str, Mapping[str, Any]], reports: Iterable[DriftReport] = ()) -> None:
        """Writes the memory, with the documents that changed by `reports`, and counts the reports."""
        counts = Counter({f"drift_{name}_row": n for name, n in (self._watch.passed_over - self._counted).items()})
        for report in reports:
            counts.update(drift_bucket=1, drifted_bucket=int(bool(report.drifted)))
            counts.update(outlying_bucket=int(bool(report.outlying)))
        self._mark = self._store.prediction_mark()
        kept = {"format_version": FORMAT_VERSION, "mark": self._mark, "watch": self._watch.memory()}
        kept |= {"shown": list(self._shown.values())}
        own = {DOCUMENT: kept, **{name: dict(document) for name, document in documents.items()}}
        self._store.write_documents(own, {name: float(n) for name, n in counts.items() if n})
        self._counted = Counter(self._watch.passed_over)
        self._kept_at = self._clock()
        self._is_due = False

    def keep_if_due(self) -> None:
        """Writes the memory where the last time is long ago and predictions came since, or some were no longer put off.

        Those may mature in this turn, and then leave the store.
        """
        # Also where the clock was set back.
        is_time = self._kept_at is None or abs(self._clock() - self._kept_at) >= KEEP_SECONDS
        if self._is_due or (is_time and self._store.prediction_mark() != self._mark):
            self.keep({})

    def shown(self, version: int | None) -> dict[str, Any] | None:
        """The newest report on `version`, or else on any, for the page; None before the first."""
        if version in self._shown:
            return self._shown[version]
        return next(reversed(self._shown.values()), None)


def _event_details(report: DriftReport) -> dict[str, Any]:
    """The report with the names of the columns that something is wrong with, and no others."""
    wrong = {column.feature: asdict(column) for column in (*report.drifted, *report.outlying)}
    return {
        **asdict(report),
        "drifted": [column.feature for column in report.drifted],
        "outlying": [column.feature for column in report.outlying],
        "columns": list(wrong.values()),
    }
