"""How much of a topic its group has not ended, over all partitions, this reader's and others'.

Joins what this reader knows (`progress`) to what the brokers answer (`desk`), and notes when they do not answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from components.logs.kafka.desk import Desk
from components.logs.kafka.place import KafkaPlace
from components.logs.kafka.progress import Progress
from components.runtime.errors import PermanentError, TemporaryError

ASK_AGAIN_SECONDS = 1.0
"""After a question that nobody answered: each may wait for `desk.ASK_SECONDS`, and the reader has more to do."""
PARTITIONS_SECONDS = 10.0
"""How long the list of partitions is remembered."""


class Reach:
    """Asks about one topic for one reader."""

    def __init__(self, place: KafkaPlace) -> None:
        self._place = place
        self._desk = Desk(place, topic=place.topic, group=place.group)
        self._silent_until = 0.0
        self._asked_at, self._partitions = 0.0, list[int]()
        self.problem: str | None = None
        """What the newest question met, or what the reader's client said since; None = answered."""

    def unfinished(self, progress: Mapping[int, Progress[Any]]) -> int | None:
        """Messages that are neither acknowledged nor set aside; None where no broker answers.

        In a partition of this reader (a key of `progress`) those are held or not yet come; in any other they lie beyond
        what the group has committed.
        """
        if time.monotonic() < self._silent_until:
            return None
        try:
            partitions = self._all_partitions()
            ends = self._desk.ends(partitions)
            starts = self._desk.committed(
                [p for p in partitions if p not in progress or progress[p].next_offset is None]
            )
        except (TemporaryError, PermanentError) as error:
            self.problem = str(error)
            self._silent_until = time.monotonic() + ASK_AGAIN_SECONDS
            return None
        self.problem = None
        if not partitions:
            self.problem = f"topic {self._place.topic} does not exist at {self._place.brokers}"
            return None
        unknown = Progress[Any](0)
        return sum(progress.get(p, unknown).unfinished(starts.get(p, 0), ends[p]) for p in partitions)

    def close(self) -> None:
        """Ends the client."""
        self._desk.close()

    def _all_partitions(self) -> list[int]:
        if not self._partitions or time.monotonic() > self._asked_at + PARTITIONS_SECONDS:
            self._partitions, self._asked_at = self._desk.partitions(), time.monotonic()
        return self._partitions
