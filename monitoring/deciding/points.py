"""Decision points, and which version serves at each: functions of event times alone, in whole microseconds.

Points are the multiples of `decide_seconds`. Microseconds: see `contracts.criteo.microseconds`. Collecting rows between
points is left to `monitoring.deciding.judge`.
"""

from __future__ import annotations


def point_after(time: int, span: int) -> int:
    """The first multiple of `span` that is not before `time`.

    >>> point_after(10, 10), point_after(11, 10)
    (10, 20)
    """
    return -(-time // span) * span


class ServingTimeline:
    """Which version serves at each point: that of the newest prediction by no canary, one attribution window ahead.

    Ahead, because rows of an old version go on maturing for a whole window after a release and must not be judged any
    more. Not the highest number, because a rollback serves an older one. Of predictions at one time the higher
    version counts as the newer one. All times are microseconds since the epoch.
    """

    def __init__(self, span: int, window: int) -> None:
        self._span, self.window = span, window
        # Per point still to come and version: first and last prediction since the point before. A few entries,
        # whatever the traffic.
        self._notes: dict[int, dict[int, tuple[int, int]]] = {}
        self.version: int | None = None
        """The version that serves at the point reached; None before the first prediction."""
        self.since = 0
        """Its first prediction, within the span in which it took over."""
        self.reached: int | None = None
        """The last point passed; None before the first."""
        self.last: tuple[int, int] | None = None
        """Time and version of the newest prediction that a point passed knew; None where that is not known."""

    def note(self, time: int, version: int) -> None:
        """Takes in a prediction that no canary made, in any order.

        One whose point `advance` has passed counts at the next one if it is newer than what was known: clients publish
        a little after the event. An older one says nothing of who serves now, and is let go.
        """
        point = point_after(time - self.window, self._span)
        is_past = self.reached is not None and point <= self.reached
        if is_past and self.last is not None and (time, version) <= self.last:
            return
        of_point = self._notes.setdefault(point, {})
        first, last = of_point.get(version, (time, time))
        of_point[version] = (min(first, time), max(last, time))

    def advance(self, point: int) -> None:
        """Goes on to `point`; every prediction up to one window after it must have been noted."""
        for due in sorted(each for each in self._notes if each <= point):
            of_point = self._notes.pop(due)
            newest = max(of_point, key=lambda version: (of_point[version][1], version))
            last = (of_point[newest][1], newest)
            self.last = last if self.last is None else max(self.last, last)
            if newest != self.version:
                self.version, self.since = newest, of_point[newest][0]
        self.reached = point
