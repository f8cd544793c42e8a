"""Measure the cost of publishing 10,000 requests per second, in the process that scores them.

Run by `make benchmark-publishing`. One process adds records and clicks at a steady rate, as a
service does after each response. In the background, the process publishes the records to an SQLite
log with fsync, in one or in four partitions. The figures are the durations of `add` and
`add_outcome`, and the delay of a one-millisecond timer in the event loop. A request to the service
would wait for this delay. For comparison, the same figures are measured with a publisher that drops
its records. The two publishers take turns.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import benchmark_parser, documented
from benchmarks.monitor import RecordTraffic
from benchmarks.spread import Figure, spread
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.records import PredictionBatch
from evergreen.events.locations import open_publisher, partition_urls
from inference_client.publisher import Outcome, PartitionedPublisher, RecordPublisher

RATE = 10_000
"""Requests per second."""
CLICKED_EACH = 30
"""Number of requests per click. A click follows its request at once."""


class Nothing:
    """Publisher that drops all records."""

    def add(self, prediction: PredictionBatch) -> bool:
        """Accept the record without publishing it."""
        return True

    def add_outcome(self, outcome: Outcome) -> bool:
        """Drop the outcome."""
        return True


async def add_records(
    publisher: Any, records: Sequence[PredictionBatch], seconds: float
) -> dict[str, Any]:
    """Add `RATE` records per second, and return the durations.

    All records of a millisecond are added at once.
    """
    took, late, dropped = [], [], 0
    began_cpu, began = time.process_time(), time.perf_counter()
    for number in range(int(RATE * seconds)):
        due = began + number / RATE
        if number % (RATE // 1000) == 0:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            late.append(max(time.perf_counter() - due, 0))
        record = replace(
            records[number % len(records)], request_id=f"request-{number:012d}", time=time.time()
        )
        start = time.perf_counter()
        dropped += not publisher.add(record)
        if number % CLICKED_EACH == 0:
            publisher.add_outcome(Outcome(request_id=record.request_id, time=record.time))
        took.append(time.perf_counter() - start)
    elapsed = time.perf_counter() - began
    return {
        "hand_over_microseconds": _percentiles(took, 1e6),
        "loop_late_milliseconds": _percentiles(late, 1e3),
        "requests_per_second": len(took) / elapsed,
        "cpu_share": (time.process_time() - began_cpu) / elapsed,
        "dropped": dropped,
    }


def _percentiles(values: Sequence[float], scale: float) -> dict[str, float]:
    p50, p99, p999 = np.percentile(values, [50, 99, 99.9]) * scale
    return {"p50": p50, "p99": p99, "p99.9": p999, "most": max(values) * scale}


async def measure(rows: int, *, partitions: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one run. If `partitions` is 0, nothing is published."""
    records = RecordTraffic(rows).records
    if not partitions:
        return {"rows": rows, "partitions": 0, **await add_records(Nothing(), records, seconds)}
    with tempfile.TemporaryDirectory() as folder:
        logs = [
            open_publisher(url)
            for url in partition_urls(f"sqlite:///{Path(folder)}/log-{{0-{partitions - 1}}}.db")
        ]
        publisher = PartitionedPublisher(
            [RecordPublisher(log, features=CRITEO, source="benchmark") for log in logs]
        )
        running = asyncio.ensure_future(publisher.run())
        measured = await add_records(publisher, records, seconds)
        queued = publisher.counts.queued_rows / rows
        began = time.perf_counter()
        await publisher.drain()
        await running
        drained, counts = time.perf_counter() - began, publisher.counts
        for log in logs:
            log.close()
    assert counts.published_rows + counts.dropped_rows == rows * int(RATE * seconds)
    return {
        "rows": rows,
        "partitions": partitions,
        **measured,
        "queued_at_the_end": queued,
        "drain_seconds": drained,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases one after another, and return 0."""
    parser = benchmark_parser(
        "publishing", __doc__, quick="2 seconds each in place of 10, once in place of three times"
    )
    flags = parser.parse_args(argv)
    seconds, rounds = (2.0, 1) if flags.quick else (10.0, 3)
    with documented(flags) as document:
        runs = document["runs"] = []
        for _ in range(rounds):
            for rows, partitions in ((1, 0), (1, 1), (1, 4), (16, 0), (16, 1)):
                runs.append(asyncio.run(measure(rows, partitions=partitions, seconds=seconds)))
                _print_run(runs[-1])
        for rows, partitions in dict.fromkeys((run["rows"], run["partitions"]) for run in runs):
            of_kind = [
                run for run in runs if (run["rows"], run["partitions"]) == (rows, partitions)
            ]
            name = (
                f"{rows} rows a request, {partitions} partitions"
                if partitions
                else f"{rows} rows, not published"
            )
            took = spread([run["hand_over_microseconds"]["p50"] for run in of_kind])
            late = spread([run["loop_late_milliseconds"]["p50"] for run in of_kind])
            document["figures"] += [
                Figure(f"{name}: hand-over of a record, median", took, "us"),
                Figure(f"{name}: event loop late, median", late, "ms"),
            ]
    return 0


def _print_run(run: dict[str, Any]) -> None:
    took, late = run["hand_over_microseconds"], run["loop_late_milliseconds"]
    where = f"{run['partitions']} partitions" if run["partitions"] else "not published"
    print(
        f"{run['rows']} rows a request, {where}: {run['requests_per_second']:,.0f} requests/s,"
        f" {run['cpu_share']:.2f} of a core; hand-over {took['p50']:.1f} us, p99 "
        f"{took['p99']:.1f}, most"
        f" {took['most']:,.0f}; loop late by {late['p50']:.2f} ms, p99 {late['p99']:.2f}, p99.9 "
        f"{late['p99.9']:.2f},"
        f" most {late['most']:.1f}; dropped {run['dropped']}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
