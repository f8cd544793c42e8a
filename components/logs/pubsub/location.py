"""URL of a Pub/Sub log, and its two sides: `pubsub://project/topic?subscription=name`.

The publisher needs only the topic. The monitor needs only the subscription (by default
`<topic>-monitor`) and `<subscription>-dead-letters`. The options `lease_seconds` and
`settle_seconds` are those of `subscriber.PubsubSettings`. On Google's emulator missing topics and
subscriptions are created.
"""

from collections.abc import Callable

from components.logs.pubsub.resources import (
    RESOURCE_NAME,
    Names,
    PubsubPublisher,
    check,
    create_on_emulator,
    publisher_client,
    subscriber_client,
)
from components.logs.pubsub.subscriber import PubsubSettings, PubsubSubscriber
from components.logs.urls import LogUrl

OPTIONS = ("subscription", "lease_seconds", "settle_seconds")


def open_publisher(url: LogUrl) -> PubsubPublisher:
    """Open the log for writing.

    If the account may only publish, the first `publish` reports a missing topic.

    Raises:
        ContractError: the URL names no topic, or there are no credentials.
        TemporaryError, PermanentError: the emulator's topic could not be created.
    """
    names, _ = _parse_url(url)
    # Create the subscription too, because a topic without one drops its messages.
    create_on_emulator(names)
    return PubsubPublisher(names, publisher_client())


def open_subscriber(url: LogUrl, *, clock: Callable[[], float]) -> PubsubSubscriber:
    """Open the log for reading.

    Raises:
        ContractError: the URL names no topic, there are no credentials, or the subscription is
            missing.
        TemporaryError, PermanentError: Pub/Sub is unreachable, or refuses.
    """
    names, settings = _parse_url(url)
    create_on_emulator(names)
    with subscriber_client() as client:
        check(names, client)
    return PubsubSubscriber(names, settings, publisher=publisher_client(), subscriber=subscriber_client(), clock=clock)


def _parse_url(url: LogUrl) -> tuple[Names, PubsubSettings]:
    """Return the topic and subscription that the URL names, and the settings of the reader."""
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
    )
    if not 10 <= settings.lease_seconds <= 600:
        raise url.refuse("expected lease_seconds from 10 to 600, as Pub/Sub takes them")
    return names, settings
