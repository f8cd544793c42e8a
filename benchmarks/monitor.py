"""Measure the complete monitor process: rows per second of one core, and its memory.

Run by `make benchmark-monitor`. Only `Monitor.tick` is measured, and it runs on one core. A tick
pulls and decodes messages, stores them with fsync, and counts the features for drift. A tick also
joins clicks, matures rows, measures, decides, and archives as Parquet with fsync. Messages are
generated between the turns, outside the clock. 3.2 % of the rows are clicked. The scores predict
the same click rate, so no policy raises an alarm. Each click arrives one simulated second after its
prediction. A message has the clicks of 100 requests. The log is either a list of encoded messages
or the SQLite log. With the list, the log costs nothing, which is a lower bound for any log. With
the SQLite log, the cost of pulls and acknowledgements is included. A row is counted once it is in a
complete archive file. The measurement leaves out the first quarter of all rows. From then on, the
number of rows that wait for their window or file does not grow.

The simulated clock advances with each turn as if rows arrived at the given rate. Some work, such as
decisions, is done every ten seconds of event time. The cost of periodic work per row is therefore
realistic.

In the last part, the log has 1, 2 or 4 partitions, with equally many rows in each partition.
Requests go to the partition that the client would choose. Each partition has its own monitor, and
the monitors take turns on one core. Partitions scale if the processor time per row is equal for all
numbers of partitions. In production, each monitor needs its own core.
"""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import benchmark_parser, documented
from benchmarks.machine import own_memory
from benchmarks.spread import Figure, spread
from demo.simulation.simulator import Simulator
from evergreen.config.reader import make_settings
from evergreen.contracts.criteo import CRITEO, CRITEO_RECOMMENDER
from evergreen.contracts.manifests import Model
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import CLICK, OutcomeBatch, PredictionBatch, Predictions
from evergreen.events.event_log import Delivery, partition_of
from evergreen.events.sqlite import SqliteLog
from evergreen.registry.models import model_folder
from evergreen.statistics.profile_counter import ProfileCounter
from monitoring.monitor import Monitor
from monitoring.settings import MonitorSettings
from monitoring.state.archive import build_row_table
from monitoring.state.store import StateStore
from testing.releases import keep_model, release

TARGETS = {64: 100_000, 1: 60_000}
"""Target of rows per second on one core, by the number of rows in a message."""
CLICK_RATE = 0.032
START = 1_763_000_000.0
_FORM = RecordFormat(CRITEO)
TICK_SECONDS, WINDOW_SECONDS = 1.0, 5.0
MESSAGES_A_TICK = 1000
LOADS = {64: (MESSAGES_A_TICK, TICK_SECONDS), 1: (9000, 0.2)}
"""Predictions per turn and simulated seconds per turn, by the number of rows in a message."""
_CLICK_BATCH = 100


class MemoryLog:
    """Subscriber that returns messages from a list at no cost.

    The class implements only the methods that the monitor calls.
    """

    def __init__(self) -> None:
        """Create an empty log."""
        self._waiting: list[tuple[str, bytes]] = []
        self.time = START

    def publish(self, messages: list[tuple[str, bytes]]) -> None:
        """Store messages in memory."""
        self._waiting += messages

    def pull(self, max_messages: int) -> list[Delivery]:
        """Return the oldest messages, and lease them."""
        pulled, self._waiting = self._waiting[:max_messages], self._waiting[max_messages:]
        return [Delivery(name, payload, name) for name, payload in pulled]

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """Ignore the tokens, because pulled messages are removed already."""

    def read_up_to(self) -> float | None:
        """Return the current time once all messages are pulled."""
        return None if self._waiting else self.time

    def problem(self) -> str | None:
        """Return None, because a log in memory is always available."""
        return None

    def backlog(self) -> int:
        """Return the number of messages that are not pulled yet."""
        return len(self._waiting)


class RecordTraffic:
    """Encoded messages of simulated requests.

    A few bodies are sent repeatedly with new ids and times.
    """

    def __init__(self, rows_per_message: int, bodies: int = 64, *, partitions: int = 1) -> None:
        """Draw `bodies` requests of `rows_per_message` rows each."""
        self._rows, self._number, self._partitions = rows_per_message, 0, partitions
        self._random = np.random.default_rng(0)
        self._simulator = Simulator.create(0, click_rate=CLICK_RATE)
        self.records = [self._prediction() for _ in range(bodies)]
        """Encoded requests, without their final ids and times."""
        self._due: list[list[tuple[str, int, float]]] = [[] for _ in range(partitions)]

    def _prediction(self) -> PredictionBatch:
        drawn = self._simulator.draw(self._rows, self._random)
        return PredictionBatch(
            request_id="body",
            time=START,
            model_version=1,
            dense=drawn.dense,
            categorical=drawn.categorical,
            scores=drawn.probability.astype(np.float32),
        )

    def messages(self, count: int, now: float) -> list[list[tuple[str, bytes]]]:
        """Return messages per partition: clicks of the previous turn, then `count` predictions.

        The predictions were made at `now`.
        """
        made = [list(self._click_messages(partition, now)) for partition in range(self._partitions)]
        for _ in range(count):
            name = f"request-{self._number:012d}"
            record = replace(
                self.records[self._number % len(self.records)], request_id=name, time=now
            )
            partition = partition_of(name, self._partitions)
            made[partition].append((name, _FORM.encode(record)))
            clicked = np.flatnonzero(self._random.random(self._rows) < record.scores)
            self._due[partition] += [(name, int(row), now + 1) for row in clicked]
            self._number += 1
        return made

    def _click_messages(self, partition: int, now: float) -> Iterator[tuple[str, bytes]]:
        due, self._due[partition] = self._due[partition], []
        size = max(1, round(_CLICK_BATCH * CLICK_RATE * self._rows))
        for start in range(0, len(due), size):
            part = due[start : start + size]
            name = f"outcomes-{now}-{start}"
            batch = OutcomeBatch(
                batch_id=name,
                time=now,
                event=CLICK,
                request_ids=tuple(each[0] for each in part),
                rows=np.array([each[1] for each in part], np.int32),
                times=np.array([each[2] for each in part]),
            )
            yield name, _FORM.encode(batch)


def write_reference(store: Path, records: list[PredictionBatch]) -> None:
    """Release version 1 with a training profile of these rows, so that drift is measured too."""
    requests = Predictions.of(records)
    counter = ProfileCounter(CRITEO)
    for batch in build_row_table(
        requests, np.zeros(requests.num_rows, np.uint8), CRITEO
    ).to_batches():
        counter.add(batch)
    release(store, 1, "model")
    keep_model(store, "model", recommender=CRITEO_RECOMMENDER, slot_sizes=[4] * 26)
    reference = model_folder(store, "model") / Model.REFERENCE
    reference.parent.mkdir(parents=True, exist_ok=True)
    counter.reference().write(reference)


def _monitor_settings(folder: Path) -> MonitorSettings:
    return make_settings(
        MonitorSettings,
        log="sqlite:///unused",
        state=folder / "state",
        archive=folder / "archive",
        store=folder / "store",
        attribution_window_seconds=WINDOW_SECONDS,
        policies="threshold",
        auc_threshold=0.5,
    )


def measure(
    rows: int, *, rows_per_message: int, log: str, load: tuple[int, float] | None = None
) -> dict[str, Any]:
    """Run one monitor in this process until `rows` rows are archived, and return the figures.

    Each turn of the monitor pulls `TICK_PULLS` times. The load must not have more records per turn
    than a turn pulls. Otherwise, the backlog grows without end.
    """
    clock = {"time": START}
    traffic, (messages_a_tick, tick_seconds) = (
        RecordTraffic(rows_per_message),
        load or LOADS[rows_per_message],
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        memory, sqlite = MemoryLog(), SqliteLog(folder / "log.db", clock=lambda: clock["time"])
        subscriber: Any = sqlite if log == "sqlite" else memory
        settings = _monitor_settings(folder)
        write_reference(settings.store, traffic.records)
        store = StateStore(settings.state / "monitor.db")
        monitor = Monitor(
            settings,
            subscriber=subscriber,
            store=store,
            trigger=None,
            recommender=CRITEO_RECOMMENDER,
            clock=lambda: clock["time"],
        )
        cpu = wall = 0.0
        turns = [(0, 0, 0.0, 0.0)]
        resident: list[tuple[int, int]] = []
        while store.counters.get("archived", 0) < rows:
            clock["time"] += tick_seconds
            memory.time = clock["time"]
            subscriber.publish(traffic.messages(messages_a_tick, clock["time"])[0])
            began_cpu, began = time.process_time(), time.perf_counter()
            monitor.tick()
            cpu, wall = cpu + time.process_time() - began_cpu, wall + time.perf_counter() - began
            turns.append((int(store.counters.get("archived", 0)), len(turns), cpu, wall))
            resident.append((turns[-1][0], own_memory("RssAnon")))
            for path in settings.archive.glob("day=*/*.parquet"):
                path.unlink()  # the uploader also removes archived files; 10 million rows take 2 GB
        archived, clicks = int(store.counters["archived"]), int(store.counters["matured_click"])
        buckets = int(store.counters.get("drift_bucket", 0))
        database = (settings.state / "monitor.db").stat().st_size
        store.close()
        sqlite.close()
    # If all rows are archived in one turn, the first quarter is not left out.
    start = next((turn for turn in turns[:-1] if turn[0] >= rows / 4), turns[0])
    counted, num_turns, cpu, wall = (after - before for after, before in zip(turns[-1], start))
    return {
        "log": log,
        "rows_per_message": rows_per_message,
        "rows": archived,
        "rows_counted": counted,
        "clicks": clicks,
        "turns": num_turns,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "rows_per_cpu_second": counted / cpu,
        "rows_per_wall_second": counted / wall,
        "database_bytes": database,
        "drift_buckets": buckets,
        "memory": _memory(resident),
    }


def log_alone(requests: int = 100_000) -> float:
    """Return how fast a core reads one-row messages from the SQLite log without a monitor.

    The rate is in messages per second. Messages are pulled and acknowledged.
    """
    cpu = 0.0
    with (
        tempfile.TemporaryDirectory() as scratch,
        closing(SqliteLog(Path(scratch) / "log.db")) as log,
    ):
        messages = RecordTraffic(1).messages(requests, START)[0]
        for start in range(0, requests, MESSAGES_A_TICK):
            log.publish(messages[start : start + MESSAGES_A_TICK])
            began = time.process_time()
            log.acknowledge([delivery.token for delivery in log.pull(MESSAGES_A_TICK)])
            cpu += time.process_time() - began
    return requests / cpu


def measure_partitions(rows: int, *, rows_per_message: int, partitions: int) -> dict[str, Any]:
    """Run one monitor per partition, and return the processor time of each monitor.

    The measurement ends when each monitor has archived `rows` rows.
    """
    clock = {"time": START}
    traffic = RecordTraffic(rows_per_message, partitions=partitions)
    cpu_seconds = [0.0] * partitions
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(partition) for partition in range(partitions)]
        logs, stores, monitors = [MemoryLog() for _ in folders], [], []
        for number, (folder, log) in enumerate(zip(folders, logs)):
            settings = replace(
                _monitor_settings(folder),
                log=f"sqlite:///p-{{0-{partitions - 1}}}",
                partition=number,
            )
            write_reference(settings.store, traffic.records)
            stores.append(StateStore(settings.state / "monitor.db"))
            monitors.append(
                Monitor(
                    settings,
                    subscriber=log,  # type: ignore[arg-type]
                    store=stores[-1],
                    trigger=None,
                    recommender=CRITEO_RECOMMENDER,
                    clock=lambda: clock["time"],
                )
            )
        while min(store.counters.get("archived", 0) for store in stores) < rows:
            clock["time"] += TICK_SECONDS
            messages = traffic.messages(MESSAGES_A_TICK * partitions, clock["time"])
            for number, (log, monitor) in enumerate(zip(logs, monitors)):
                log.time = clock["time"]
                log.publish(messages[number])
                began = time.process_time()
                monitor.tick()
                cpu_seconds[number] += time.process_time() - began
                for path in (folders[number] / "archive").glob("day=*/*.parquet"):
                    path.unlink()
        archived = [int(store.counters["archived"]) for store in stores]
        for store in stores:
            store.close()
    return {
        "partitions": partitions,
        "rows_per_message": rows_per_message,
        "rows": archived,
        "cpu_seconds": cpu_seconds,
        "cpu_seconds_per_million_rows": sum(cpu_seconds) / sum(archived) * 1e6,
        "rows_per_core_second": [n / seconds for n, seconds in zip(archived, cpu_seconds)],
        "rows_per_second_on_a_core_each": sum(
            n / seconds for n, seconds in zip(archived, cpu_seconds)
        ),
    }


def _memory(resident: list[tuple[int, int]]) -> dict[str, int]:
    """Return the anonymous memory at three points of the run, and its maximum.

    The three points are after a tenth of the rows, after half of the rows, and at the end. The
    maximum leaves out the first tenth of the rows.
    """
    total = resident[-1][0]
    later = [size for archived, size in resident if archived >= total / 10]
    half = [size for archived, size in resident if archived >= total / 2]
    return {
        "after_a_tenth": later[0],
        "half_way": half[0],
        "at_the_end": later[-1],
        "highest": max(later),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, and return 0."""
    parser = benchmark_parser(
        "monitor", __doc__, quick="a million rows in place of ten, half a minute"
    )
    flags = parser.parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = 1_000_000 if flags.quick else 10_000_000
    with documented(flags) as document:
        runs = document["runs"] = []
        for log, size in itertools.product(("memory", "sqlite"), (64, 1)):
            # Use a new process for each run, because the heap of an earlier run slows the next run
            # by a tenth.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                counted = rows if size == 64 else rows // 10
                runs.append(alone.submit(measure, counted, rows_per_message=size, log=log).result())
            _print_run(runs[-1])
            name, rate = (
                f"{log} log, {size} rows a message",
                spread([runs[-1]["rows_per_cpu_second"]]),
            )
            highest = spread([runs[-1]["memory"]["highest"] / 2**20])
            limit = None
            if (log, size) == ("sqlite", 1):
                limit = f"the log alone, pulled and acknowledged: {log_alone():,.0f} rows/s"
                print(f"  {limit}", flush=True)
            document["figures"] += [
                Figure(
                    f"{name}, of one core",
                    rate,
                    "rows/s",
                    target=TARGETS[size],
                    is_least=True,
                    limit=limit,
                ),
                Figure(f"{name}, anonymous memory at most", highest, "MiB"),
            ]
        # Alternate runs with 1, 2 and 4 partitions, so that a busy moment affects all numbers of
        # partitions.
        partitioned = document["partitions"] = []
        rows_of_each = 250_000 if flags.quick else 500_000
        for _, number in itertools.product(range(1 if flags.quick else 3), (1, 2, 4)):
            partitioned.append(
                measure_partitions(rows_of_each, rows_per_message=64, partitions=number)
            )
            run = partitioned[-1]
            print(
                f"{number} partitions of {rows_of_each:,} rows: "
                f"{run['cpu_seconds_per_million_rows']:.2f} s of a core"
                f" per million rows; on a core each {run['rows_per_second_on_a_core_each']:,.0f} "
                "rows/s",
                flush=True,
            )
        for number in (1, 2, 4):
            work = [
                run["cpu_seconds_per_million_rows"]
                for run in partitioned
                if run["partitions"] == number
            ]
            name = f"log in {number} partitions, 64 rows a message, a million rows"
            document["figures"].append(Figure(name, spread(work), "s of a core"))
    return 0


def _print_run(run: dict[str, Any]) -> None:
    held = {name: size >> 20 for name, size in run["memory"].items()}
    rate, by_clock = run["rows_per_cpu_second"], run["rows_per_wall_second"]
    print(
        f"{run['log']} log, {run['rows_per_message']} rows a message: {rate:,.0f} rows per second "
        "of one core"
        f" ({by_clock:,.0f} by the clock; {run['rows']:,} rows, {run['clicks']:,} clicks)\n"
        f"  memory {held['after_a_tenth']} MiB after a tenth, {held['half_way']} half way, "
        f"{held['at_the_end']} at the"
        f" end, at most {held['highest']}; database {run['database_bytes'] >> 20} MiB;"
        f" {run['drift_buckets']} buckets of drift compared",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
