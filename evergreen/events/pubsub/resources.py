"""Names of topics and subscriptions, Google's clients, and the publisher of a Pub/Sub log.

A log has one topic with one subscription, and another topic with one subscription for dead letters.
Pub/Sub itself also moves a message to the dead-letter topic after 100 unsuccessful deliveries. The
person who grants the permissions also creates the topics and subscriptions
(docs/kubernetes/gke.md). This module creates topics and subscriptions only on Google's emulator.

If `PUBSUB_EMULATOR_HOST` is set, the clients use the emulator without credentials, like Google's
own tools. Messages are sent in batches, and `publish` returns when Pub/Sub has confirmed all of
them. The caller (`inference_client.publisher`) chooses the messages, and handles outages of
Pub/Sub.
"""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import grpc
from google.api_core import exceptions
from google.api_core import retry as retries
from google.api_core.timeout import ConstantTimeout
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.cloud import pubsub_v1
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from evergreen.events.event_log import expect_size
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError, first_line

logger = logging.getLogger(__name__)

RESOURCE_NAME = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")
"""Valid resource names, from https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names"""
ID = "id"
"""Attribute with the message's id. Pub/Sub's own id changes when a message is published again."""
MAX_ATTRIBUTE_BYTES = 1024
"""Pub/Sub accepts attribute values of up to this number of bytes."""
CALL_SECONDS = 10.0
"""Timeout of one unary call in seconds."""
_RETRYABLE = (
    exceptions.Aborted,
    exceptions.Cancelled,
    exceptions.DeadlineExceeded,
    exceptions.InternalServerError,
    exceptions.ResourceExhausted,
    exceptions.ServiceUnavailable,
    exceptions.Unknown,
    exceptions.RetryError,
    FutureTimeoutError,
    TimeoutError,
    GoogleAuthError,
)
"""Errors that are retried: the errors that Google's library retries for pulls, and a failed refresh
of the token."""
_BATCH = pubsub_v1.types.BatchSettings(max_messages=1000, max_bytes=2_000_000, max_latency=0.01)
"""Limits of a batch. Pub/Sub accepts at most 1000 messages and 10 MB in a request, but a request of
8 MB timed out at a busy emulator. A batch below these limits is sent 10 ms after its first message.
"""
_CHANNEL = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


@dataclass(frozen=True)
class Names:
    """Names of the topic and the subscription of a log."""

    project: str
    topic: str
    subscription: str

    @property
    def topic_path(self) -> str:
        """Full name of the topic."""
        return f"projects/{self.project}/topics/{self.topic}"

    @property
    def subscription_path(self) -> str:
        """Full name of the subscription."""
        return f"projects/{self.project}/subscriptions/{self.subscription}"

    @property
    def dead_letters(self) -> "Names":
        """Names of the dead-letter topic and of its subscription.

        The topic and its subscription have the same name.
        """
        name = f"{self.subscription}-dead-letters"
        return Names(self.project, name, name)


def translated(error: BaseException, what: str) -> TemporaryError | PermanentError:
    """Return the project's error for `error`.

    The message names the operation or object in `what`.
    """
    text = f"{what}: {first_line(error)}"
    return TemporaryError(text) if isinstance(error, _RETRYABLE) else PermanentError(text)


# -- Clients.


def emulator() -> str | None:
    """Return the address of the emulator, or None if none is configured."""
    return os.environ.get("PUBSUB_EMULATOR_HOST") or None


def publisher_client(seconds: float = CALL_SECONDS) -> Any:
    """Return Google's batching publisher, which retries a failed request for up to `seconds`.

    Raises:
        ContractError: this machine has no credentials for Google Cloud.
    """
    retry = retries.Retry(
        predicate=retries.if_exception_type(*_RETRYABLE),
        initial=0.1,
        maximum=2.0,
        multiplier=2.0,
        timeout=seconds,
    )
    options = pubsub_v1.types.PublisherOptions(retry=retry, timeout=ConstantTimeout(seconds))
    return _make_client(
        pubsub_v1.PublisherClient,
        PublisherGrpcTransport,
        batch_settings=_BATCH,
        publisher_options=options,
    )


def subscriber_client() -> Any:
    """Return a client that reads and manages subscriptions.

    Raises the errors of `publisher_client`.
    """
    return _make_client(pubsub_v1.SubscriberClient, SubscriberGrpcTransport)


def _make_client(client: Any, transport: Any, **options: Any) -> Any:
    if address := emulator():
        # Use a separate channel, which reaches the emulator without the configured proxy.
        return client(
            transport=transport(channel=grpc.insecure_channel(address, options=_CHANNEL)), **options
        )
    try:
        return client(**options)
    except DefaultCredentialsError as error:
        raise ContractError(
            "Pub/Sub: no credentials found, expected a service account or `gcloud auth "
            "application-default login`"
        ) from error


# -- Topics and subscriptions.


def create_on_emulator(names: Names) -> None:
    """Create the missing topics and subscriptions on the emulator, which starts empty.

    Raises:
        TemporaryError, PermanentError: the emulator is unreachable, or refuses the call.
    """
    if emulator() is None:
        return
    publisher = publisher_client()
    with closing(publisher.transport), subscriber_client() as subscriber:
        for log in (names.dead_letters, names):
            subscription = {"name": log.subscription_path, "topic": log.topic_path}
            _create_unless_there(publisher.create_topic, {"name": log.topic_path})
            _create_unless_there(subscriber.create_subscription, subscription)


def check(names: Names, subscriber: Any) -> None:
    """Check that the log's subscriptions exist and read the right topics.

    If the permission `pubsub.subscriptions.get` is missing, nothing is checked, and the first read
    reports a problem.

    Raises:
        ContractError: a subscription is missing, or reads another topic.
        TemporaryError, PermanentError: Pub/Sub is unreachable, or refuses the call.
    """
    for log in (names, names.dead_letters):
        try:
            found = subscriber.get_subscription(
                request={"subscription": log.subscription_path}, retry=None, timeout=CALL_SECONDS
            )
        except exceptions.NotFound as error:
            raise ContractError(
                f"{log.subscription_path} does not exist, expected a subscription of "
                f"{log.topic_path}"
            ) from error
        except exceptions.PermissionDenied:
            logger.warning(
                "%s is not checked: permission to read it is missing", log.subscription_path
            )
            continue
        except Exception as error:
            raise translated(error, log.subscription_path) from error
        if found.topic != log.topic_path:
            raise ContractError(
                f"{log.subscription_path} reads {found.topic}, expected {log.topic_path}"
            )


def _create_unless_there(call: Any, request: dict[str, Any]) -> None:
    try:
        call(request=request, retry=None, timeout=CALL_SECONDS)
    except exceptions.AlreadyExists:
        return
    except Exception as error:
        raise translated(error, request["name"]) from error


class PubsubPublisher:
    """Publisher to one topic. Several threads may share one publisher."""

    def __init__(self, names: Names, client: Any) -> None:
        """Store a client from `resources.publisher_client`.

        Closing this publisher closes the client.
        """
        self._names = names
        self._client = client
        self._closed = False

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """See `event_log.Publisher`.

        The id is sent as an attribute, so it has at most 1024 bytes.
        """
        for message_id, payload in messages:
            expect_size(message_id, payload)
            if not 0 < len(message_id.encode()) <= MAX_ATTRIBUTE_BYTES:
                raise ContractError(
                    f"message id is {message_id[:40]!r}..., expected 1 to {MAX_ATTRIBUTE_BYTES} "
                    "bytes"
                )
        publish_all(
            self._client,
            self._names.topic_path,
            [(payload, {ID: message_id}) for message_id, payload in messages],
        )

    def close(self) -> None:
        """See `event_log.Publisher`.

        No message is pending, because `publish` waits for the confirmation.
        """
        if not self._closed:
            self._closed = True
            self._client.stop()
            self._client.transport.close()


def publish_all(
    client: Any,
    topic: str,
    messages: Sequence[tuple[bytes, Mapping[str, str]]],
    *,
    seconds: float = 2 * CALL_SECONDS,
) -> None:
    """Publish (data, attributes) messages, and wait until Pub/Sub has confirmed all of them.

    Raises:
        TemporaryError: at least one message was not confirmed within `seconds`. All confirmed
            messages are stored.
        PermanentError: Pub/Sub refuses at least one message permanently.
    """
    deadline = time.monotonic() + seconds
    futures = [client.publish(topic, data, **attributes) for data, attributes in messages]
    failures: dict[int, BaseException] = {}
    for future in futures:
        try:
            # Wait with a timeout, because some errors end the library's sending thread without
            # ending the futures.
            error = future.exception(timeout=max(deadline - time.monotonic(), 0.0))
        except FutureTimeoutError as too_late:
            error = too_late
        if error is not None:
            failures[id(error)] = error  # messages of one request share one error object
    found = [(translated(error, topic), error) for error in failures.values()]
    for failure, error in sorted(found, key=lambda pair: isinstance(pair[0], TemporaryError)):
        raise failure from error
