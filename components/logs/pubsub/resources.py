"""Topics and subscriptions: made on demand, or checked with a clear word about what is missing.

A log is one topic with one subscription, and beside them a topic with one subscription for messages set aside. The
latter is the dead-letter topic too: a message that Pub/Sub delivered 100 times in vain lands there by itself. Google's
emulator takes that policy and does not act on it, and knows no retention beyond a week, so there both are left out. In
production the resources are better made by whoever gives the rights; Pub/Sub's service account then needs to publish to
`<subscription>-dead-letters` and to subscribe to the subscription.
"""

from __future__ import annotations

import logging
from typing import Any

from google.api_core import exceptions
from google.protobuf.duration_pb2 import Duration

from components.logs.pubsub.clients import CALL_SECONDS, emulator
from components.logs.pubsub.errors import translated
from components.logs.pubsub.names import Names
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

RETENTION_SECONDS = 31 * 86_400
"""How long Pub/Sub keeps what nobody acknowledged: its longest; the default of 7 days ends with a long weekend."""
MAX_DELIVERY_ATTEMPTS = 100
"""Pub/Sub's most: a monitor that is killed again and again must not send good messages away."""


def create(names: Names, publisher: Any, subscriber: Any, *, lease_seconds: float) -> None:
    """Creates what is missing of the log; what is there stays as it is.

    Raises:
        TemporaryError, PermanentError: Pub/Sub cannot be reached, or refuses.
    """
    emulated = emulator() is not None
    for log, dead_letters in ((names.aside, None), (names, names.aside.topic_path)):
        _unless_there(publisher.create_topic, {"name": log.topic_path})
        request = subscription_request(log, lease_seconds=lease_seconds, dead_letters=dead_letters, emulated=emulated)
        _unless_there(subscriber.create_subscription, request)


def subscription_request(
    log: Names, *, lease_seconds: float, dead_letters: str | None, emulated: bool
) -> dict[str, Any]:
    """What the log's subscription is to be; `dead_letters` names the topic for what cannot be delivered."""
    request: dict[str, Any] = {
        "name": log.subscription_path,
        "topic": log.topic_path,
        "ack_deadline_seconds": min(max(round(lease_seconds), 10), 600),
        "expiration_policy": {},  # without a time to live: a subscription that rests for a month stays
        "enable_exactly_once_delivery": False,
        "enable_message_ordering": False,
    }
    if not emulated:
        request["message_retention_duration"] = Duration(seconds=RETENTION_SECONDS)
        if dead_letters is not None:
            request["dead_letter_policy"] = {
                "dead_letter_topic": dead_letters,
                "max_delivery_attempts": MAX_DELIVERY_ATTEMPTS,
            }
    return request


def check(names: Names, subscriber: Any) -> None:
    """Checks that the log's subscriptions are there and read the right topics.

    Without the right to look (`pubsub.subscriptions.get`) nothing is checked: reading will tell.

    Raises:
        ContractError: one is missing, or reads another topic.
        TemporaryError, PermanentError: Pub/Sub cannot be reached, or refuses.
    """
    for log in (names, names.aside):
        try:
            found = subscriber.get_subscription(
                request={"subscription": log.subscription_path}, retry=None, timeout=CALL_SECONDS
            )
        except exceptions.NotFound as error:
            raise ContractError(
                f"{log.subscription_path} does not exist, expected a subscription of {log.topic_path}: "
                "create it, or add create=true to the log's URL"
            ) from error
        except exceptions.PermissionDenied:
            logger.warning("%s: no right to look at it, so it is not checked", log.subscription_path)
            continue
        except Exception as error:
            raise translated(error, log.subscription_path) from error
        if found.topic != log.topic_path:
            raise ContractError(f"{log.subscription_path} reads {found.topic}, expected {log.topic_path}")


def _unless_there(call: Any, request: dict[str, Any]) -> None:
    try:
        call(request=request, retry=None, timeout=CALL_SECONDS)
    except exceptions.AlreadyExists:
        return
    except Exception as error:
        raise translated(error, request["name"]) from error
