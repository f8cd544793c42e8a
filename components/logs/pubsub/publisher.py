"""The writing end on Pub/Sub: messages go in batches, and `publish` returns when Pub/Sub has confirmed every one.

Which messages, and what to do while Pub/Sub is away, is left to the caller (`inference_client.publisher`).
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from components.logs.event_log import expect_size
from components.logs.pubsub.resources import CALL_SECONDS, ID, MAX_ATTRIBUTE_BYTES, Names, translated
from components.runtime.errors import ContractError, TemporaryError


class PubsubPublisher:
    """Publishes to one topic; threads may share one."""

    def __init__(self, names: Names, client: Any) -> None:
        """Publishes through `client`, a `resources.publisher_client` that is closed with this."""
        self._names = names
        self._client = client
        self._closed = False

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """See `event_log.Publisher`; the id goes as an attribute, so it has at most 1024 bytes."""
        for message_id, payload in messages:
            expect_size(message_id, payload)
            if not 0 < len(message_id.encode()) <= MAX_ATTRIBUTE_BYTES:
                raise ContractError(f"message id is {message_id[:40]!r}..., expected 1 to {MAX_ATTRIBUTE_BYTES} bytes")
        publish_all(
            self._client,
            self._names.topic_path,
            [(payload, {ID: message_id}) for message_id, payload in messages],
        )

    def close(self) -> None:
        """See `event_log.Publisher`; nothing is left to send, since `publish` waits."""
        if not self._closed:
            self._closed = True
            self._client.stop()
            self._client.transport.close()


def publish_all(
    client: Any, topic: str, messages: Sequence[tuple[bytes, Mapping[str, str]]], *, seconds: float = 2 * CALL_SECONDS
) -> None:
    """Publishes (data, attributes) messages and waits until Pub/Sub has confirmed all.

    Raises:
        TemporaryError: at least one was not confirmed within `seconds`; others may be stored.
        PermanentError: Pub/Sub refuses at least one for ever.
    """
    deadline = time.monotonic() + seconds
    futures = [client.publish(topic, data, **attributes) for data, attributes in messages]
    failures: dict[int, BaseException] = {}
    for future in futures:
        try:
            # Bounded: the library's sending thread dies of some errors without ending the futures.
            error = future.exception(timeout=max(deadline - time.monotonic(), 0.0))
        except FutureTimeoutError as too_late:
            error = too_late
        if error is not None:
            failures[id(error)] = error  # the messages of one request share their error
    found = [(translated(error, topic), error) for error in failures.values()]
    for failure, error in sorted(found, key=lambda pair: isinstance(pair[0], TemporaryError)):
        raise failure from error
