"""Measure the time and peak memory of extraction on a large lake, for a run from scratch.

`python -m benchmarks.full_window [--rows N] [--days D]` writes a simulated lake. One day is drawn,
and the other days repeat its rows at other times and in other requests. Extraction reads a quarter
of the days in one process, and all days in another process. If memory depended on the number of
days, the second process would use more.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from demo.simulation.simulator import Simulator, write_lake
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import RawDataset
from evergreen.contracts.raw_rows import DAY_PARTITION, EVENT_TIME, REQUEST_ID
from evergreen.registry.recommenders import accept, read_accepted
from evergreen.runtime.flags import whoami

_FIRST_DAY = date(2026, 1, 1)


def write_days(lake: Path, *, rows: int, days: int) -> None:
    """Write `rows` rows evenly over `days` days."""
    write_lake(
        Simulator.create(1), str(lake), rows=rows // days, days=1, last_day=_FIRST_DAY, seed=1
    )
    first = lake / DAY_PARTITION.format(day=_FIRST_DAY)
    for number in range(1, days):
        day = _FIRST_DAY + timedelta(days=number)
        folder = lake / DAY_PARTITION.format(day=day)
        folder.mkdir()
        for path in sorted(first.iterdir()):
            table = pq.ParquetFile(path).read()
            moved = pc.add(table[EVENT_TIME], pa.scalar(timedelta(days=number)))
            names = pc.replace_substring(table[REQUEST_ID], str(_FIRST_DAY), str(day))
            for name, column in ((EVENT_TIME, moved), (REQUEST_ID, names)):
                table = table.set_column(table.schema.get_field_index(name), name, column)
            pq.write_table(table, folder / path.name)


def extract(folder: Path, *, days: int) -> tuple[RawDataset, float, int]:
    """Extract the first `days` days, and return the dataset, the seconds and the peak bytes."""
    output, now = folder / "raw.json", datetime.now(timezone.utc)
    if not read_accepted(folder / "store"):
        accept(folder / "store", CRITEO_RECOMMENDER, who=whoami(), why="to be measured", now=now)
    command = [
        sys.executable,
        "-m",
        "components.extraction",
        "--run=full",
        "--parent=none",
        "--champion=none",
    ]
    command += [
        f"--store={folder / 'store'}",
        f"--work={folder / 'work'}",
        f"--lake={folder / 'lake'}",
    ]
    command += [f"--window-end={_FIRST_DAY + timedelta(days=days)}", f"--output={output}"]
    began = time.perf_counter()
    _, status, usage = os.wait4(subprocess.Popen(command, stderr=subprocess.DEVNULL).pid, 0)
    if status:
        raise RuntimeError(f"extraction ended with status {status}")
    return RawDataset.read(output), time.perf_counter() - began, usage.ru_maxrss * 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Run both extractions, and print one line per extraction."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full_window", description=__doc__)
    parser.add_argument(
        "--rows",
        type=int,
        default=10_000_000,
        help="rows of the complete lake (default: %(default)s)",
    )
    parser.add_argument(
        "--days",
        type=int,
        default=20,
        help="days of the lake, a multiple of 4 (default: %(default)s)",
    )
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="full-window-") as name:
        folder = Path(name)
        write_days(folder / "lake", rows=flags.rows, days=flags.days)
        for days in (flags.days // 4, flags.days):
            raw, seconds, peak = extract(folder, days=days)
            print(
                f"{days} days: {raw.num_train_rows:,} training rows, {raw.num_holdout_rows:,} "
                "held out; "
                f"{seconds:.0f} s, {peak / 1e6:,.0f} MB at the peak",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
