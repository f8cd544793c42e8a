"""Test benches for the conformance suite, one for each log backend.

A bench opens a publisher and a reader of a new log, and can advance the clock of the log. Each
bench lists the features that its backend does not support. To test a new backend, add a subclass of
`Bench` to `BENCHES`. Leases run on an injected clock if the backend allows it. If a backend's clock
cannot be injected, tests wait for the server's clock, with a deadline.
"""

import itertools
import os
import time
import uuid
from typing import NamedTuple

from evergreen.events.event_log import Delivery, Publisher, Subscriber
from evergreen.events.kafka.location import KafkaLocation
from evergreen.events.kafka.publisher import KafkaPublisher
from evergreen.events.kafka.subscriber import KafkaSubscriber
from evergreen.events.locations import open_publisher, open_subscriber
from evergreen.events.pubsub import resources
from evergreen.events.pubsub.resources import (
    Names,
    PubsubPublisher,
    publisher_client,
    subscriber_client,
)
from evergreen.events.pubsub.subscriber import PubsubSettings, PubsubSubscriber
from evergreen.events.sqlite import SqliteLog
from testing.processes import wait_for
from tests.support.kafka_cluster import KafkaCluster
from tests.support.pubsub_emulator import Emulator

SECONDS = 120.0
"""Maximum time of every wait in seconds."""


def pull(*subscribers: Subscriber, count: int, seconds: float = SECONDS) -> list[Delivery]:
    """Pull from `subscribers` of one log until `count` messages have arrived."""
    got: list[Delivery] = []

    def enough() -> bool:
        for subscriber in subscribers:
            got.extend(subscriber.pull(count - len(got)) if len(got) < count else [])
        return len(got) >= count

    wait_for(enough, f"{count} messages", seconds=seconds)
    return got


class OpenLog(NamedTuple):
    """Publisher and reader of the log at a URL."""

    publisher: Publisher
    subscriber: Subscriber

    def close(self) -> None:
        self.publisher.close()
        self.subscriber.close()


def open_log(url: str) -> OpenLog:
    return OpenLog(open_publisher(url), open_subscriber(url))


class Bench:
    """A fresh log of one backend."""

    deduplicates = False
    """Whether the backend delivers one message if the same message was published twice."""
    knows_backlog = True
    handed_out_at_once = 1
    """Number of messages by which a pull may exceed its byte limit."""
    lease_seconds = 30.0
    environment: dict[str, str] = {}
    """Environment variables that another process needs to open the log at `url`."""

    def __init__(self) -> None:
        self._open: list[Publisher | Subscriber] = []
        self._sentinels = itertools.count()

    @property
    def url(self) -> str:
        """URL of the log for another process. The leases are as short as the backend allows."""
        raise NotImplementedError

    def publisher(self) -> Publisher:
        raise NotImplementedError

    def subscriber(self, *, most_in_hand: int = 1000) -> Subscriber:
        raise NotImplementedError

    def expire_leases(self) -> None:
        """Let the leases expire, so that unacknowledged messages are delivered again."""
        raise NotImplementedError

    def rest(self, subscriber: Subscriber) -> list[Delivery]:
        """Return all messages that are still in the log.

        Publish a marker message, return all messages that arrive before it, and acknowledge the
        marker.
        """
        name = f"sentinel-{next(self._sentinels)}"
        publisher = self.publisher()
        publisher.publish([(name, b"")])
        got: list[Delivery] = []

        def arrived() -> bool:
            got.extend(subscriber.pull(1000))
            return any(delivery.message_id == name for delivery in got)

        wait_for(arrived, "the sentinel")
        subscriber.acknowledge([d.token for d in got if d.message_id == name])
        return [d for d in got if d.message_id != name]

    def close(self) -> None:
        for end in self._open:
            end.close()


class SqliteBench(Bench):
    """Log in one SQLite file, with a clock that the test sets."""

    deduplicates = True

    def __init__(self, folder, server: None) -> None:
        super().__init__()
        self.path, self.passed = folder / "log with space.sqlite", 0.0

    @property
    def url(self) -> str:
        return f"sqlite:///{self.path}?lease_seconds=0.5".replace(" ", "%20")

    def _end(self) -> SqliteLog:
        self._open.append(
            SqliteLog(
                self.path, lease_seconds=self.lease_seconds, clock=lambda: time.time() + self.passed
            )
        )
        return self._open[-1]

    def publisher(self) -> SqliteLog:
        return self._end()

    def subscriber(self, *, most_in_hand: int = 1000) -> SqliteLog:
        return self._end()

    def expire_leases(self) -> None:
        self.passed += self.lease_seconds


class PubsubBench(Bench):
    """A separate topic on Google's emulator."""

    knows_backlog = False
    lease_seconds = 10.0

    def __init__(self, folder, server: Emulator) -> None:
        super().__init__()
        self.passed, self.environment = 0.0, {"PUBSUB_EMULATOR_HOST": server.address}
        os.environ.update(self.environment)
        self.names = Names("evergreen-test", f"log-{uuid.uuid4().hex[:8]}", "read-by-monitor")
        self.names = Names(self.names.project, self.names.topic, f"{self.names.topic}-monitor")
        self.create()

    @property
    def url(self) -> str:
        return (
            f"pubsub://{self.names.project}/{self.names.topic}?lease_seconds=10&settle_seconds=0.2"
        )

    def create(self) -> None:
        resources.create_on_emulator(self.names)

    def publisher(self) -> PubsubPublisher:
        self._open.append(PubsubPublisher(self.names, publisher_client()))
        return self._open[-1]

    def subscriber(self, *, most_in_hand: int = 1000) -> PubsubSubscriber:
        settings = PubsubSettings(
            lease_seconds=self.lease_seconds,
            settle_seconds=0.2,
            max_messages=most_in_hand,
            list_seconds=0.5,
        )
        self._open.append(
            PubsubSubscriber(
                self.names,
                settings,
                publisher=publisher_client(),
                subscriber=subscriber_client(),
                monotonic=lambda: time.monotonic() + self.passed,
            )
        )
        return self._open[-1]

    def expire_leases(self) -> None:
        """Release the messages that the readers have pulled, as if their leases had expired.

        A real lease lasts at least ten seconds.
        """
        for reader in self._open:
            if isinstance(reader, PubsubSubscriber) and not reader._closing.is_set():
                reader._set_lease(list(reader._pulled), 0)
        self.passed += self.lease_seconds

    def close(self) -> None:
        super().close()
        for name in self.environment:
            os.environ.pop(name, None)


class KafkaBench(Bench):
    """A topic of its own on librdkafka's mock cluster.

    A topic with one partition preserves the order of messages.

    The leases of a running reader expire by the reader's clock. The leases of a killed reader
    expire by the brokers' clock, and the next pulls wait until the leases have expired.
    """

    handed_out_at_once = 50
    lease_seconds = 2.0

    def __init__(self, folder, server: KafkaCluster) -> None:
        super().__init__()
        self.server, self.passed, topic = server, 0.0, f"log-{uuid.uuid4().hex[:8]}"
        for name in (topic, f"{topic}.dead-letters"):
            server.create_topic(name, partitions=1)
        self.location = KafkaLocation(
            brokers=server.brokers, topic=topic, group=topic, lease_seconds=self.lease_seconds
        )

    @property
    def url(self) -> str:
        at = self.location
        return f"kafka://{at.brokers}/{at.topic}?group={at.group}&lease_seconds={at.lease_seconds}"

    def publisher(self) -> KafkaPublisher:
        self._open.append(KafkaPublisher(self.location))
        return self._open[-1]

    def subscriber(self, *, most_in_hand: int = 1000) -> KafkaSubscriber:
        self._open.append(KafkaSubscriber(self.location, clock=lambda: time.time() + self.passed))
        return self._open[-1]

    def expire_leases(self) -> None:
        self.passed += self.lease_seconds


BENCHES: dict[str, type[Bench]] = {
    "sqlite": SqliteBench,
    "pubsub": PubsubBench,
    "kafka": KafkaBench,
}
