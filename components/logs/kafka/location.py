"""The ends of the Kafka log that a URL names; what the URL holds is `place`'s."""

from __future__ import annotations

from collections.abc import Callable

from components.logs.kafka.place import KafkaPlace
from components.logs.kafka.publisher import KafkaPublisher
from components.logs.kafka.subscriber import KafkaSubscriber
from components.logs.urls import LogUrl


def open_publisher(url: LogUrl, *, clock: Callable[[], float]) -> KafkaPublisher:
    """The writing end of the topic at `url`; errors as `locations.open_publisher`."""
    return KafkaPublisher(KafkaPlace.parse(url))


def open_subscriber(url: LogUrl, *, clock: Callable[[], float]) -> KafkaSubscriber:
    """The reading end of the topic at `url`; errors as `locations.open_subscriber`."""
    return KafkaSubscriber(KafkaPlace.parse(url), clock=clock)
