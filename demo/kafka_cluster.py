"""Run librdkafka's mock Kafka cluster with one topic of four partitions.

The cluster speaks Kafka's protocol on loopback, and loses all messages when it ends. A topic is
created when a producer requests it. This process requests the topic at its start, so that a reader
can connect before the first writer. The cluster stores 5 MB per partition and drops older messages,
even unread ones. This size suffices only if the monitor of the demo reads without a backlog.
"""

import signal
import threading
from pathlib import Path

from evergreen.runtime.durable import write_whole
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser

_START_SECONDS = 30.0


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Run the cluster until SIGTERM.

    The program writes the brokers as comma-separated host:port once they listen.
    """
    from confluent_kafka import Producer

    parser = CommandParser(prog="python -m demo.kafka_cluster", description=__doc__)
    parser.add_argument(
        "--address", type=Path, required=True, help="file to write the brokers' addresses to"
    )
    parser.add_argument("--topic", required=True, help="topic to create")
    arguments = parser.parse_args(argv)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # The mock cluster exists as long as this client.
    producer = Producer({"bootstrap.servers": "mock:1", "test.mock.num.brokers": 1})
    brokers = producer.list_topics(arguments.topic, timeout=_START_SECONDS).brokers.values()
    write_whole(
        arguments.address, ",".join(f"{broker.host}:{broker.port}" for broker in brokers) + "\n"
    )
    stop.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
