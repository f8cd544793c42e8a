"""Criteo 1TB's TSV.gz to Parquet beside pyarrow's two ways, on the same file: `make benchmark-extraction`.

Each way runs in a process of its own (`--way`), on all cores there are; every round in another order, a ratio is of one
round's two rates. The target is held against the faster of pyarrow's two ways in each round: the whole file in memory
by read_csv, or block by block by open_csv. Outputs are compared in the run: as many rows, and of the first and the last
rows every value. Peak memory of ours is taken on a second file too, of several times the rows.

Prints tables, and writes all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from benchmarks import machine
from benchmarks.criteo_text import write_tsv_gz
from benchmarks.spread import Spread, named, print_target, spread
from components.runtime.durable import write_whole

DENSE, CATEGORICAL = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
NAMES = ["label", *DENSE, *CATEGORICAL]

Way = Callable[[Path, Path], Callable[[], int]]
"""Imports what it needs, and gives the work: file and folder to number of rows."""


def ours(file: Path, folder: Path) -> Callable[[], int]:
    """Extraction's reader and writer: every value checked, what is malformed set aside with its line number.

    Categories become int64.
    """
    from components.extraction.malformed_rows import MalformedRows
    from components.extraction.part_files import PartWriter
    from components.extraction.readers.forms import find_reader

    def work() -> int:
        with MalformedRows(folder / "malformed.jsonl") as malformed, PartWriter(folder) as writer:
            for batch in find_reader(file).batches(malformed):
                writer.write(batch)
            malformed.judge()
        return sum(part.num_rows for part in writer.parts)

    return work


def pyarrow_whole(file: Path, folder: Path) -> Callable[[], int]:
    """pyarrow.csv.read_csv of the gzip file with types given and its threads on, then parquet.write_table.

    Checked is the number of fields, and that a label is an integer and the others numbers; `0x1f`, `nan`, `1.5` and
    ` 1` are numbers to it. Categories stay text, whatever it is.
    """

    def work() -> int:
        table = pv.read_csv(file, **_pyarrow_options(block_bytes=1 << 20))
        pq.write_table(table, folder / "part-0.parquet")
        return int(table.num_rows)

    return work


def pyarrow_stream(file: Path, folder: Path) -> Callable[[], int]:
    """pyarrow.csv.open_csv in blocks of 8 MiB to a ParquetWriter; checks as `pyarrow_whole`."""

    def work() -> int:
        num_rows = 0
        reader = pv.open_csv(file, **_pyarrow_options(block_bytes=8 << 20))
        with pq.ParquetWriter(folder / "part-0.parquet", reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
                num_rows += batch.num_rows
        return num_rows

    return work


def _pyarrow_options(*, block_bytes: int) -> dict[str, Any]:
    types = {"label": pa.int32(), **dict.fromkeys(DENSE, pa.float32()), **dict.fromkeys(CATEGORICAL, pa.string())}
    return {
        "read_options": pv.ReadOptions(column_names=NAMES, block_size=block_bytes),
        "parse_options": pv.ParseOptions(delimiter="\t", quote_char=False),
        "convert_options": pv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    }


WAYS: dict[str, Way] = {each.__name__: each for each in (ours, pyarrow_whole, pyarrow_stream)}


def peak_bytes() -> int:
    """The most memory that this process has held, mapped files included."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def run_here(way: str, file: Path, folder: Path) -> dict[str, float]:
    """One way in this process: seconds of the work without imports, processor seconds, rows, peak bytes of memory."""
    folder.mkdir()
    work = WAYS[way](file, folder)
    began, processor = time.perf_counter(), time.process_time()
    num_rows = work()
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    return {"seconds": seconds, "processor": processor, "rows": num_rows, "peak": peak_bytes()}


REPOSITORY = Path(__file__).resolve().parents[1]
OURS = "ours"
PYARROW = ("pyarrow_whole", "pyarrow_stream")
RATIO_TARGET, MEMORY_TARGET, GROWTH_TARGET = 0.5, 10**9, 1.1
"""Ours to the faster pyarrow way; bytes; peak on the large file to that on the small one, a tenth of it for noise."""
_ROWS, _QUICK_ROWS, _ROUNDS, _QUICK_ROUNDS = 1_500_000, 200_000, 5, 3
_LARGER = 4
_COMPARED_ROWS = 500


class Unequal(Exception):
    """Two ways made different rows of one file: their speed would be compared on different work."""


def run(way: str, file: Path, folder: Path) -> dict[str, Any]:
    """One way in a process of its own; see `run_here`."""
    command = [sys.executable, "-m", "benchmarks.extraction", "--way", way, str(file), str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way} ended with {done.returncode}: {done.stderr[-800:]}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def rows_of(folder: Path) -> list[tuple[Any, ...]]:
    """The first and last rows of what a way made, as numbers: categories in hex digits by their value."""
    table = pq.read_table(sorted(folder.rglob("*.parquet")), columns=["label", *DENSE, *CATEGORICAL], partitioning=None)
    ends = [table.slice(0, _COMPARED_ROWS), table.slice(max(0, table.num_rows - _COMPARED_ROWS))]
    rows = [row for end in ends for row in zip(*(end.column(name).to_pylist() for name in end.column_names))]
    return [tuple(int(value, 16) if isinstance(value, str) else value for value in row) for row in rows]


def measure(file: Path, num_rows: int, ways: Sequence[str], *, rounds: int, scratch: Path) -> list[dict[str, Any]]:
    """What each way told in each round.

    Raises:
        Unequal: a way lost rows, or made others.
    """
    taken = []
    for number in range(rounds):
        told, made = {}, {}
        order = [*ways[number % len(ways) :], *ways[: number % len(ways)]]
        for way in order:
            told[way] = run(way, file, scratch / way)
            if told[way]["rows"] != num_rows:
                raise Unequal(f"{way} made {told[way]['rows']} rows of {num_rows}")
            if number == 0:
                made[way] = rows_of(scratch / way)
            shutil.rmtree(scratch / way)
        if unequal := [way for way, rows in made.items() if rows != made[OURS]]:
            raise Unequal(f"{unequal} made other rows than {OURS}")
        taken.append(told)
    return taken


def figures(taken: Sequence[dict[str, Any]], num_rows: int) -> dict[str, dict[str, Spread]]:
    """Rows per second, processor seconds, peak bytes and ours' ratio to each way, as spreads over rounds."""
    return {
        way: {
            "rows_per_second": spread([num_rows / told[way]["seconds"] for told in taken]),
            "processor_seconds": spread([told[way]["processor"] for told in taken]),
            "peak_bytes": spread([float(told[way]["peak"]) for told in taken]),
            "ours_to_it": spread([told[way]["seconds"] / told[OURS]["seconds"] for told in taken]),
        }
        for way in taken[0]
    }


def ratio_to_pyarrow(taken: Sequence[dict[str, Any]]) -> Spread:
    """Ours to the faster pyarrow way of each round."""
    return spread([min(told[way]["seconds"] for way in PYARROW) / told[OURS]["seconds"] for told in taken])


def print_figures(result: dict[str, Any]) -> None:
    """The table, and what is met or missed."""
    print(
        f"\n{result['rows']:,} rows, {result['packed_bytes'] / 1e6:,.0f} MB packed; median (least to most) over rounds"
    )
    print(f"  {'':<16} {'rows/s':>32} {'ours to it':>22} {'processor s':>12} {'peak MB':>9}")
    for way, each in result["ways"].items():
        rate, ratio = each["rows_per_second"], each["ours_to_it"]
        print(
            f"  {way:<16} {rate.median:>10,.0f} ({rate.least:>8,.0f} to {rate.most:>8,.0f})"
            f" {ratio.median:>6.2f} ({ratio.least:>4.2f} to {ratio.most:>4.2f})"
            f" {each['processor_seconds'].median:>12.2f} {each['peak_bytes'].median / 1e6:>9,.0f}"
        )
    ratio, small, large = result["ratio_to_pyarrow"], result["ways"][OURS]["peak_bytes"].most, result["large"]
    value = f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
    print_target(
        "ours to the faster pyarrow way", value, f"at least {RATIO_TARGET:g}", is_met=ratio.median >= RATIO_TARGET
    )
    peak = max(small, large["peak"])
    print_target(
        "peak memory of ours",
        f"{peak / 1e6:,.0f} MB",
        f"at most {MEMORY_TARGET / 1e6:,.0f} MB",
        is_met=peak <= MEMORY_TARGET,
    )
    growth = large["peak"] / small
    name = f"peak on {large['rows']:,} rows to that on {result['rows']:,}"
    print_target(name, f"{growth:.2f}", f"at most {GROWTH_TARGET}", is_met=growth <= GROWTH_TARGET)


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.extraction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a minute: fewer rounds and rows, wider spreads")
    parser.add_argument("--rows", type=int, default=None, help="rows of the file")
    parser.add_argument("--way", nargs=3, metavar=("WAY", "FILE", "FOLDER"), help="only one way, in this process")
    parser.add_argument(
        "--output", type=Path, default=Path("build/benchmarks/extraction.json"), help="JSON file with all figures"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all; 0 = all figures are there, whatever they say."""
    flags = build_parser().parse_args(argv)
    if flags.way:
        way, file, folder = flags.way
        print(json.dumps(run_here(way, Path(file).absolute(), Path(folder).absolute())))
        return 0
    num_rows = flags.rows or (_QUICK_ROWS if flags.quick else _ROWS)
    ways = [OURS, *PYARROW]
    facts, other_work = machine.facts(), machine.OtherWork()
    facts |= {"cores_used": len(os.sched_getaffinity(0))}
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        scratch = Path(folder)
        file, large = scratch / "day_0.gz", scratch / "day_1.gz"
        write_tsv_gz(file, num_rows)
        taken = measure(file, num_rows, ways, rounds=_QUICK_ROUNDS if flags.quick else _ROUNDS, scratch=scratch)
        # Members of a gzip file follow each other.
        with open(large, "wb") as copies:
            for _ in range(_LARGER):
                copies.write(file.read_bytes())
        result: dict[str, Any] = {
            "rows": num_rows,
            "packed_bytes": file.stat().st_size,
            "ways": figures(taken, num_rows),
            "ratio_to_pyarrow": ratio_to_pyarrow(taken),
            "large": run(OURS, large, scratch / "large"),
        }
    print_figures(result)
    if warning := other_work.warning():
        print(warning)
    document = {"machine": facts, "quick": flags.quick, "other_work_share": other_work.share(), **named(result)}
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(flags.output, json.dumps(document, indent=2) + "\n")
    print(f"written: {flags.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
