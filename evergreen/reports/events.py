"""List of events on a page, with one line for each event, grouped by date.

On the page, events of routine kinds are hidden until the reader unfolds them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from typing import ClassVar

from evergreen.reports.rendering import PageBlock

MAX_FOLDED = 50
"""Maximum number of events that are shown when a group of routine events is unfolded. A single day
can have thousands of archived files."""


@dataclass(frozen=True, kw_only=True)
class ShownEvent:
    """An event on a page."""

    time: float
    """Seconds since the epoch."""
    kind: str
    text: str
    times: int = 1
    """Number of equal consecutive events that this line shows."""
    after: str = ""
    """Time between the start of the incident or run and the event, as text."""

    @property
    def clock(self) -> str:
        """Time of day, UTC."""
        return _moment(self).strftime("%H:%M:%S")

    @property
    def name(self) -> str:
        """Kind of the event, written with spaces, and the number of events."""
        name = self.kind.replace("_", " ")
        return name if self.times == 1 else f"{name}, {self.times} in a row"


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Group of consecutive events. Either all or none of them are routine events."""

    is_routine: bool
    events: Sequence[ShownEvent]

    @property
    def shown(self) -> Sequence[ShownEvent]:
        """Events of this group that the page shows.

        A fold shows at most `MAX_FOLDED` of its events.
        """
        return self.events[:MAX_FOLDED] if self.is_routine else self.events

    @property
    def summary(self) -> str:
        """Times of the oldest and newest event, and the number of events of each kind."""
        counts: dict[str, int] = {}
        for event in self.events:
            counts[event.kind] = counts.get(event.kind, 0) + event.times
        named = ", ".join(
            f"{count} × " * (count > 1) + kind.replace("_", " ") for kind, count in counts.items()
        )
        first, last = sorted((self.events[0].clock, self.events[-1].clock))
        return f"{first} {named}" if first == last else f"{first} to {last} {named}"


@dataclass(frozen=True)
class EventList(PageBlock):
    """The event list. `days` maps each date to its groups of events."""

    TEMPLATE: ClassVar[str] = "events.html.j2"
    days: Mapping[str, Sequence[_Stretch]]


def event_list(events: Iterable[ShownEvent], *, routine: Collection[str]) -> EventList:
    """Return the block for events in the given order.

    Groups of events of the `routine` kinds are hidden until the reader unfolds them. Times are UTC.
    """
    return EventList(
        {
            day: [
                _Stretch(is_routine=is_routine, events=list(stretch))
                for is_routine, stretch in groupby(of_day, key=lambda event: event.kind in routine)
            ]
            for day, of_day in groupby(
                events, key=lambda event: _moment(event).strftime("%Y-%m-%d")
            )
        }
    )


def _moment(event: ShownEvent) -> datetime:
    return datetime.fromtimestamp(event.time, timezone.utc)
