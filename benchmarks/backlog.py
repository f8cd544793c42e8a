"""Measure how a monitor processes the backlog of a day, for `make benchmark-backlog`.

An SQLite log contains 2.4 million rows, ten rows per message, and the clicks on these rows. The
monitor's program starts on one core with its default settings. The measurement ends when three
things are done: the last row has its label, drift was measured, and all archive files were written.
The reported memory is the monitor's maximum anonymous memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.command import anonymous_memory, benchmark_parser, documented
from benchmarks.monitor import RecordTraffic, write_reference
from benchmarks.spread import Figure, spread
from demo.environments import REPOSITORY
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.events.sqlite import SqliteLog
from testing.processes import http_get
from testing.recommenders import accept_into

ROWS, ROWS_A_MESSAGE = 2_400_000, 10
DAY_SECONDS, STEPS = 86_400.0, 1_000
AGE_SECONDS = 7200.0
"""Age of the newest row in seconds. At this age, all labels are final."""
POLL_SECONDS = 0.2


def write_backlog(folder: Path, rows: int) -> None:
    """Write the records of a day that ended two hours ago, and a model that scores the records."""
    traffic, begin = RecordTraffic(ROWS_A_MESSAGE), time.time() - AGE_SECONDS - DAY_SECONDS
    accept_into(folder / "store", CRITEO_RECOMMENDER)
    write_reference(folder / "store", traffic.records)
    with closing(SqliteLog(folder / "log.db")) as log:
        each = rows // ROWS_A_MESSAGE // STEPS
        assert each * STEPS * ROWS_A_MESSAGE == rows
        for step in range(STEPS):
            log.publish(traffic.messages(each, begin + step * DAY_SECONDS / STEPS)[0])


def measure(rows: int) -> dict[str, Any]:
    """Run a monitor over a backlog of `rows` rows, and return time, memory and rows.

    The result has wall-clock seconds, processor seconds, peak bytes and the number of rows.

    Raises:
        RuntimeError: the monitor ended. The message contains the monitor's output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_backlog(folder, rows)
        flags = {name: folder / name for name in ("state", "archive", "store")}
        words = [f"--{name}={path}" for name, path in flags.items()]
        command = [
            sys.executable,
            "-m",
            "monitoring",
            f"--log=sqlite:///{folder / 'log.db'}",
            "--http-port=0",
            *words,
        ]
        began, before = time.monotonic(), os.times()
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)
        peak, matured = 0, 0.0
        try:
            while matured < rows:
                time.sleep(POLL_SECONDS)
                if process.poll() is not None:
                    raise RuntimeError(
                        f"the monitor ended with {process.returncode}: "
                        f"{(folder / 'output').read_text()}"
                    )
                peak = max(peak, anonymous_memory(process.pid))
                matured = _counters(folder / "state").get("matured", 0.0)
            seconds = time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return {"rows": int(matured), "seconds": seconds, "processor_seconds": used, "peak_bytes": peak}


def _counters(state: Path) -> dict[str, float]:
    """Return the monitor's counters, or nothing while it starts."""
    try:
        address = json.loads((state / "http.json").read_text())
    except FileNotFoundError:
        return {}
    response = http_get(f"http://{address['host']}:{address['port']}/status")
    counters: dict[str, float] = (
        json.loads(response.text)["counters"] if response.status == 200 else {}
    )
    return counters


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return 0."""
    parser = benchmark_parser("backlog", __doc__, quick="a tenth of the rows, to test that it runs")
    flags = parser.parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with documented(flags) as document:
        found = document["run"] = measure(ROWS // 10 if flags.quick else ROWS)
        name = f"{found['rows']:,} rows in messages of {ROWS_A_MESSAGE}"
        document["figures"] += [
            Figure(f"{name}, by the clock", spread([found["seconds"]]), "s"),
            Figure(
                f"{name}, with start and stop", spread([found["processor_seconds"]]), "s of a core"
            ),
            Figure("anonymous memory at most", spread([found["peak_bytes"] / 2**20]), "MiB"),
        ]
    return 0


if __name__ == "__main__":
    sys.exit(main())
