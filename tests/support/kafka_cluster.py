"""librdkafka's mock cluster: in-process brokers that speak Kafka's protocol and can be stopped.

confluent-kafka's own switch, `test.mock.num.brokers`, starts the same cluster but cannot stop a
broker. librdkafka can stop one broker (`rd_kafka_mock_broker_set_down`), so this module calls
librdkafka directly.
"""

import ctypes
from pathlib import Path

import confluent_kafka
import pytest

BROKERS = 2
_PRODUCER = 0
_POINTER = ctypes.c_void_p
_SIGNATURES = {
    "rd_kafka_conf_new": (_POINTER, []),
    "rd_kafka_conf_set": (ctypes.c_int, [_POINTER, *[ctypes.c_char_p] * 3, ctypes.c_size_t]),
    "rd_kafka_new": (_POINTER, [ctypes.c_int, _POINTER, ctypes.c_char_p, ctypes.c_size_t]),
    "rd_kafka_destroy": (None, [_POINTER]),
    "rd_kafka_mock_cluster_new": (_POINTER, [_POINTER, ctypes.c_int]),
    "rd_kafka_mock_cluster_destroy": (None, [_POINTER]),
    "rd_kafka_mock_cluster_bootstraps": (ctypes.c_char_p, [_POINTER]),
    "rd_kafka_mock_topic_create": (
        ctypes.c_int,
        [_POINTER, ctypes.c_char_p, ctypes.c_int, ctypes.c_int],
    ),
    "rd_kafka_mock_topic_set_error": (None, [_POINTER, ctypes.c_char_p, ctypes.c_int]),
    "rd_kafka_mock_group_initial_rebalance_delay_ms": (None, [_POINTER, ctypes.c_int32]),
    "rd_kafka_mock_broker_set_down": (ctypes.c_int, [_POINTER, ctypes.c_int32]),
    "rd_kafka_mock_broker_set_up": (ctypes.c_int, [_POINTER, ctypes.c_int32]),
}


def _library() -> ctypes.CDLL:
    folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
    paths = list(folder.glob("librdkafka-*"))
    if not paths:  # only Linux wheels have a folder with librdkafka
        pytest.skip("no librdkafka beside confluent-kafka, whose mock cluster the tests need")
    library = ctypes.CDLL(str(paths[0]))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class KafkaCluster:
    """A context manager with a cluster of `BROKERS` brokers."""

    def __init__(self) -> None:
        self._library = library = _library()
        error = ctypes.create_string_buffer(512)
        settings = library.rd_kafka_conf_new()
        library.rd_kafka_conf_set(settings, b"log_level", b"0", error, len(error))
        self._client = library.rd_kafka_new(_PRODUCER, settings, error, len(error))
        assert self._client, error.value
        self._cluster = library.rd_kafka_mock_cluster_new(self._client, BROKERS)
        # A group's first rebalance waits 3 s for more readers, as in a real broker.
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)
        self.brokers: str = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def create_topic(self, name: str, *, partitions: int = 4) -> None:
        assert (
            self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
            == 0
        )

    def refuse_topic(self, name: str, error: int) -> None:
        """Answer every request about the topic with the Kafka error code `error`.

        A call with the error code 0 restores normal answers.
        """
        self._library.rd_kafka_mock_topic_set_error(self._cluster, name.encode(), error)

    def stop_brokers(self) -> None:
        """Close the port and the connections of every broker.

        The messages that the brokers store remain.
        """
        for number in range(1, BROKERS + 1):
            assert self._library.rd_kafka_mock_broker_set_down(self._cluster, number) == 0

    def start_brokers(self) -> None:
        for number in range(1, BROKERS + 1):
            assert self._library.rd_kafka_mock_broker_set_up(self._cluster, number) == 0

    def close(self) -> None:
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)

    def __enter__(self) -> "KafkaCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
