"""How many rows a second the monitor's drift watch takes in on one core, and what closing a bucket costs.

    .venvs/driver/bin/python -m benchmarks.monitor_drift [--quick]

Rows of the simulated world in requests of 64 and of 1, against statistics that validation's counter made of 50,000
other rows. Each figure is the best of several turns, by wall clock and by this process's processor time: on a shared
machine only the second means anything.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import numpy as np

from components.contracts.records import PredictionBatch
from components.contracts.reference_statistics import ReferenceStatistics, ScoreHistogram
from components.validation.reference import ReferenceCounter
from inference_client.simulation.lake import raw_table
from inference_client.simulation.world import Rows, World
from monitoring.drift.settings import DriftSettings
from monitoring.drift.watch import DriftWatch


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows and turns")
    quick = parser.parse_args(argv).quick
    rows, turns = (50_000, 2) if quick else (400_000, 5)
    world, random = World.create(1), np.random.default_rng(2)
    reference = _reference(world.draw(50_000, random))
    drawn = world.draw(rows, random)
    print(f"{'rows a request':>16}{'rows/s':>12}{'rows/s of CPU':>16}{'close, ms':>12}")
    for size in (64, 1):
        requests = _requests(drawn, size)
        measured = [_turn(reference, requests, rows) for _ in range(turns)]
        wall, processor, close = (min(values) for values in zip(*measured))
        print(f"{size:>16}{rows / wall:>12,.0f}{rows / processor:>16,.0f}{1000 * close:>12.1f}")
    return 0


def _turn(reference: ReferenceStatistics, requests: list[PredictionBatch], rows: int) -> tuple[float, float, float]:
    """Seconds of wall clock and of processor to take `requests` in, and of processor to close their bucket."""
    watch = DriftWatch(lambda _: reference, DriftSettings())
    wall, processor = time.perf_counter(), time.process_time()
    for request in requests:
        watch.observe(request)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    start = time.process_time()
    (report,) = watch.close(DriftSettings().drift_bucket_seconds)
    assert report.rows == rows
    return wall, processor, time.process_time() - start


def _reference(rows: Rows) -> ReferenceStatistics:
    n = len(rows.label)
    table = raw_table(rows, request_ids=[""] * n, row=np.arange(n, dtype=np.int32), times=np.zeros(n))
    counter = ReferenceCounter()
    for batch in table.to_batches():
        counter.add(batch)
    return replace(counter.statistics(), scores=ScoreHistogram.of(rows.probability))


def _requests(rows: Rows, size: int) -> list[PredictionBatch]:
    scores = rows.probability.astype(np.float32)
    return [
        PredictionBatch(
            request_id=f"r{at}",
            time=1.0,
            model_version=1,
            dense=rows.dense[at : at + size],
            categorical=rows.categorical[at : at + size],
            scores=scores[at : at + size],
        )
        for at in range(0, len(rows.label), size)
    ]


if __name__ == "__main__":
    sys.exit(main())
