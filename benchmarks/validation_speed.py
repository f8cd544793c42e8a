"""Rows per second and memory of validation's statistics beside TFDV's own call on a data frame.

Run in the validation environment: `.venvs/validation/bin/python -m benchmarks.validation_speed`. All contestants see
the same rows and take turns in one process, so that what else the machine does falls on all of them; ratios are of one
round. Ours read Parquet files; the peer is given its data frame in memory, whose making is not counted.

- `2 processes`: `summarize_files`, TFDV's statistics alone. `2 processes, all counted`: with what the monitor and the
  next round's drift need, as the step runs it. `1 process`: the first on one core.
- `data frame`: `tfdv.generate_statistics_from_dataframe`, with options that give the same statistics.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow_data_validation as tfdv

from components.contracts import criteo
from components.runtime.durable import write_whole
from components.validation.reference import ReferenceCounter
from components.validation.rows import COLUMNS, parquet_files
from components.validation.tfdv_statistics import make_type_schema, num_rows, summarize_files

SPEED_TARGET, MEMORY_TARGET = 1.8, 1.1
PEER = "data frame"
FILE_ROWS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 0 = all figures are there, whatever they say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validation_speed", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, two rounds")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="JSON file with all figures")
    parser.add_argument("--once", nargs=2, metavar=("FOLDER", "TIMES"), help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.once:
        return _once(Path(flags.once[0]), int(flags.once[1]))
    rows, rounds = (flags.rows // 10, 2) if flags.quick else (flags.rows, flags.rounds)
    figures = measure(rows, rounds)
    show(figures)
    if flags.output:
        write_whole(flags.output, json.dumps(figures, indent=1) + "\n")
    return 0


def measure(rows: int, rounds: int) -> dict[str, Any]:
    """All figures: `speed` by contestant, `memory` by rows."""
    with tempfile.TemporaryDirectory() as folder:
        files = write_rows(Path(folder), rows)
        memory = {times * rows: _in_a_process("--once", folder, str(times)) for times in (1, 4)}
        return {"rows": rows, "rounds": rounds, "speed": _speed(files, rounds), "memory": memory}


def write_rows(folder: Path, rows: int) -> list[Path]:
    """Files of rows with 26 categories of 4 to 400,000 values, by Zipf's law, and 13 heavy-tailed integers; seeded."""
    for begin in range(0, rows, FILE_ROWS):
        table = _table(min(FILE_ROWS, rows - begin), seed=begin)
        pq.write_table(table, folder / f"part-{begin:09d}.parquet", row_group_size=FILE_ROWS // 2)
    return parquet_files(folder)


def _table(rows: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    columns = {criteo.LABEL: pa.array((random.random(rows) < 0.03).astype(np.int32))}
    for i, name in enumerate(criteo.DENSE):
        values = np.floor(random.lognormal(1 + 0.2 * i, 1.2, rows)).astype(np.float32)
        columns[name] = pa.array(values, mask=random.random(rows) < 0.03 * i)
    for i, name in enumerate(criteo.CATEGORICAL):
        keys = np.random.default_rng(1000 + i).integers(0, criteo.MAX_CATEGORY, int(4 * 1e5 ** (i / 25)))
        ranks = np.minimum(random.zipf(1.2, rows) - 1, len(keys) - 1)
        columns[name] = pa.array(keys[ranks], mask=random.random(rows) < 0.02 * (i % 4))
    # Requests of 64 rows, as they are served.
    columns[criteo.REQUEST_ID] = pa.array([f"{seed}-{row // 64}" for row in range(rows)])
    return pa.table(columns)


def _speed(files: list[Path], rounds: int) -> dict[str, list[float]]:
    table = pa.concat_tables([pq.read_table(path, columns=list(COLUMNS)) for path in files])
    strings = table.to_pandas()
    for name in criteo.CATEGORICAL:
        strings[name] = table[name].cast(pa.string()).to_pandas()
    same = tfdv.StatsOptions(schema=make_type_schema(), num_top_values=20, num_rank_histogram_buckets=1000)
    contestants: dict[str, Callable[[], Any]] = {
        "2 processes": lambda: summarize_files(files, COLUMNS, processes=2),
        "2 processes, all counted": lambda: _all_counted(files, 2),
        "1 process": lambda: summarize_files(files, COLUMNS, processes=1),
        PEER: lambda: tfdv.generate_statistics_from_dataframe(strings, same),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, call in contestants.items():
            began = time.perf_counter()
            found = call()
            seconds = time.perf_counter() - began
            if num_rows(found) != table.num_rows:
                raise AssertionError(f"{name} saw {num_rows(found)} rows, expected {table.num_rows}")
            if number:  # the first warms up
                rates[name].append(table.num_rows / seconds)
    return rates


def _all_counted(files: list[Path], processes: int) -> Any:
    return summarize_files(files, [*COLUMNS, criteo.REQUEST_ID], [ReferenceCounter()], processes=processes)


def _once(folder: Path, times: int) -> int:
    """Everything counted, by two processes; prints the largest MB that one process held."""
    _all_counted(parquet_files(folder) * times, 2)
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    print(max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1024)
    return 0


def _in_a_process(*arguments: str) -> float:
    command = [sys.executable, "-m", "benchmarks.validation_speed", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def show(figures: dict[str, Any]) -> None:
    """Tables, each with its target."""
    speed, memory = figures["speed"], figures["memory"]
    print(f"statistics of {figures['rows']:,} rows x {len(COLUMNS)} columns, {figures['rounds']} rounds")
    print(f"  {'':<26}{'rows/s':>12}{'least':>12}{'most':>12}{'ratio to ' + PEER:>22}")
    ratios = {n: median(a / b for a, b in zip(rates, speed[PEER])) for n, rates in speed.items()}
    for name, rates in speed.items():
        print(f"  {name:<26}{median(rates):>12,.0f}{min(rates):>12,.0f}{max(rates):>12,.0f}{ratios[name]:>22.2f}")
    for name in ("2 processes", "2 processes, all counted"):
        _target(f"{name} to {PEER}", f"{ratios[name]:.2f}", f"at least {SPEED_TARGET}", ratios[name] >= SPEED_TARGET)
    for rows, megabytes in memory.items():
        print(f"  {rows:>12,} rows: largest process {megabytes:,.0f} MB")
    few, many = memory.values()
    _target("memory for 4 times the rows", f"{many / few:.2f}", f"at most {MEMORY_TARGET}", many / few <= MEMORY_TARGET)


def _target(name: str, found: str, wanted: str, met: bool) -> None:
    print(f"  {name}: {found}, target {wanted}: {'met' if met else 'MISSED'}")


if __name__ == "__main__":
    sys.exit(main())
