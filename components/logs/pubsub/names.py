"""What things are called in Pub/Sub: topic, subscription, and where messages are set aside.

Joins publisher, subscriber and whoever creates the resources; nothing here talks to a server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names
RESOURCE_NAME = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")

ID = "id"
"""Attribute that holds the message's id: Pub/Sub gives a message published again a new id of its own."""
REASON = "reason"
DEAD_LETTERED_AT = "dead_lettered_at"
"""Attribute of a message set aside: seconds since the epoch."""
MAX_ATTRIBUTE_BYTES = 1024
"""Longest value of an attribute that Pub/Sub takes."""


@dataclass(frozen=True)
class Names:
    """One log: what the publisher writes to and what the monitor reads from."""

    project: str
    topic: str
    subscription: str

    @property
    def topic_path(self) -> str:
        """The topic's full name."""
        return f"projects/{self.project}/topics/{self.topic}"

    @property
    def subscription_path(self) -> str:
        """The subscription's full name."""
        return f"projects/{self.project}/subscriptions/{self.subscription}"

    @property
    def aside(self) -> Names:
        """The log in which messages are kept apart, with one subscription of the same name."""
        name = f"{self.subscription}-dead-letters"
        return Names(self.project, name, name)


def cut(text: str) -> str:
    """`text` as an attribute takes it: its beginning where it is too long.

    >>> cut("short"), len(cut("é" * 1000).encode()) <= MAX_ATTRIBUTE_BYTES, cut("é" * 1000)[-3:]
    ('short', True, '...')
    """
    raw = text.encode()
    if len(raw) <= MAX_ATTRIBUTE_BYTES:
        return text
    return raw[: MAX_ATTRIBUTE_BYTES - 3].decode(errors="ignore") + "..."
