"""List of events on a page. Each event has one line, and lines are grouped by date.

On the page, events of routine kinds are hidden until the reader unfolds them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import ClassVar

from evergreen.reports.rendering import PageBlock

MAX_FOLDED = 50
"""Maximum number of events that are shown when the routine events of a date are unfolded. A single
date can have thousands of archived files."""


@dataclass(frozen=True, kw_only=True)
class ShownEvent:
    """An event on a page."""

    time: float
    """Seconds since the epoch."""
    kind: str
    text: str
    times: int = 1
    """Number of equal consecutive events, which are shown as one line."""
    after: str = ""
    """Time from the start of the incident or run until the event, as text."""

    @property
    def clock(self) -> str:
        """Time of day, UTC."""
        return _moment(self).strftime("%H:%M:%S")

    @property
    def name(self) -> str:
        """Name of the event's kind, with spaces between words, followed by the number of events."""
        name = self.kind.replace("_", " ")
        return name if self.times == 1 else f"{name}, {self.times} in a row"


@dataclass(frozen=True, kw_only=True)
class _Day:
    """Events of one date."""

    prominent: Sequence[ShownEvent]
    routine: Sequence[ShownEvent]

    @property
    def folded(self) -> Sequence[ShownEvent]:
        """Routine events that the fold shows, at most `MAX_FOLDED`."""
        return self.routine[:MAX_FOLDED]

    @property
    def summary(self) -> str:
        """Number of routine events of each kind."""
        counts: dict[str, int] = {}
        for event in self.routine:
            counts[event.kind] = counts.get(event.kind, 0) + event.times
        return ", ".join(f"{count} × {kind.replace('_', ' ')}" for kind, count in counts.items())


@dataclass(frozen=True)
class EventList(PageBlock):
    """The event list. `days` maps each date to its events."""

    TEMPLATE: ClassVar[str] = "events.html.j2"
    days: Mapping[str, _Day]


def event_list(events: Iterable[ShownEvent], *, routine: Collection[str]) -> EventList:
    """Return the block for events in the given order.

    The events of the `routine` kinds are hidden in one fold for each date. Times are UTC.
    """
    days: dict[str, list[ShownEvent]] = {}
    for event in events:
        days.setdefault(_moment(event).strftime("%Y-%m-%d"), []).append(event)
    return EventList(
        {
            day: _Day(
                prominent=[event for event in of_day if event.kind not in routine],
                routine=[event for event in of_day if event.kind in routine],
            )
            for day, of_day in days.items()
        }
    )


def _moment(event: ShownEvent) -> datetime:
    return datetime.fromtimestamp(event.time, timezone.utc)
