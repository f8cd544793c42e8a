"""From the client's publisher through Kafka into the monitor's archive, over a monitor that is killed in between."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo, raw_rows
from components.contracts.records import PredictionBatch
from inference_client.publisher import Outcome, RecordPublisher
from tests.support.kafka_cluster import KafkaCluster
from tests.support.log_benches import open_log
from tests.support.paths import REPOSITORY
from tests.support.recommenders import accept_into, criteo_with

ROWS, WAIT_SECONDS = 8, 120.0


def prediction(number: int) -> PredictionBatch:
    random = np.random.default_rng(number)
    return PredictionBatch(
        request_id=f"request-{number}",
        time=time.time(),
        model_version=1,
        dense=random.normal(0, 1, (ROWS, criteo.NUM_DENSE)).astype(np.float32),
        categorical=random.integers(0, 1000, (ROWS, criteo.NUM_CATEGORICAL), dtype=np.int64),
        scores=random.random(ROWS).astype(np.float32),
    )


def archived(folder: Path) -> list[tuple[str, int, int]]:
    """(request, row, label) of every archived row, read by pyarrow alone."""
    columns = [raw_rows.REQUEST_ID, raw_rows.ROW, raw_rows.LABEL]
    tables = [pq.ParquetFile(path).read(columns) for path in sorted((folder / "archive").glob("day=*/*.parquet"))]
    return [tuple(row[name] for name in columns) for table in tables for row in table.to_pylist()]


def wait_for(condition, process) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert process.poll() is None, "the monitor ended"
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def start_monitor(tmp_path):
    """Starts the monitor on a log, as a process; every one of them is gone at the end."""
    started: list[subprocess.Popen] = []

    accept_into(tmp_path / "store", criteo_with(monitor={"attribution_window_seconds": 2.0}))

    def start(url: str) -> subprocess.Popen:
        flags = {
            "log": url,
            "state": tmp_path / "state",
            "archive": tmp_path / "archive",
            "store": tmp_path / "store",
            "http-port": 0,
            "archive-roll-seconds": 0.5,
            "tick-seconds": 0.1,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        with open(tmp_path / "monitor.log", "ab") as log:
            started.append(
                subprocess.Popen([sys.executable, "-m", "monitoring", *words], cwd=REPOSITORY, stdout=log, stderr=log)
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_every_row_published_to_kafka_is_archived_once_though_the_monitor_is_killed(tmp_path, start_monitor):
    with KafkaCluster() as cluster:
        for topic in ("clicks", "clicks.dead-letters"):
            cluster.create_topic(topic, partitions=3)
        url = f"kafka://{cluster.brokers}/clicks?lease_seconds=2"
        log = open_log(url)
        publisher = RecordPublisher(log.publisher, source="test")

        def publish(begin: int) -> None:
            for number in range(begin, begin + 60):
                made = prediction(number)
                publisher.add(made, [Outcome(request_id=made.request_id, row=2, time=made.time)])
            asyncio.run(publisher.flush())

        first = start_monitor(url)
        publish(0)
        log.publisher.publish([("poison", b"\x00no record")])
        wait_for(lambda: len(archived(tmp_path)) > 0, first)
        publish(60)
        wait_for(lambda: (log.subscriber.backlog() or 0) < 50, first)
        os.kill(first.pid, signal.SIGKILL)
        first.wait(120)
        publish(120)
        second = start_monitor(url)
        wait_for(lambda: len(archived(tmp_path)) >= 180 * ROWS, second)
        expected = [(f"request-{n}", row, int(row == 2)) for n in range(180) for row in range(ROWS)]
        assert sorted(archived(tmp_path)) == sorted(expected)
        assert [(s.message_id, s.payload) for s in log.subscriber.list_dead_letters()] == [("poison", b"\x00no record")]
        wait_for(lambda: log.subscriber.backlog() == 0, second)
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
        log.close()
