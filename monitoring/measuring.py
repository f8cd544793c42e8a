"""The numbers of each model version: KPIs of its matured window, conversion rate, and estimates for open labels.

In: requests as they mature, and the store's open rows and conversions. Out: KPIs and open-label estimates per version.
How they are computed is left to `monitoring.measures`; keeping rows over a restart to `monitoring.memory.store`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from monitoring.deciding.judging import JudgeSettings
from monitoring.measures.kpis import Kpis, measure_version
from monitoring.measures.open_labels import ClickDelays, OpenEstimate, estimate_open
from monitoring.measures.window import VersionWindows
from monitoring.memory.store import Store
from monitoring.rows import MaturedRequest

STALE_SECONDS = 900.0
"""KPIs of a version without a new row for longer are no longer shown: its window says nothing about the present."""


class Measuring:
    """The numbers of one monitor."""

    def __init__(
        self, judge: JudgeSettings, *, conversion_window_seconds: float, store: Store, clock: Callable[[], float]
    ) -> None:
        """Knows no row yet.

        With `conversion_window_seconds` 0 there is no conversion rate.
        """
        self._store, self._clock, self._judge = store, clock, judge
        self._conversion_window_seconds = conversion_window_seconds
        self.windows = VersionWindows(judge.window_rows)
        self._measured: dict[int, tuple[float, Kpis]] = {}
        """When each version was measured last, and what was found."""
        # Of all versions together: delays depend on users, and a new version has none for a whole window.
        self._delays = ClickDelays()
        self.open_labels: tuple[OpenEstimate, ...] = ()
        """The newest estimate of each version with open rows."""
        self._next_estimate = 0.0

    def observe(self, request: MaturedRequest) -> None:
        """Takes in a request whose click labels are final."""
        version = request.model_version
        self.windows.update(version, request.labels, request.scores, positions=request.positions, users=request.users)
        if request.click_delays is not None:
            self._delays.update(request.click_delays)

    def measure(self, versions: Iterable[int], *, read_up_to: float | None) -> list[Kpis]:
        """Measures those of `versions` that have rows; `read_up_to`: time until which every record is in."""
        measured, conversion_rates = [], dict[int, float]()
        if read_up_to is not None and (seconds := self._conversion_window_seconds):
            conversion_rates = self._store.conversion_rates(read_up_to - seconds, window_seconds=seconds)
        for version in sorted(set(versions) & set(self.windows.versions)):
            kpis = measure_version(version, self.windows)
            measured.append(replace(kpis, conversion_rate=conversion_rates.get(version)))
            self._measured[version] = self._clock(), measured[-1]
        # As many versions as the windows keep: a monitor runs for months.
        self._measured = {version: each for version, each in self._measured.items() if version in self.windows.versions}
        return measured

    def estimate_open(self, read_up_to: float | None) -> None:
        """Estimates what is open, at most every `decide_seconds`; `read_up_to`: time until which every click is in."""
        now = self._clock()
        # Also where the clock was set back.
        if read_up_to is None or 0 < self._next_estimate - now <= self._judge.decide_seconds:
            return
        self._next_estimate = now + self._judge.decide_seconds
        window = self._judge.attribution_window_seconds
        found = self._store.open_rows(now=read_up_to, window_seconds=window)
        self.open_labels = tuple(
            estimate_open(
                rows.scores,
                rows.ages,
                rows.clicked,
                version=version,
                delays=self._delays,
                window_seconds=window,
                now=read_up_to,
            )
            for version, rows in sorted(found.items())
        )

    @property
    def shown(self) -> tuple[Kpis, ...]:
        """KPIs of the versions that had a new row lately."""
        stale = self._clock() - STALE_SECONDS
        return tuple(kpis for _, (measured_at, kpis) in sorted(self._measured.items()) if measured_at > stale)
