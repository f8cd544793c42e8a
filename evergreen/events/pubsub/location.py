"""URL of a Pub/Sub log (`pubsub://project/topic?subscription=name`), and functions to open it.

A publisher needs only the topic. The monitor needs only the subscription (by default
`<topic>-monitor`) and `<subscription>-dead-letters`. The options are those of `_PubsubOptions`. If
Google's emulator is used, missing topics and subscriptions are created.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from evergreen.events.pubsub.resources import (
    RESOURCE_NAME,
    Names,
    PubsubPublisher,
    check,
    create_on_emulator,
    publisher_client,
    subscriber_client,
)
from evergreen.events.pubsub.subscriber import PubsubSettings, PubsubSubscriber
from evergreen.events.urls import LogUrl
from evergreen.runtime.errors import expect


@dataclass(frozen=True, kw_only=True)
class _PubsubOptions:
    """Options of the URL of a Pub/Sub log."""

    subscription: str | None = None
    """Name of the subscription. None means `<topic>-monitor`."""
    lease_seconds: float = PubsubSettings.lease_seconds
    """See `PubsubSettings`."""
    settle_seconds: float = PubsubSettings.settle_seconds
    """See `PubsubSettings`."""

    def __post_init__(self) -> None:
        expect(
            self,
            "10 to 600, as Pub/Sub takes them",
            lambda value: 10 <= value <= 600,
            "lease_seconds",
        )
        expect(self, "a number above 0", lambda value: 0 < value < math.inf, "settle_seconds")


def open_publisher(url: LogUrl) -> PubsubPublisher:
    """Open the log for writing.

    An account that may only publish cannot check the topic. If the topic does not exist, the first
    `publish` reports this.

    Raises:
        ContractError: the URL names no topic, or there are no credentials.
        TemporaryError, PermanentError: the emulator's topic could not be created.
    """
    names, _ = _parse_url(url)
    # Create the subscription too, because a topic without a subscription drops its messages.
    create_on_emulator(names)
    return PubsubPublisher(names, publisher_client())


def open_subscriber(url: LogUrl, *, clock: Callable[[], float]) -> PubsubSubscriber:
    """Open the log for reading.

    Raises:
        ContractError: the URL has no topic, credentials are missing, or the subscription does not
            exist.
        TemporaryError, PermanentError: Pub/Sub is unreachable, or refuses the call.
    """
    names, settings = _parse_url(url)
    create_on_emulator(names)
    with subscriber_client() as client:
        check(names, client)
    return PubsubSubscriber(
        names, settings, publisher=publisher_client(), subscriber=subscriber_client(), clock=clock
    )


def _parse_url(url: LogUrl) -> tuple[Names, PubsubSettings]:
    """Return the topic and subscription that the URL names, and the settings of the reader."""
    expected = "expected pubsub://<project>/<topic>[?subscription=<name>]"
    options = url.settings(_PubsubOptions)
    names = Names(
        url.authority,
        url.path,
        f"{url.path}-monitor" if options.subscription is None else options.subscription,
    )
    if not names.project or "/" in names.project:
        raise url.refuse(expected)
    for name in (names.topic, names.subscription, names.dead_letters.topic):
        if not RESOURCE_NAME.fullmatch(name):
            raise url.refuse(
                f"{expected}; {name!r} is not a valid name in Pub/Sub (3 to 255 characters, a "
                "letter first)"
            )
    return names, PubsubSettings(
        lease_seconds=options.lease_seconds, settle_seconds=options.settle_seconds
    )
