"""Measure what a year of hourly runs leaves in an installation, and the cost of reading it.

Run by `make benchmark-year`. The runs are not executed. Each run is a copy of the demo's last run
(after `make demo`) with new names and times. The journal lines of the deployment are copied too.
Every fifth night, `evergreen admin collect` removes old files. Large files are hard links, but each
link counts with the full file size. At the end of a day, a month and a year, the real readers of
the registry are timed in CPU seconds of this process. The cost of a run itself is measured by
`benchmarks.round`.

In a second part, the same number of runs updates the vocabulary of one column. The runs use the
shipped rules, with and without a time to live.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import benchmark_parser, documented
from benchmarks.spread import Figure, spread
from cli.models import print_models
from cli.runs import read_runs
from components.preprocessing.vocabularies import next_column, unseen_column
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts.workflow import TOMBSTONE
from evergreen.registry import collect, promotion_journal
from evergreen.registry.models import graph_folder, model_folder, release_path
from evergreen.registry.runs import find_outcome
from evergreen.runtime.durable import append_record
from monitoring.state.database import Database
from monitoring.web.page import read_history
from monitoring.web.store_status import RunCounter

BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
HOURS = {"a day": 24, "30 days": 720, "a year": 8_760, "10,000 rounds": 10_000}
TIMES = ("time", "created_at", "published_at", "ended_at", "started_at")
"""Fields that contain the time of an action. `evergreen admin collect` reads these fields to decide
what it removes."""
NEW_ITEMS, ROWS, SHELF_DAYS = 20, 2_000, 14
"""New items per hour, rows per hour, and number of days for which an item is shown."""


class Year:
    """Copy of the demo's folder. The benchmark adds hourly runs to the copy."""

    def __init__(self, source: Path, store: Path) -> None:
        """Copy the registry. The last release of the registry is the template of every further run.

        Raises:
            FileNotFoundError: there is no finished demo.
        """
        shutil.copytree(source, store)
        self.store = store
        self._source = source  # `evergreen admin collect` never removes these files
        self._last = promotion_journal.read_journal(store)[-1]
        outcomes = [
            path
            for path in (store / "runs").glob("*/outcome.json")
            if f'"version": {self._last.version},' in path.read_text()
        ]
        self._run = outcomes[0].parent.name
        entries = promotion_journal.read_entries(store)
        self._newest_version = max(line.version for line in entries)
        of_version = [line for line in entries if line.version == self._last.version]
        self._lines = of_version[
            : 1 + [line.action for line in of_version].index(promotion_journal.BAKED)
        ]

    def add_hour(self, number: int) -> datetime:
        """Add run `number`, counted from 1, with all its files, and return its time."""
        version, model_id = self._newest_version + number, f"{self._last.model_id}-{number:05d}"
        moment = BEGIN + timedelta(hours=number)
        renamed = {self._last.model_id: model_id, self._run: f"{self._run}-{number:05d}"}

        def aged(value: Any, key: str = "") -> Any:
            if isinstance(value, dict):
                return {name: aged(each, name) for name, each in value.items()}
            if isinstance(value, list):
                return [aged(each) for each in value]
            if key in TIMES and value:
                return moment.isoformat()
            if key in ("version", "previous_version") and value is not None:
                return version - (key == "previous_version")
            for old, new in renamed.items():
                value = value.replace(old, new) if isinstance(value, str) else value
            return value

        def repeat(source: Path, target: Path) -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                for path in source.iterdir():
                    repeat(path, target / path.name)
            elif source.suffix == ".json" and source.stat().st_size < 2**20:
                document = aged(json.loads(source.read_text()))
                document.pop("crc32", None)
                target.write_text(json.dumps(document))
            else:
                os.link(source, target)

        source, store, last = self._source, self.store, self._last
        repeat(model_folder(source, last.model_id), model_folder(store, model_id))
        repeat(source / "verdicts" / last.model_id, store / "verdicts" / model_id)
        repeat(release_path(source, last.version), release_path(store, version))
        repeat(graph_folder(source, last.version), graph_folder(store, version))
        repeat(source / "runs" / self._run, store / "runs" / renamed[self._run])
        for line in self._lines:
            append_record(store / promotion_journal.JOURNAL_FILE, replace(line, **aged(vars(line))))
        return moment


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Call `work`, drop its output, and return the CPU seconds of the call."""
    begun = time.process_time()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        work()
    return time.process_time() - begun


def measured(year: Year, folder: Path, now: datetime) -> dict[str, float]:
    """Return sizes and CPU seconds at `now`."""
    store, counter = year.store, RunCounter(year.store, Database(folder / "memory.db"))
    files = [path for path in store.rglob("*") if path.is_file()]
    sizes = {path: path.stat() for path in files}
    large = sum(each.st_size for each in sizes.values() if each.st_nlink > 1)
    newest = max((store / "runs").glob("*/outcome.json"), key=lambda path: path.stat().st_mtime)
    promotion_journal._parsed_lines.cache_clear()
    return {
        "files": len(files),
        "MiB of large files": large / 2**20,
        "MiB of all else": (sum(each.st_size for each in sizes.values()) - large) / 2**20,
        "MiB of the journal": (store / promotion_journal.JOURNAL_FILE).stat().st_size / 2**20,
        "s, journal read anew": cpu_seconds(lambda: promotion_journal.current(store)),
        "s, journal read again": cpu_seconds(lambda: promotion_journal.current(store)),
        "s, monitor's first look at runs": cpu_seconds(lambda: counter.count(now.timestamp())),
        "s, its later looks": cpu_seconds(lambda: counter.count(now.timestamp())),
        "s, history for the status page": cpu_seconds(lambda: read_history(folder, store)),
        "s, outcome of one run": cpu_seconds(lambda: find_outcome(store, newest.parent.name)),
        "s, evergreen models list": cpu_seconds(lambda: print_models(store)),
        "s, evergreen runs": cpu_seconds(lambda: read_runs(store, newest=50)),
        "s, evergreen admin collect": cpu_seconds(
            lambda: collect.main(["--store", str(store)], now=now)
        ),
    }


def vocabulary_ids(num_runs: int, ttl_days: float) -> dict[str, int]:
    """Return the number of ids of a column after `num_runs` hourly runs.

    The result also has the number of ids with a category, and the number of stored categories
    without an id.
    """
    random = np.random.default_rng(0)
    rules = PreprocessingSettings(category_ttl_days=ttl_days)
    column = unseen_column(np.zeros(0, np.int64))
    for hour in range(num_runs):
        newest = (hour + 1) * NEW_ITEMS
        oldest = max(0, newest - SHELF_DAYS * 24 * NEW_ITEMS)
        seen, counts = np.unique(random.integers(oldest, newest, ROWS), return_counts=True)
        column = next_column(column, seen, counts, now=(hour + 1) * 3_600_000_000, rules=rules)
    live = int((column.vocabulary != TOMBSTONE).sum())
    return {
        "ids": len(column.vocabulary),
        "live": live,
        "remembered without an id": len(column.candidates.categories),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and return 0."""
    parser = benchmark_parser("year", __doc__, quick="30 days instead of a year")
    parser.add_argument(
        "--store",
        default="build/demo/store",
        help="model registry of a demo (default: %(default)s)",
    )
    flags = parser.parse_args(argv)
    source = Path(flags.store)
    hours = {name: count for name, count in HOURS.items() if not flags.quick or count <= 720}
    with documented(flags) as document, tempfile.TemporaryDirectory(dir=source.parent) as folder:
        year = Year(source, Path(folder) / "store")
        results: dict[str, dict[str, float]] = {}
        for number in range(1, max(hours.values()) + 1):
            now = year.add_hour(number)
            if number % 120 == 0:
                with redirect_stdout(StringIO()):
                    collect.main(["--store", str(year.store), "--yes"], now=now)
            for name, count in hours.items():
                if number == count:
                    copy = Path(folder) / name
                    copy.mkdir()
                    results[name] = measured(year, copy, now)
        print(f"{'':34}" + "".join(f"{name:>12}" for name in results))
        for row in next(iter(results.values())):
            print(f"{row:34}" + "".join(f"{of[row]:12.3f}" for of in results.values()))
        document["store"] = results
        (name, last) = list(results.items())[-1]
        document["figures"] = [
            Figure(f"{key.removeprefix('s, ')}, after {name}", spread([last[key]]), "s of CPU")
            for key in last
            if key.startswith("s, ")
        ]
        document["vocabulary"] = {
            f"ttl {ttl:g} days": {name: vocabulary_ids(count, ttl) for name, count in hours.items()}
            for ttl in (0.0, 30.0)
        }
        for rules, ids in document["vocabulary"].items():
            print(f"{rules}: {ids}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
