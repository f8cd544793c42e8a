"""Tests of a partitioned log with a monitor and an uploader for each partition, over one lake."""

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections import Counter

import pytest

from evergreen.events.event_log import partition_of
from evergreen.events.locations import open_publisher, open_subscriber, partition_urls
from inference_client.publisher import Outcome, PartitionedPublisher, RecordPublisher
from monitoring.state.store import STORE_FILE
from monitoring.uploader import Uploader
from testing.paths import REPOSITORY
from testing.processes import wait_for
from testing.recommenders import SHOP, accept_into, shop_with
from tests.support.monitors import DRIFT, Bench, prediction, read_rows, traffic

PARTITIONS, WAVES, REQUESTS, ROWS = 3, 3, 30, 4


class Partitions:
    """A client that publishes to every partition, and a monitor process for each.

    The fixture stops the client and the monitors at the end of the test.
    """

    def __init__(self, folder) -> None:
        self.folder, self.lake = folder, folder / "lake"
        self.url = f"sqlite:///{folder}/log-{{0-{PARTITIONS - 1}}}.db?lease_seconds=1"
        self.logs = [open_publisher(url) for url in partition_urls(self.url)]
        self.client = PartitionedPublisher(
            [RecordPublisher(log, features=SHOP.features, source="test") for log in self.logs]
        )
        self.expected_labels: dict[tuple[str, int], int] = {}
        rules = {"attribution_window_seconds": 1.0, "decide_seconds": 0.1}
        accept_into(folder / "store", shop_with(monitor=rules))
        self.ended_starts = [0] * PARTITIONS
        self.monitors = [self.monitor(partition) for partition in range(PARTITIONS)]

    def starts(self, partition: int) -> int:
        """Return how often the partition's monitor has started."""
        path = self.folder / f"state-{partition}" / "events.jsonl"
        return path.read_text().count('"started"') if path.exists() else 0

    def kill(self, partition: int) -> None:
        """Kill a monitor with SIGKILL and start its successor."""
        self.monitors[partition].kill()
        self.monitors[partition].wait()
        self.ended_starts[partition] = self.starts(partition)
        self.monitors[partition] = self.monitor(partition)

    def monitor(self, partition: int) -> subprocess.Popen:
        state, archive = self.folder / f"state-{partition}", self.folder / f"archive-{partition}"
        argv = f"--log {self.url} --partition {partition} --state {state} --archive {archive}"
        argv += (
            f" --store {self.folder / 'store'} --http-port 0 --tick-seconds 0.05 "
            "--archive-roll-rows 100"
        )
        command = [sys.executable, "-m", "monitoring", *argv.split()]
        with open(self.folder / f"monitor-{partition}.log", "ab") as lines:
            return subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stderr=lines
            )

    def publish(self, wave: int) -> None:
        """Publish a wave of requests and their clicks.

        Row n of request k is clicked if k is divisible by n + 2. Each click is a separate message.
        """
        now = time.time()
        for number in range(REQUESTS):
            name = f"request {wave}-{number}"
            clicked = [row for row in range(ROWS) if number % (row + 2) == 0]
            assert self.client.add(prediction(name, ROWS, time=now))
            for row in clicked:
                self.client.add_outcome(Outcome(request_id=name, row=row, time=now))
            self.expected_labels |= {(name, row): int(row in clicked) for row in range(ROWS)}
        asyncio.run(self.client.drain())

    def taken_in(self, partition: int) -> bool:
        """Return whether the monitor has acknowledged every message."""
        subscriber = open_subscriber(partition_urls(self.url)[partition])
        try:
            return subscriber.backlog() == 0
        finally:
            subscriber.close()

    def matured(self, partition: int) -> int:
        """Return the number of rows whose labels are final."""
        path = self.folder / f"state-{partition}" / STORE_FILE
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
            (rows,) = store.execute(
                "SELECT coalesce(sum(value), 0) FROM counters WHERE name = 'matured'"
            ).fetchone()
            return int(rows)

    def end(self) -> list[int]:
        for process in self.monitors:
            process.terminate()
        return [process.wait(120) for process in self.monitors]


@pytest.fixture
def partitions(tmp_path):
    made = Partitions(tmp_path)
    yield made
    for process in made.monitors:
        process.kill()
        process.wait()
    for log in made.logs:
        log.close()


def test_every_row_is_in_lake_once_whichever_archivers_are_killed(partitions):
    p = partitions
    uploaders = [Uploader(p.folder / f"archive-{number}", p.lake) for number in range(PARTITIONS)]
    for wave in range(WAVES):
        p.publish(wave)
        # The kill comes in the middle of intake, join or archive, depending on the monitor's
        # progress.
        wait_for(lambda wave=wave: p.taken_in(wave), "a part of the wave")
        for victim in {wave, (wave + 1) % PARTITIONS}:
            p.kill(victim)
        for uploader in uploaders:
            uploader.run_once()
    wait_for(lambda: all(p.taken_in(number) for number in range(PARTITIONS)), "all records")
    wait_for(
        lambda: sum(map(p.matured, range(PARTITIONS))) == len(p.expected_labels), "the last labels"
    )
    wait_for(
        lambda: all(p.starts(n) > p.ended_starts[n] for n in range(PARTITIONS)), "the last monitors"
    )
    assert p.end() == [0] * PARTITIONS
    for uploader in uploaders:
        uploader.run_once()
    rows = read_rows(p.lake)
    assert len(rows) == len(p.expected_labels)
    assert {(row["request_id"], row["row"]): row["label"] for row in rows} == p.expected_labels
    # No partition was idle, and each monitor archived only the requests of its own partition.
    shares = Counter(partition_of(name, PARTITIONS) for name, _ in p.expected_labels)
    assert sorted(shares) == list(range(PARTITIONS))
    assert p.client.counts.published_rows == len(p.expected_labels)


@pytest.mark.parametrize(("partition", "requests"), [(0, 1), (1, 0)])
def test_only_monitor_of_first_partition_acts(tmp_path, partition, requests):
    b = Bench(tmp_path, log="sqlite:///unused-{0-1}", partition=partition, **DRIFT)
    b.start()
    traffic(b, "drifted", auc="bad")
    b.turn(5, 1.0)
    assert b.monitor.stop() is None
    assert len(b.archived) == 400
    assert len(b.trigger.requests) == requests
    # A monitor of another partition measures its own requests, and shows the metrics on its page.
    assert [kpis.auc for kpis in b.monitor._measurements.shown] == [pytest.approx(0.5, abs=0.1)]
    b.close()
