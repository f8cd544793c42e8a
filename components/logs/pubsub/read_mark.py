"""How far a log has been read whose broker does not say: an estimate from the messages' publish times.

Pub/Sub tells neither what is left nor in which order it comes. What is known is the publish time of every message that
came, and how long none came. So:

- While messages come, everything published before the oldest one in hand (waiting here, or pulled and not
  acknowledged), or before the newest one ever seen where none is in hand, has come too;
- once none has come for `settle_seconds`, everything published up to now has come;
- less `settle_seconds` in both cases: how much later than others of its age a message may arrive. A message that is
  later still counts as a late one.
- For `lease_seconds` after connecting nothing is known: a killed predecessor, or our own broken stream, may hold
  messages that come again only then.

Publish times are the broker's clock, `now` is ours: their difference adds to the error, so both should keep time.
"""

from __future__ import annotations


class ReadMark:
    """The mark of one subscription.

    Times called `at` are of a monotonic clock, `published` and `now` are seconds since the epoch.
    """

    def __init__(self, *, settle_seconds: float, lease_seconds: float) -> None:
        self._settle_seconds, self._lease_seconds = settle_seconds, lease_seconds
        self._newest_published: float | None = None
        self._last_arrival_at = float("-inf")
        self._mark: float | None = None

    def arrived(self, published: float, *, at: float) -> None:
        """Notes that a message came."""
        self._newest_published = max(published, self._newest_published or published)
        self._last_arrival_at = at

    def value(self, *, now: float, at: float, connected_at: float | None, oldest_in_hand: float | None) -> float | None:
        """Seconds since the epoch up to which all is read; None = unknown as yet.

        Args:
            now: The time.
            at: The same moment on the monotonic clock.
            connected_at: Since when the stream has stood; None = it does not, and the mark rests.
            oldest_in_hand: Smallest publish time of what came and is not acknowledged; None = nothing is.
        """
        if connected_at is not None and at - connected_at >= self._lease_seconds:
            reached = now if oldest_in_hand is None else min(now, oldest_in_hand)
            if at - max(self._last_arrival_at, connected_at) < self._settle_seconds:
                if self._newest_published is None:
                    return self._mark
                reached = min(reached, self._newest_published)
            self._mark = reached - self._settle_seconds
        return self._mark
