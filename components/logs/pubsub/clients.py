"""Google's clients as this log uses them: batching, timeouts, and the emulator reached past any proxy.

Where `PUBSUB_EMULATOR_HOST` is set, the library talks to the emulator without credentials, as everywhere with Google's
tools. Which resources the clients work on is left to the callers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc
from google.api_core import retry as retries
from google.api_core.timeout import ConstantTimeout
from google.auth.exceptions import DefaultCredentialsError
from google.cloud import pubsub_v1
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from components.logs.pubsub.errors import RETRYABLE
from components.runtime.errors import ContractError

CALL_SECONDS = 10.0
"""Longest that one unary call waits."""
_BATCH = pubsub_v1.types.BatchSettings(max_messages=1000, max_bytes=2_000_000, max_latency=0.01)
"""A request takes 1000 messages and 10 MB at most, but a request of 8 MB timed out at a busy emulator; whatever is
smaller goes 10 ms after its first message."""
_CHANNEL = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


def emulator() -> str | None:
    """Address of the emulator, where one is to be used."""
    return os.environ.get("PUBSUB_EMULATOR_HOST") or None


class WatchedSubscriberClient(pubsub_v1.SubscriberClient):  # type: ignore[misc]  # the library has no types
    """A subscriber client that shows each call of a streaming pull: the library opens one after another by itself."""

    on_stream: Callable[[Any], None] = staticmethod(lambda call: None)
    """Called with each new call, a `grpc.Call`."""

    def streaming_pull(self, *args: Any, **kwargs: Any) -> Any:
        """The library's streaming pull."""
        call = super().streaming_pull(*args, **kwargs)
        self.on_stream(call)
        return call


def publisher_client(seconds: float = CALL_SECONDS) -> Any:
    """A batching publisher that repeats a failed request for at most `seconds`.

    Raises:
        ContractError: this machine has no credentials for Google Cloud.
    """
    retry = retries.Retry(
        predicate=retries.if_exception_type(*RETRYABLE), initial=0.1, maximum=2.0, multiplier=2.0, timeout=seconds
    )
    options = pubsub_v1.types.PublisherOptions(retry=retry, timeout=ConstantTimeout(seconds))
    return _made(pubsub_v1.PublisherClient, PublisherGrpcTransport, batch_settings=_BATCH, publisher_options=options)


def subscriber_client() -> Any:
    """A client for streaming pull; errors as `publisher_client`'s."""
    return _made(WatchedSubscriberClient, SubscriberGrpcTransport)


def _made(client: Any, transport: Any, **options: Any) -> Any:
    if address := emulator():
        return client(transport=transport(channel=grpc.insecure_channel(address, options=_CHANNEL)), **options)
    try:
        return client(**options)
    except DefaultCredentialsError as error:
        raise ContractError(
            "Pub/Sub: no credentials found, expected a service account or `gcloud auth application-default login`"
        ) from error
