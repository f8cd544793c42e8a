"""Sorts predictions into buckets of event time and version, and reports on a bucket once no record of it can come.

In: predictions as they are taken in, each once, in any order. Out: one `DriftReport` per closed bucket, which
depends on its records alone, not on their order. The numbers are `monitoring.drift.comparison`'s.

A bucket closes when its caller says that no record of it can come: the watermark less `drift_grace_seconds`, since a
client publishes after the event. A record that comes later still (a client's clock that is far behind)
is passed over and counted. A bucket of fewer than `drift_min_rows` rows joins the next one of its version.

Few buckets are held open, the earliest ones. Where more are needed, as after a long stop of the monitor, the later ones
are put off: their rows are not counted until `close` has come as far, and their caller hands them to `resume`.

The memory holds every open bucket. Whoever keeps it in the monitor's store with the mark of the last prediction stored,
and after a restart observes what was stored since, loses nothing; predictions whose rows were let go meanwhile are
lost to this measure, and to no other.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import Features
from evergreen.config.monitor import DriftSettings
from evergreen.contracts.raw_rows import CLOCK_AHEAD_SECONDS, microseconds
from evergreen.contracts.records import Predictions
from evergreen.statistics.reference import TrainingReference
from monitoring.drift.comparison import DriftReport, compare
from monitoring.drift.sketch import Layout, Sketch

MAX_OPEN = 32
"""Buckets held at a time, some 1.5 MB each: a long stop, clocks that are ahead and versions without end must not fill
the memory."""
MAX_LAYOUTS = 8
MAX_UNKNOWN = 1000
Key = tuple[int, int]


class DriftWatch:
    """The watch over all versions."""

    def __init__(
        self,
        reference_of: Callable[[int], TrainingReference | None],
        settings: DriftSettings,
        *,
        features: Features | None = None,
    ) -> None:
        """Watches nothing yet.

        `reference_of` gives a version's training profile, None where there are none, and is asked again for each new
        bucket. A bucket length of 0 watches nothing; `features` None = those of every version's training rows.
        """
        self._reference_of, self._settings, self._features = reference_of, settings, features
        self._length = microseconds(settings.drift_bucket_seconds)
        self._open: dict[Key, Sketch] = {}
        """By (bucket number, version)."""
        self._unknown: set[Key] = set()
        self._carried: dict[int, tuple[int, Sketch]] = {}
        """By version: the first bucket's number, and what was too small to judge."""
        self._layouts: dict[int, Layout] = {}
        self._closed_up_to: float | None = None
        self._put_off: int | None = None
        """The first bucket number whose rows, and those of later ones, are not counted for now."""
        self.passed_over: Counter[str] = Counter()
        """Rows that no report counts: `late`, `no_reference` (none with columns of theirs), `too_many_versions`."""

    def observe(self, predictions: Predictions) -> None:
        """Counts predictions in; the caller sees to it that each comes once, and that all have the same columns."""
        if not self._length or not len(predictions):
            return
        for version, of_version in predictions.by_version():
            numbers = self._numbers(of_version)
            for number in np.unique(numbers).tolist():
                if self._put_off is not None and number >= self._put_off:
                    break
                rows = of_version.select(numbers == number)
                sketch = self._open.get((number, version)) or self._opened(number, version, rows)
                if sketch is not None:
                    sketch.add(rows)

    def _numbers(self, predictions: Predictions) -> NDArray[np.int64]:
        # In whole microseconds, as the archive keeps times: a backtest must find a record in the same bucket.
        return predictions.micros // self._length

    def _opened(self, number: int, version: int, predictions: Predictions) -> Sketch | None:
        """The new sketch of a bucket of `version`, for these predictions in it; None where they are passed over."""
        num_rows = predictions.num_rows
        if self._closed_up_to is not None and self._end(number) <= self._closed_up_to:
            self.passed_over["late"] += num_rows
            return None
        if (number, version) in self._unknown:
            self.passed_over["no_reference"] += num_rows
            return None
        if len(self._open) >= MAX_OPEN and not self._make_room(number, num_rows):
            return None
        layout = self._layout(version)
        if layout is None or not layout.fits(predictions):
            if len(self._unknown) < MAX_UNKNOWN:
                self._unknown.add((number, version))
            self.passed_over["no_reference"] += num_rows
            return None
        return self._open.setdefault((number, version), Sketch(layout))

    def _make_room(self, number: int, num_rows: int) -> bool:
        """Puts the farthest bucket off; whether that makes room for bucket `number`, which gets so many rows."""
        farthest = max(number, max(self._open)[0])
        if farthest == min(self._open)[0]:  # versions without end in one bucket
            self.passed_over["too_many_versions"] += num_rows
            return False
        self._put_off = farthest
        self._open = {key: sketch for key, sketch in self._open.items() if key[0] < farthest}
        return number < farthest

    def put_off_since(self, up_to: float) -> float | None:
        """The event time from which on rows are put off, where `close(up_to)` came as far; else None."""
        since = None if self._put_off is None else self._put_off * self._length / 1e6
        return since if since is not None and since <= up_to else None

    def resume(self, predictions: Iterable[Predictions], up_to: float) -> list[DriftReport]:
        """Counts in what was put off, and reports on the buckets of it that end by `up_to`.

        `predictions` are all known ones since `put_off_since(up_to)`, and may be earlier ones. Of many buckets the
        later ones are put off again.
        """
        first, self._put_off = self._put_off, None
        for each in predictions:
            self.observe(each.select(self._numbers(each) >= (first or 0)))
        return self.close(up_to)

    def close(self, up_to: float) -> list[DriftReport]:
        """Reports on the buckets that end by the event time `up_to`, oldest first; their records are forgotten.

        Where rows are put off, it comes as far as they begin.
        """
        if self._length and self._put_off is not None:
            up_to = min(up_to, self._put_off * self._length / 1e6)
        before = self._closed_up_to
        if not self._length or (before is not None and 0 <= before - up_to <= CLOCK_AHEAD_SECONDS):
            return []
        self._closed_up_to = up_to
        self._unknown = {key for key in self._unknown if self._end(key[0]) > up_to}
        due = sorted(key for key in self._open if self._end(key[0]) <= up_to)
        reports = [self._close_one(number, version, self._open.pop((number, version))) for number, version in due]
        return [report for report in reports if report is not None]

    def _close_one(self, number: int, version: int, sketch: Sketch) -> DriftReport | None:
        first, carried = self._carried.pop(version, (number, None))
        if carried is not None:
            sketch.merge(carried)
        if sketch.rows < self._settings.drift_min_rows:
            self._carried[version] = (first, sketch)
            if len(self._carried) > MAX_LAYOUTS:
                del self._carried[next(iter(self._carried))]
            return None
        return DriftReport(
            bucket_start=first * self._length / 1e6,
            bucket_end=self._end(number),
            version=version,
            rows=sketch.rows,
            requests=sketch.requests,
            reference_rows=sketch.layout.reference.rows,
            columns=compare(sketch, self._settings),
        )

    def _end(self, number: int) -> float:
        return (number + 1) * self._length / 1e6

    def _layout(self, version: int) -> Layout | None:
        layout = self._layouts.pop(version, None)
        if layout is None:
            reference = self._reference_of(version)
            if reference is None:
                return None
            layout = Layout(reference, rows=self._features)
        self._layouts[version] = layout
        if len(self._layouts) > MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    # -- memory

    def memory(self) -> dict[str, Any]:
        """All open buckets, as JSON takes it; some 60 kB each."""
        return {
            "bucket_seconds": self._settings.drift_bucket_seconds,
            "closed_up_to": self._closed_up_to,
            "put_off": self._put_off,
            "passed_over": dict(self.passed_over),
            "open": [_kept(number, version, sketch) for (number, version), sketch in self._open.items()],
            "carried": [_kept(number, version, sketch) for version, (number, sketch) in self._carried.items()],
        }

    def restore(self, memory: dict[str, Any]) -> None:
        """Continues from what `memory()` gave.

        A bucket is forgotten whose length, or whose model's statistics, are others now.
        """
        self.passed_over.update(memory["passed_over"])
        self._closed_up_to = memory["closed_up_to"]
        if memory["bucket_seconds"] != self._settings.drift_bucket_seconds:
            return
        self._put_off = memory["put_off"]
        for kept in memory["open"]:
            if sketch := self._restored(kept):
                self._open[kept["number"], kept["version"]] = sketch
        for kept in memory["carried"]:
            if sketch := self._restored(kept):
                self._carried[kept["version"]] = (kept["number"], sketch)

    def _restored(self, kept: dict[str, Any]) -> Sketch | None:
        layout = self._layout(kept["version"])
        if layout is None or layout.digest != kept["layout"]:
            self.passed_over["no_reference"] += kept["sketch"]["rows"]
            return None
        return Sketch.restore(layout, kept["sketch"])


def _kept(number: int, version: int, sketch: Sketch) -> dict[str, Any]:
    return {"number": number, "version": version, "layout": sketch.layout.digest, "sketch": sketch.memory()}
