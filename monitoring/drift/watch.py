"""Sort predictions into buckets by event time and version, and report on closed buckets.

The input is the accepted predictions, each once, in any order. The output is one `DriftReport` per
closed bucket. A report does not depend on the order of the records. `monitoring.drift.comparison`
computes the numbers.

A bucket closes when the caller states that no more of its records can arrive. Callers use the
watermark minus `drift_grace_seconds`, because clients publish records a little after the event. If
a record arrives after its bucket closed, the record is skipped and counted. An example is a record
from a client with a slow clock. A bucket with fewer than `drift_min_rows` rows is merged into the
next bucket of the same version.

At most `_MAX_OPEN` buckets are open, namely the earliest buckets. If the rows need more open
buckets, later buckets are deferred. An example is the time after a long stop of the monitor.
Deferred rows are counted when `close` reaches their bucket and the caller passes the rows to
`resume`.

The saved state contains every open bucket. Predictions are numbered in the order in which they are
stored. The caller saves the number of the last observed prediction together with this state. After
a restart, the caller adds all later predictions again. If the rows of a prediction were deleted in
the meantime, the prediction is missing in the drift reports. Nothing else is lost.
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

_MAX_OPEN = 32
"""Maximum number of open buckets, about 1.5 MB each. The limit bounds memory after a long stop,
when clocks run ahead, and when many versions serve."""
_MAX_LAYOUTS = 8
_MAX_UNKNOWN = 1000
Key = tuple[int, int]


class DriftWatch:
    """Counter of predictions in buckets, which reports drift for each version."""

    def __init__(
        self,
        reference_of: Callable[[int], TrainingReference | None],
        settings: DriftSettings,
        *,
        features: Features | None = None,
    ) -> None:
        """Start without records.

        Args:
            reference_of: Returns a version's training profile, or None. The watch calls this
                function again for each new bucket.
            settings: A bucket length of 0 turns the watch off.
            features: Columns of the predictions. None selects the columns of each version's
                training rows.
        """
        self._reference_of, self._settings, self._features = reference_of, settings, features
        self._length = microseconds(settings.drift_bucket_seconds)
        self._open: dict[Key, Sketch] = {}
        """Sketch of each open bucket, by (bucket number, version)."""
        self._unknown: set[Key] = set()
        self._carried: dict[int, tuple[int, Sketch]] = {}
        """For each version, the merged sketch of buckets that were too small to compare, and the
        number of the first of these buckets."""
        self._layouts: dict[int, Layout] = {}
        self._closed_up_to: float | None = None
        self._deferred_from: int | None = None
        """Number of the first deferred bucket. Rows of deferred buckets are not counted until
        `resume`."""
        self.passed_over: Counter[str] = Counter()
        """Number of rows that no report contains, by reason: `late`, `no_reference` (no reference
        with the same columns) or `too_many_versions`."""

    def observe(self, predictions: Predictions) -> None:
        """Add predictions.

        Each prediction must be added once, and all predictions must have the same columns.
        """
        if not self._length or not len(predictions):
            return
        for version, of_version in predictions.by_version():
            numbers = self._numbers(of_version)
            for number in np.unique(numbers).tolist():
                if self._deferred_from is not None and number >= self._deferred_from:
                    break
                rows = of_version.select(numbers == number)
                sketch = self._open.get((number, version)) or self._opened(number, version, rows)
                if sketch is not None:
                    sketch.add(rows)

    def _numbers(self, predictions: Predictions) -> NDArray[np.int64]:
        # Use whole microseconds like the archive, so that a backtest assigns a record to the same
        # bucket.
        return predictions.micros // self._length

    def _opened(self, number: int, version: int, predictions: Predictions) -> Sketch | None:
        """Return the bucket of predictions, or None if the predictions are skipped or deferred."""
        num_rows = predictions.num_rows
        if self._closed_up_to is not None and self._end(number) <= self._closed_up_to:
            self.passed_over["late"] += num_rows
            return None
        if (number, version) in self._unknown:
            self.passed_over["no_reference"] += num_rows
            return None
        if len(self._open) >= _MAX_OPEN and not self._make_room(number, num_rows):
            return None
        layout = self._layout(version)
        if layout is None or not layout.fits(predictions):
            if len(self._unknown) < _MAX_UNKNOWN:
                self._unknown.add((number, version))
            self.passed_over["no_reference"] += num_rows
            return None
        return self._open.setdefault((number, version), Sketch(layout))

    def _make_room(self, number: int, num_rows: int) -> bool:
        """Defer the latest bucket, and return whether bucket `number` can be opened now.

        `num_rows` is the number of rows that the new bucket would get.
        """
        farthest = max(number, max(self._open)[0])
        if farthest == min(self._open)[0]:  # the bucket has too many versions
            self.passed_over["too_many_versions"] += num_rows
            return False
        self._deferred_from = farthest
        self._open = {key: sketch for key, sketch in self._open.items() if key[0] < farthest}
        return number < farthest

    def deferred_since(self, up_to: float) -> float | None:
        """Return the event time of the first deferred row if it is at most `up_to`, else None."""
        since = None if self._deferred_from is None else self._deferred_from * self._length / 1e6
        return since if since is not None and since <= up_to else None

    def resume(self, predictions: Iterable[Predictions], up_to: float) -> list[DriftReport]:
        """Add the deferred rows, and report on the buckets that end by `up_to`.

        `predictions` must contain all known predictions since `deferred_since(up_to)`, and may
        contain earlier predictions. If there are too many buckets, the later buckets are deferred
        again.
        """
        first, self._deferred_from = self._deferred_from, None
        for each in predictions:
            self.observe(each.select(self._numbers(each) >= (first or 0)))
        return self.close(up_to)

    def close(self, up_to: float) -> list[DriftReport]:
        """Report on the buckets that end by event time `up_to`, oldest first, and remove them.

        If rows are deferred, only buckets before the deferred rows are closed.
        """
        if self._length and self._deferred_from is not None:
            up_to = min(up_to, self._deferred_from * self._length / 1e6)
        before = self._closed_up_to
        if not self._length or (before is not None and 0 <= before - up_to <= CLOCK_AHEAD_SECONDS):
            return []
        self._closed_up_to = up_to
        self._unknown = {key for key in self._unknown if self._end(key[0]) > up_to}
        due = sorted(key for key in self._open if self._end(key[0]) <= up_to)
        reports = [
            self._close_one(number, version, self._open.pop((number, version)))
            for number, version in due
        ]
        return [report for report in reports if report is not None]

    def _close_one(self, number: int, version: int, sketch: Sketch) -> DriftReport | None:
        first, carried = self._carried.pop(version, (number, None))
        if carried is not None:
            sketch.merge(carried)
        if sketch.rows < self._settings.drift_min_rows:
            self._carried[version] = (first, sketch)
            if len(self._carried) > _MAX_LAYOUTS:
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
        if len(self._layouts) > _MAX_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout

    # -- save and restore

    def state_dict(self) -> dict[str, Any]:
        """Return all open buckets as a JSON object, about 60 kB each."""
        return {
            "bucket_seconds": self._settings.drift_bucket_seconds,
            "closed_up_to": self._closed_up_to,
            "deferred_from": self._deferred_from,
            "passed_over": dict(self.passed_over),
            "open": [
                _saved(number, version, sketch) for (number, version), sketch in self._open.items()
            ],
            "carried": [
                _saved(number, version, sketch)
                for version, (number, sketch) in self._carried.items()
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the saved state that `state_dict()` returned.

        A bucket is dropped if the bucket length or the model's reference changed after the state
        was saved.
        """
        self.passed_over.update(state["passed_over"])
        self._closed_up_to = state["closed_up_to"]
        if state["bucket_seconds"] != self._settings.drift_bucket_seconds:
            return
        self._deferred_from = state["deferred_from"]
        for saved in state["open"]:
            if sketch := self._restored(saved):
                self._open[saved["number"], saved["version"]] = sketch
        for saved in state["carried"]:
            if sketch := self._restored(saved):
                self._carried[saved["version"]] = (saved["number"], sketch)

    def _restored(self, saved: dict[str, Any]) -> Sketch | None:
        layout = self._layout(saved["version"])
        if layout is None or layout.digest != saved["layout"]:
            self.passed_over["no_reference"] += saved["sketch"]["rows"]
            return None
        return Sketch.restore(layout, saved["sketch"])


def _saved(number: int, version: int, sketch: Sketch) -> dict[str, Any]:
    return {
        "number": number,
        "version": version,
        "layout": sketch.layout.digest,
        "sketch": sketch.state_dict(),
    }
