"""Tests of clicks that arrive after their row was archived, from the monitor to extraction.

The simulated stream contains the expected labels. A row is clicked if a click happened within the
attribution window, however late and often the log delivers the click. Neither the monitor nor
training uses a click after the window.
"""

import random
from collections import Counter
from itertools import groupby

import pytest

from evergreen.contracts.manifests import RawDataset
from evergreen.contracts.records import CLICK, CONVERSION, OutcomeBatch, PredictionBatch
from evergreen.storage.objects import download
from evergreen.storage.uris import open_objects
from monitoring.uploader import Uploader
from tests.support import monitors
from tests.support.lakes import extract_by_command, rows_in

BEGIN = 1_767_225_400.0  # One midnight passes while rows arrive, another while clicks arrive.
WINDOW, STEP, ROWS, NUM_REQUESTS = 30.0, 15.0, 5, 60
OTHERS = ["at the end", "both", "just late", "clicked late", "days late", "converted"]


def prediction(number: int) -> PredictionBatch:
    return monitors.prediction(f"request {number:02}", ROWS, time=BEGIN + 5 * number, version=3)


class Stream:
    """Messages with their publishing times, and the clicked rows."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.predictions = [prediction(number) for number in range(NUM_REQUESTS)]
        self.messages = [(batch.time + 0.5, batch) for batch in self.predictions]
        self.clicked: set[tuple[str, int]] = set()
        self.kinds: Counter[str] = Counter()
        for batch in self.predictions:
            for row in range(ROWS):
                kind = source.choice(
                    ["none"] * 5 + ["in time", "reported late", "reported late", *OTHERS]
                )
                self.kinds[kind] += 1
                delays = {
                    "clicked late": 200.0,
                    "just late": WINDOW + 1e-6,
                    "days late": 86_400.0,
                    "at the end": WINDOW,
                }
                happened = batch.time + delays.get(kind, source.uniform(1, 20))
                reported = happened + (
                    120.0 if kind in ("reported late", "at the end", "both") else 1.0
                )
                if kind == "none":
                    continue
                event = CONVERSION if kind == "converted" else CLICK
                if kind == "both":
                    # Store a later click before an earlier click. Only the earlier click is used.
                    self.messages.append(
                        (reported - 60.0, self.outcome(batch, row, reported - 61.0, event))
                    )
                for _ in range(source.choice([1, 1, 2])):
                    self.messages.append((reported, self.outcome(batch, row, happened, event)))
                if event == CLICK and kind not in ("just late", "clicked late", "days late"):
                    self.clicked.add((batch.request_id, row))
        self.messages.sort(key=lambda message: message[0])

    def outcome(self, batch: PredictionBatch, row: int, time: float, event: str) -> OutcomeBatch:
        return monitors.clicks(
            f"outcome {len(self.messages)}", [(batch.request_id, row, time)], event
        )


class LateBench(monitors.Bench):
    """One monitor with its archive and its lake."""

    def __init__(self, folder, lake: str) -> None:
        window = {
            "attribution_window_seconds": WINDOW,
            "archive_roll_rows": 40,
            "archive_roll_seconds": 60.0,
        }
        super().__init__(folder, **window)
        self.lake, self.clock.now = lake, BEGIN
        self.start()

    def run(self, messages, until: float) -> None:
        """Publish the messages and run the monitor, in steps of `STEP` seconds up to `until`."""
        for number, group in groupby(
            messages, key=lambda message: int((message[0] - BEGIN) // STEP)
        ):
            # While no messages are published, the clock moves in steps of an hour.
            while self.clock.now + 100 * STEP < BEGIN + number * STEP:
                self.clock.now += (
                    3600 if BEGIN + number * STEP - self.clock.now > 3700 else 10 * STEP
                )
                self.monitor.tick()
            self.clock.now = max(self.clock.now, BEGIN + (number + 1) * STEP)
            monitors.publish(self.log, *(record for _, record in group))
            self.monitor.tick()
        self.clock.now = max(self.clock.now, until)
        self.monitor.tick()

    def upload(self) -> None:
        Uploader(self.settings.archive, open_objects(self.lake), clock=self.clock).run_once()

    def end(self) -> None:
        self.monitor.stop()
        self.upload()
        self.close()


def extracted(folder, lake, *, run: str) -> tuple[RawDataset, dict]:
    raw = extract_by_command(folder, lake, run=run, replay_days=0)
    rows = rows_in(raw.train_uri, raw.holdout_uri)
    labels = {(row["request_id"], row["row"]): row["label"] for row in rows}
    assert len(labels) == len(rows)
    return raw, labels


def download_all_of(lake: str, folder) -> None:
    """Download the bucket's objects into `folder`, with the layout of a mounted bucket."""
    objects = open_objects(lake)
    for each in objects.list():
        download(objects, each.name, folder / each.name)


@pytest.mark.parametrize(("kind", "seed"), [("folder", 1), ("bucket", 2)])
def test_labels_equal_those_of_stream_however_late_its_clicks_arrived(
    tmp_path, request, kind, seed
):
    if kind == "bucket":
        request.getfixturevalue("cloud_storage")
    lake = str(tmp_path / "a lake") if kind == "folder" else "gs://models/a lake"
    stream, bench = Stream(seed), LateBench(tmp_path, lake)
    bench.run(stream.messages, until=BEGIN + 90_000)
    bench.end()
    if kind == "bucket":
        lake = str(tmp_path / "mounted")
        download_all_of("gs://models/a lake", tmp_path / "mounted")
    raw, labels = extracted(tmp_path, lake, run="all")
    assert labels == {
        (p.request_id, row): int((p.request_id, row) in stream.clicked)
        for p in stream.predictions
        for row in range(ROWS)
    }
    late = sum(stream.kinds[kind] for kind in ("reported late", "at the end", "both"))
    assert late > 50
    assert all(stream.kinds[kind] > 5 for kind in OTHERS)
    assert raw.num_late_clicks == late, "clicks that arrived in time must not count as late"
    assert (raw.num_duplicates, raw.num_malformed) == (0, 0)
