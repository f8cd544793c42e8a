"""The URL of a Pub/Sub log, and its two ends: `pubsub://project/topic?subscription=name`.

The publisher needs only the topic, the monitor only the subscription (`<topic>-monitor` where none is named) and
`<subscription>-dead-letters`. Options: `create=true` makes what is missing, as always on Google's emulator;
`lease_seconds`, `settle_seconds` and `max_messages` as `subscriber.PubsubSettings` has them.
"""

from __future__ import annotations

from collections.abc import Callable

from components.logs.pubsub import resources
from components.logs.pubsub.publisher import PubsubPublisher
from components.logs.pubsub.resources import RESOURCE_NAME, Names, emulator, publisher_client, subscriber_client
from components.logs.pubsub.subscriber import PubsubSettings, PubsubSubscriber
from components.logs.urls import LogUrl

OPTIONS = ("subscription", "create", "lease_seconds", "settle_seconds", "max_messages")


def open_publisher(url: LogUrl) -> PubsubPublisher:
    """The writing end; with the right to publish alone, an absent topic is reported by the first `publish`.

    Raises:
        ContractError: the URL names no topic, or there are no credentials.
        TemporaryError, PermanentError: the topic was to be made and could not be.
    """
    names, settings, creates = _parse_url(url)
    client = publisher_client()
    if not creates:
        return PubsubPublisher(names, client)
    subscriber = subscriber_client()

    def create() -> None:
        # With its subscription: what is published to a topic without one is kept for nobody.
        resources.create(names, client, subscriber, lease_seconds=settings.lease_seconds)

    try:
        create()
    except BaseException:
        client.transport.close()
        subscriber.close()
        raise
    return PubsubPublisher(names, client, recreate=create, close=subscriber.close)


def open_subscriber(url: LogUrl, *, clock: Callable[[], float]) -> PubsubSubscriber:
    """The reading end.

    Raises:
        ContractError: the URL names no topic, there are no credentials, or the subscription is absent.
        TemporaryError, PermanentError: Pub/Sub cannot be reached, or refuses.
    """
    names, settings, creates = _parse_url(url)
    publisher, subscriber = publisher_client(), subscriber_client()

    def create() -> None:
        resources.create(names, publisher, subscriber, lease_seconds=settings.lease_seconds)

    try:
        if creates:
            create()
        resources.check(names, subscriber)
        return PubsubSubscriber(
            names,
            settings,
            publisher=publisher,
            subscriber=subscriber,
            recreate=create if creates else None,
            clock=clock,
        )
    except BaseException:
        publisher.transport.close()
        subscriber.close()
        raise


def _parse_url(url: LogUrl) -> tuple[Names, PubsubSettings, bool]:
    """What the URL names, how it is read, and whether what is missing is made."""
    expected = "expected pubsub://<project>/<topic>[?subscription=<name>]"
    url.expect_options(OPTIONS)
    names = Names(url.authority, url.path, url.options.get("subscription", f"{url.path}-monitor"))
    if not names.project or "/" in names.project:
        raise url.refuse(expected)
    for name in (names.topic, names.subscription, names.dead_letters.topic):
        if not RESOURCE_NAME.fullmatch(name):
            raise url.refuse(f"{expected}; {name!r} is no name of Pub/Sub's (3 to 255 characters, a letter first)")
    settings = PubsubSettings(
        lease_seconds=url.number("lease_seconds", PubsubSettings.lease_seconds),
        settle_seconds=url.number("settle_seconds", PubsubSettings.settle_seconds),
        max_messages=max(int(url.number("max_messages", PubsubSettings.max_messages)), 1),
    )
    if not 10 <= settings.lease_seconds <= 600:
        raise url.refuse("expected lease_seconds from 10 to 600, as Pub/Sub takes them")
    return names, settings, url.flag("create") or emulator() is not None
