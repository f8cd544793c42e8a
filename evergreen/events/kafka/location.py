"""Address of a Kafka log, configuration of its clients, and translation of Kafka's errors.

`KafkaLocation` turns the user's URL into librdkafka's configuration. `publisher` and `subscriber`
write and read the log.
"""

import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from evergreen.events.urls import LogUrl
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError, expect

_DEFAULT_GROUP = "evergreen-monitor"
_DEFAULT_LEASE_SECONDS = 45.0
"""Kafka's default session timeout. By default, brokers refuse a session timeout of less than 6
s."""
DEAD_LETTER_ENDING = ".dead-letters"
MAX_SENT_BYTES = 1_040_000
"""Largest message in bytes, with key and headers. The limit is more than `MAX_MESSAGE_BYTES`, and
less than a broker's default of 1,048,588."""

_CLIENT_LOGGER = logging.getLogger("evergreen.events.kafka.librdkafka")
# Drop the log line for each attempt to connect, which librdkafka writes 20 times per second. If no
# broker answers, `Subscriber.problem` describes the failure.
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
"""Errors that a person must fix. All other errors may disappear without a person's help."""


@dataclass(frozen=True, kw_only=True)
class _KafkaOptions:
    """Options of the URL of a Kafka log."""

    group: str = _DEFAULT_GROUP
    """The consumer group."""
    lease_seconds: float = _DEFAULT_LEASE_SECONDS
    """See `KafkaLocation`."""
    config: Path | None = None
    """File with settings of librdkafka, one `name=value` per line. Credentials belong in this file,
    not in the URL."""

    def __post_init__(self) -> None:
        expect(self, "a name", bool, "group")
        expect(self, "a number above 0", lambda value: 0 < value < math.inf, "lease_seconds")


@dataclass(frozen=True, kw_only=True)
class KafkaLocation:
    """One topic, the group that reads it, and the settings to reach both."""

    brokers: str
    """Comma-separated host:port addresses."""
    topic: str
    group: str = _DEFAULT_GROUP
    lease_seconds: float = _DEFAULT_LEASE_SECONDS
    """Seconds until the partitions of a killed reader go to other readers, and until an
    unacknowledged message of a running reader is delivered again."""
    delivery_seconds: float = 10.0
    """Seconds of retries after which publishing a message fails with a TemporaryError."""
    properties: dict[str, str] = field(default_factory=dict)
    """Further librdkafka settings, for example those of TLS and SASL."""

    @classmethod
    def parse(cls, url: LogUrl) -> "KafkaLocation":
        """Return the location of `url`, which has the form `kafka://host:port[,host:port]/topic`.

        A Kafka URL has the options of `_KafkaOptions`.

        Raises:
            ContractError: the URL has no broker, no topic or an unknown option, or names an
                unreadable file.
        """
        options = url.settings(_KafkaOptions)
        if "@" in url.authority:
            raise url.refuse("expected credentials in the file that the option config names")
        if not url.authority or not all(
            part.rpartition(":")[2].isdigit() for part in url.authority.split(",")
        ):
            raise url.refuse("expected kafka://host:port[,host:port]/topic")
        if not _TOPIC.fullmatch(url.path):
            raise url.refuse(
                "expected a topic of at most 230 letters, digits, '.', '_' and '-' after the "
                "brokers"
            )
        return cls(
            brokers=url.authority,
            topic=url.path,
            group=options.group,
            lease_seconds=options.lease_seconds,
            properties=_read_properties(options.config) if options.config is not None else {},
        )

    @property
    def dead_letter_topic(self) -> str:
        """Name of the topic of the dead letters."""
        return self.topic + DEAD_LETTER_ENDING

    def client(self, **settings: Any) -> dict[str, Any]:
        """Return the settings of one librdkafka client.

        `settings` override the settings of the file. In the names of `settings`, `_` stands for
        `.`.
        """
        ours = {name.replace("_", "."): value for name, value in settings.items()}
        return {
            "client.id": "evergreen",
            # Readers find new topics within 10 s. librdkafka's default is 5 minutes.
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
    """Return the project's error for an error of Kafka.

    The error message begins with `what`, which names the attempted operation.
    """
    inner = error.args[0] if isinstance(error, KafkaException) else error
    if not isinstance(inner, KafkaError):
        return PermanentError(f"{what}: {inner}")
    text = f"{what}: {inner.str()} ({inner.name()})"
    if inner.code() in _TOO_LARGE:
        return ContractError(text)
    return PermanentError(text) if inner.code() in _PERMANENT else TemporaryError(text)
