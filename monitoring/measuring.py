"""What the loop knows of each model version: matured windows, conversions, and estimates of what is still open.

In: requests as they mature and settle, and the store's open rows. Out: KPIs and open-label estimates per version. What
the numbers are is left to `monitoring.measures`; keeping rows over a restart to `monitoring.memory.store`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from monitoring.measures.estimated_auc import estimate_auc, fit_calibration
from monitoring.measures.kpis import Kpis, measure_version
from monitoring.measures.open_labels import ClickDelays, OpenEstimate, estimate_open
from monitoring.measures.window import VersionWindows
from monitoring.memory.rows import MaturedRequest, OpenRows, Settled
from monitoring.memory.store import Store
from monitoring.settings import MonitorSettings

STALE_SECONDS = 900.0
"""KPIs of a version without a new row for longer are shown no more: its window says nothing of the present."""


class Measuring:
    """The numbers of one monitor."""

    def __init__(self, settings: MonitorSettings, store: Store, clock: Callable[[], float]) -> None:
        """Takes up the rows that the store still holds.

        Args:
            settings: Lengths of windows.
            store: Where matured, settled and open rows are.
            clock: Seconds since the epoch.
        """
        self._settings, self._store, self._clock = settings, store, clock
        self.windows = VersionWindows(settings.window_rows, seconds=settings.window_seconds, k=settings.ranking_k)
        self.kpis: dict[int, Kpis] = {}
        """Of every version measured so far."""
        # Of all versions together: delays are the users', and a new version has none for a whole window.
        self._delays = ClickDelays()
        self._measured_at: dict[int, float] = {}
        self._open: tuple[dict[str, Any], ...] = ()
        self._next_estimate = 0.0

    def watch(self, request: MaturedRequest) -> None:
        """Takes in a request whose click labels are final."""
        version = request.model_version
        self.windows.update(version, request.time, request.labels, request.scores, positions=request.positions)
        if request.click_delays is not None:
            self._delays.update(request.click_delays)

    def watch_settled(self, requests: Iterable[Settled]) -> None:
        """Takes in requests whose conversions are final."""
        for request in requests:
            self.windows.note_conversions(request.model_version, request.num_rows, request.num_converted)

    def measure(self, versions: Iterable[int]) -> list[Kpis]:
        """Measures those of `versions` that have rows."""
        measured = []
        for version in sorted(set(versions) & set(self.windows.versions)):
            self.kpis[version] = measure_version(version, self.windows)
            self._measured_at[version] = self._clock()
            measured.append(self.kpis[version])
        for forgotten in self.kpis.keys() - set(self.windows.versions):
            # As many versions as the windows keep: a monitor runs for months.
            self.kpis.pop(forgotten)
            self._measured_at.pop(forgotten, None)
        return measured

    def estimate_open(self, read_up_to: float | None) -> None:
        """Estimates what is open, at most every `decide_seconds`; `read_up_to`: until when every click is in."""
        now = self._clock()
        # Also where the clock was set back.
        if read_up_to is None or 0 < self._next_estimate - now <= self._settings.decide_seconds:
            return
        self._next_estimate = now + self._settings.decide_seconds
        window = self._settings.attribution_window_seconds
        found, num_left_out = self._store.open_rows(now=read_up_to, window_seconds=window)
        self._open = tuple(
            {
                **dataclasses.asdict(self._estimate(version, found[version], read_up_to, window)),
                **self._without_labels(version, found[version]),
                "rows_left_out": num_left_out,
            }
            for version in sorted(found)
        )

    def _estimate(self, version: int, rows: OpenRows, now: float, window_seconds: float) -> OpenEstimate:
        return estimate_open(
            version, rows.scores, rows.ages, rows.clicked, delays=self._delays, window_seconds=window_seconds, now=now
        )

    def _without_labels(self, version: int, rows: OpenRows) -> dict[str, float | None]:
        """The AUC that the scores alone promise, as if no click could arrive any more."""
        matured = self.windows[version] if version in self.windows.versions else None
        calibration = fit_calibration(matured.labels, matured.scores) if matured else None
        found = estimate_auc(rows.scores, calibration) if calibration else None
        auc, low, high = (found.auc, found.low, found.high) if found else (None, None, None)
        return {"cbpe_auc": auc, "cbpe_low": low, "cbpe_high": high}

    @property
    def open_labels(self) -> tuple[dict[str, Any], ...]:
        """The newest estimate of each version with open rows, as JSON takes it.

        `rows_left_out`: open rows, of all versions, that were too many to be looked at. `cbpe_auc`, `cbpe_low` and
        `cbpe_high`: see `measures.estimated_auc`; None until enough rows of the version have matured.
        """
        return self._open

    @property
    def shown(self) -> tuple[Kpis, ...]:
        """KPIs of the versions that had a new row lately."""
        stale = self._clock() - STALE_SECONDS
        return tuple(kpis for version, kpis in sorted(self.kpis.items()) if self._measured_at[version] > stale)
