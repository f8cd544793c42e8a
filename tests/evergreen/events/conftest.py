"""A fresh log of every backend, and the servers that some backends need."""

from collections.abc import Iterator

import pytest

from evergreen.runtime.errors import ContractError
from tests.support.kafka_cluster import KafkaCluster
from tests.support.log_benches import BENCHES, Bench
from tests.support.pubsub_emulator import Emulator


@pytest.fixture(scope="session")
def pubsub_server(tmp_path_factory) -> Iterator[Emulator]:
    """Google's Pub/Sub emulator, from the Cloud SDK if the SDK is installed.

    The emulator takes 5 s to start.
    """
    try:
        emulator = Emulator(tmp_path_factory.mktemp("pubsub"))
    except ContractError as error:
        pytest.skip(str(error))
    try:
        emulator.start()
        yield emulator
    finally:
        emulator.stop()


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaCluster]:
    """librdkafka's mock cluster."""
    with KafkaCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def sqlite_server() -> None:
    """The SQLite log needs no server."""


@pytest.fixture(params=BENCHES, ids=str)
def bench(request, tmp_path) -> Iterator[Bench]:
    bench = BENCHES[request.param](tmp_path, request.getfixturevalue(f"{request.param}_server"))
    try:
        yield bench
    finally:
        bench.close()


@pytest.fixture
def publisher(bench):
    return bench.publisher()


@pytest.fixture
def subscriber(bench):
    return bench.subscriber()
