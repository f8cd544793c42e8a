"""Where a Kafka log is and how its clients are set up; Kafka's errors, sorted into ours.

Joins the URL that the user gives to librdkafka's configuration. Writing and reading are left to `publisher` and
`subscriber`.
"""

import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from components.logs.urls import LogUrl
from components.runtime.errors import ContractError, PermanentError, TemporaryError, expect

DEFAULT_GROUP = "evergreen-monitor"
DEFAULT_LEASE_SECONDS = 45.0
"""Kafka's own default session timeout; brokers refuse less than 6 s unless told otherwise."""
DEAD_LETTER_ENDING = ".dead-letters"
MAX_SENT_BYTES = 1_040_000
"""Largest message with key and headers: more than `MAX_MESSAGE_BYTES`, less than a broker's default of 1,048,588."""

_CLIENT_LOGGER = logging.getLogger("components.logs.kafka.librdkafka")
# One line for every attempt to connect, 20 a second; `Subscriber.problem` says when no broker answers.
_CLIENT_LOGGER.addFilter(lambda record: not record.getMessage().startswith("FAIL ["))
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,230}")
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
_PERMANENT = {
    KafkaError._AUTHENTICATION,
    KafkaError._FATAL,
    KafkaError._INVALID_ARG,
    KafkaError._SSL,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.INVALID_REQUIRED_ACKS,
    KafkaError.POLICY_VIOLATION,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.UNSUPPORTED_VERSION,
}
"""What somebody has to change; every other error may end by itself."""


@dataclass(frozen=True, kw_only=True)
class KafkaOptions:
    """Options of the URL of a Kafka log."""

    group: str = DEFAULT_GROUP
    """The consumer group."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    """See `KafkaLocation`."""
    config: Path | None = None
    """File of `name=value` lines with librdkafka's settings, where credentials belong."""

    def __post_init__(self) -> None:
        expect(self, "a name", bool, "group")
        expect(self, "a number above 0", lambda value: 0 < value < math.inf, "lease_seconds")


@dataclass(frozen=True, kw_only=True)
class KafkaLocation:
    """One topic, the group that reads it, and how to reach both."""

    brokers: str
    """host:port, comma-separated."""
    topic: str
    group: str = DEFAULT_GROUP
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    """How long a killed reader keeps its partitions, and a living one a message that it does not acknowledge."""
    delivery_seconds: float = 10.0
    """How long one message is tried before publishing it has failed for now."""
    properties: dict[str, str] = field(default_factory=dict)
    """Further settings of librdkafka, such as those of TLS and SASL."""

    @classmethod
    def parse(cls, url: LogUrl) -> "KafkaLocation":
        """The location that `url` names, `kafka://host:port[,host:port]/topic`.

        Its options are those of `KafkaOptions`.

        Raises:
            ContractError: no broker, no topic, an unknown option, or a file that cannot be read.
        """
        options = url.settings(KafkaOptions)
        if "@" in url.authority:
            raise url.refuse("expected credentials in the file that the option config names")
        if not url.authority or not all(part.rpartition(":")[2].isdigit() for part in url.authority.split(",")):
            raise url.refuse("expected kafka://host:port[,host:port]/topic")
        if not _TOPIC.fullmatch(url.path):
            raise url.refuse("expected a topic of at most 230 letters, digits, '.', '_' and '-' after the brokers")
        return cls(
            brokers=url.authority,
            topic=url.path,
            group=options.group,
            lease_seconds=options.lease_seconds,
            properties=_read_properties(options.config) if options.config is not None else {},
        )

    @property
    def dead_letter_topic(self) -> str:
        """Where dead letters are kept."""
        return self.topic + DEAD_LETTER_ENDING

    def client(self, **settings: Any) -> dict[str, Any]:
        """Settings of one librdkafka client; `settings` are written with `_` for `.` and win over the file's."""
        ours = {name.replace("_", "."): value for name, value in settings.items()}
        return {
            "client.id": "evergreen",
            # A topic made after its reader is found within this; librdkafka's default is 5 minutes.
            "topic.metadata.refresh.interval.ms": 10_000,
            "logger": _CLIENT_LOGGER,
            **self.properties,
            "bootstrap.servers": self.brokers,
            **ours,
        }


def _read_properties(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ContractError(
            f"config is {str(path)!r}, expected a file of name=value lines: {error.strerror}"
        ) from error
    properties = {}
    for line in lines:
        name, sign, value = line.strip().partition("=")
        if sign and not name.startswith("#"):
            properties[name.strip()] = value.strip()
        elif name and not name.startswith("#"):
            raise ContractError(f"config {path} holds a line without '=', expected name=value")
    return properties


def sorted_error(error: KafkaError | KafkaException, what: str) -> Exception:
    """The error of ours that Kafka's means; `what` says what was attempted, and begins the message."""
    inner = error.args[0] if isinstance(error, KafkaException) else error
    if not isinstance(inner, KafkaError):
        return PermanentError(f"{what}: {inner}")
    text = f"{what}: {inner.str()} ({inner.name()})"
    if inner.code() in _TOO_LARGE:
        return ContractError(text)
    return PermanentError(text) if inner.code() in _PERMANENT else TemporaryError(text)
