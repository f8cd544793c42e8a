"""How far one partition has been read: which messages are held, and which offset may be committed.

Kafka remembers one number for each partition: everything below it is done. Acknowledgements come in any order, so the
number may only move to the first message that is not yet acknowledged. Pure; the network is `subscriber`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass
class Held(Generic[M]):
    """A message that was delivered and not yet acknowledged."""

    message: M
    until: float
    """End of the lease, seconds since the epoch."""
    attempt: int = 1


@dataclass
class Progress(Generic[M]):
    """One partition, from its assignment to its revocation.

    Offsets of a partition may have gaps, where Kafka compacted or deleted; a gap counts as done.
    """

    generation: int
    """Differs between two assignments of the same partition: tokens of the earlier one are void."""
    next_offset: int | None = None
    """One past the newest message delivered; None before the first."""
    held: dict[int, Held[M]] = field(default_factory=dict)
    """By offset, ascending."""
    sent_offset: int | None = None
    """What was last asked to be committed; None = nothing, or the commit failed."""

    def take(self, offset: int, message: M, *, until: float) -> bool:
        """Holds a newly arrived message; False for one that came already."""
        if self.next_offset is not None and offset < self.next_offset:
            return False
        self.held[offset] = Held(message, until)
        self.next_offset = offset + 1
        return True

    def take_expired(self, now: float, count: int, *, until: float) -> list[int]:
        """Offsets of at most `count` messages whose lease ran out, oldest first; each is leased anew.

        A lease that ends later than a new one was taken before the clock was set back, and counts as over.
        """
        expired = [offset for offset, held in self.held.items() if not now < held.until <= until][:count]
        for offset in expired:
            self.held[offset].until = until
            self.held[offset].attempt += 1
        return expired

    def find(self, offset: int, attempt: int) -> M | None:
        """The message that this delivery handed out, while it is held; None when the delivery is over."""
        held = self.held.get(offset)
        return held.message if held is not None and held.attempt == attempt else None

    def end(self, offset: int, attempt: int) -> M | None:
        """Ends a delivery and returns its message; None where it was over already."""
        message = self.find(offset, attempt)
        if message is not None:
            del self.held[offset]
        return message

    def offset_to_commit(self) -> int | None:
        """The offset below which all is done, if it has moved since it was last sent; None otherwise."""
        done = next(iter(self.held), self.next_offset)
        return done if done != self.sent_offset else None

    def unfinished(self, start: int, end: int) -> int:
        """Messages before `end` that are not acknowledged; `start` is where reading begins while nothing came."""
        position = start if self.next_offset is None else self.next_offset
        return max(0, end - position) + len(self.held)
