"""Compare our conversion of Criteo 1TB's TSV.gz to Parquet with two pyarrow programs.

Run by `make benchmark-extraction`. Each of the three conversions (`--way`) runs in its own process
on all cores. The order of the conversions changes each round, and each ratio divides two rates of
the same round. One pyarrow program reads the complete file by read_csv, and the other program reads
block by block by open_csv. In each round, our rate is compared with the faster of the two programs.
The benchmark checks that the outputs agree: the number of rows, and all values of the first and
last rows. Our peak memory is also measured on a file with several times the rows.

Prints tables, and writes all figures as JSON.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from benchmarks.command import benchmark_parser, documented, run_to_end
from benchmarks.criteo_text import write_tsv_gz
from benchmarks.machine import own_memory
from benchmarks.spread import Figure, Spread, spread

DENSE, CATEGORICAL = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
NAMES = ["label", *DENSE, *CATEGORICAL]

Way = Callable[[Path, Path], Callable[[], int]]
"""Function that imports the libraries of a conversion, and returns a worker. The worker reads the
file, writes to the folder, and returns the number of rows."""


def ours(file: Path, folder: Path) -> Callable[[], int]:
    """Convert the file with the reader and the writer of our extraction step.

    Reader and writer check every value, set malformed lines aside with their line numbers, and
    convert categories to int64.
    """
    from evergreen.contracts.criteo import CRITEO_RECOMMENDER
    from evergreen.rows.forms import find_reader
    from evergreen.rows.raw_schema import MalformedRows, PartWriter

    def work() -> int:
        with MalformedRows(folder / "malformed.jsonl") as malformed, PartWriter(folder) as writer:
            for batch in find_reader(file, CRITEO_RECOMMENDER).batches(malformed):
                writer.write(batch)
            malformed.check()
        return sum(part.num_rows for part in writer.parts)

    return work


def pyarrow_whole(file: Path, folder: Path) -> Callable[[], int]:
    """Use pyarrow.csv.read_csv with types and threads, then parquet.write_table.

    pyarrow checks that the number of fields is right, the label is an integer, and the other fields
    are numbers. `0x1f`, `nan`, `1.5` and ` 1` count as numbers. Categories are read as strings, and
    are not checked.
    """

    def work() -> int:
        table = pv.read_csv(file, **_pyarrow_options(block_bytes=1 << 20))
        pq.write_table(table, folder / "part-0.parquet")
        return int(table.num_rows)

    return work


def pyarrow_stream(file: Path, folder: Path) -> Callable[[], int]:
    """Use pyarrow.csv.open_csv in blocks of 8 MiB, and a ParquetWriter.

    `pyarrow_whole` explains which values pyarrow checks.
    """

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
    types = {
        "label": pa.int32(),
        **dict.fromkeys(DENSE, pa.float32()),
        **dict.fromkeys(CATEGORICAL, pa.string()),
    }
    return {
        "read_options": pv.ReadOptions(column_names=NAMES, block_size=block_bytes),
        "parse_options": pv.ParseOptions(delimiter="\t", quote_char=False),
        "convert_options": pv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True
        ),
    }


WAYS: dict[str, Way] = {each.__name__: each for each in (ours, pyarrow_whole, pyarrow_stream)}


def run_here(way: str, file: Path, folder: Path) -> dict[str, float]:
    """Run one conversion in this process, and return its resources.

    The resources are seconds without imports, processor seconds, rows and peak bytes of memory.
    """
    folder.mkdir()
    work = WAYS[way](file, folder)
    began, processor = time.perf_counter(), time.process_time()
    num_rows = work()
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    return {
        "seconds": seconds,
        "processor": processor,
        "rows": num_rows,
        "peak": own_memory("VmHWM"),
    }


OURS = "ours"
PYARROW = ("pyarrow_whole", "pyarrow_stream")
RATIO_TARGET, MEMORY_TARGET, GROWTH_TARGET = 0.5, 10**9, 1.1
"""Minimum rate relative to the faster pyarrow variant, maximum peak memory in bytes, and maximum
growth of the peak memory on the large file. The target for growth allows 10 % for noise."""
_ROWS, _QUICK_ROWS, _ROUNDS, _QUICK_ROUNDS = 1_500_000, 200_000, 5, 3
_LARGER = 4
_COMPARED_ROWS = 500


class Unequal(Exception):
    """Two conversions wrote different rows for one file, so their speeds are not comparable."""


def run(way: str, file: Path, folder: Path) -> dict[str, Any]:
    """Run one conversion in a new process, and return the result of `run_here`."""
    command = [sys.executable, "-m", "benchmarks.extraction", "--way", way, str(file), str(folder)]
    measured: dict[str, Any] = json.loads(run_to_end(command).splitlines()[-1])
    return measured


def rows_of(folder: Path) -> list[tuple[Any, ...]]:
    """Return the first and last rows of a conversion's output as numbers.

    A category is converted to the number that its hex digits represent.
    """
    table = pq.read_table(
        sorted(folder.rglob("*.parquet")),
        columns=["label", *DENSE, *CATEGORICAL],
        partitioning=None,
    )
    ends = [table.slice(0, _COMPARED_ROWS), table.slice(max(0, table.num_rows - _COMPARED_ROWS))]
    rows = [
        row
        for end in ends
        for row in zip(*(end.column(name).to_pylist() for name in end.column_names))
    ]
    return [
        tuple(int(value, 16) if isinstance(value, str) else value for value in row) for row in rows
    ]


def measure(
    file: Path, num_rows: int, ways: Sequence[str], *, rounds: int, scratch: Path
) -> list[dict[str, Any]]:
    """Return the results of each conversion in each round.

    Raises:
        Unequal: a conversion lost or changed rows.
    """
    results = []
    for number in range(rounds):
        measured, made = {}, {}
        order = [*ways[number % len(ways) :], *ways[: number % len(ways)]]
        for way in order:
            measured[way] = run(way, file, scratch / way)
            if measured[way]["rows"] != num_rows:
                raise Unequal(f"{way} wrote {measured[way]['rows']} rows, expected {num_rows}")
            if number == 0:
                made[way] = rows_of(scratch / way)
            shutil.rmtree(scratch / way)
        if unequal := [way for way, rows in made.items() if rows != made[OURS]]:
            raise Unequal(f"the rows of {unequal} differ from the rows of {OURS}")
        results.append(measured)
    return results


def figures(results: Sequence[dict[str, Any]], num_rows: int) -> dict[str, dict[str, Spread]]:
    """Return the figures as spreads over rounds.

    The figures are rows per second, processor seconds, peak bytes, and our speed relative to each
    conversion.
    """
    return {
        way: {
            "rows_per_second": spread(
                [num_rows / measured[way]["seconds"] for measured in results]
            ),
            "processor_seconds": spread([measured[way]["processor"] for measured in results]),
            "peak_bytes": spread([float(measured[way]["peak"]) for measured in results]),
            "ours_to_it": spread(
                [measured[way]["seconds"] / measured[OURS]["seconds"] for measured in results]
            ),
        }
        for way in results[0]
    }


def ratio_to_pyarrow(results: Sequence[dict[str, Any]]) -> Spread:
    """Return our rate relative to the faster pyarrow program, per round."""
    return spread(
        [
            min(measured[way]["seconds"] for way in PYARROW) / measured[OURS]["seconds"]
            for measured in results
        ]
    )


def print_figures(result: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"\n{result['rows']:,} rows, {result['packed_bytes'] / 1e6:,.0f} MB packed; median (least "
        "to most) over rounds"
    )
    print(f"  {'':<16} {'rows/s':>32} {'ours to it':>22} {'processor s':>12} {'peak MB':>9}")
    for way, each in result["ways"].items():
        rate, ratio = each["rows_per_second"].shown(",.0f"), each["ours_to_it"].shown(".2f")
        processor, peak = each["processor_seconds"].median, each["peak_bytes"].median / 1e6
        print(f"  {way:<16} {rate:>32} {ratio:>22} {processor:>12.2f} {peak:>9,.0f}")


def figures_of(result: dict[str, Any]) -> list[Figure]:
    """Return the figures for the page."""
    small, large = result["ways"][OURS]["peak_bytes"].most, result["large"]
    name, peak = f"peak memory on {large['rows']:,} rows", spread([max(small, large["peak"]) / 1e6])
    ratio = result["ratio_to_pyarrow"]
    return [
        Figure(
            "Criteo text to Parquet",
            ratio,
            peer="the faster pyarrow way",
            target=RATIO_TARGET,
            is_least=True,
        ),
        *(
            Figure(f"{way}, rate", each["rows_per_second"], "rows/s")
            for way, each in result["ways"].items()
        ),
        Figure("peak memory of ours", peak, "MB", target=MEMORY_TARGET / 1e6),
        Figure(
            name,
            spread([large["peak"] / small]),
            peer=f"{result['rows']:,} rows",
            target=GROWTH_TARGET,
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run every conversion, and return 0."""
    parser = benchmark_parser(
        "extraction", __doc__, quick="a minute: fewer rounds and rows, wider spreads"
    )
    parser.add_argument(
        "--way",
        nargs=3,
        metavar=("WAY", "FILE", "FOLDER"),
        help="run only one way, in this process",
    )
    flags = parser.parse_args(argv)
    if flags.way:
        way, file, folder = flags.way
        print(json.dumps(run_here(way, Path(file).absolute(), Path(folder).absolute())))
        return 0
    num_rows = _QUICK_ROWS if flags.quick else _ROWS
    with documented(flags) as document, tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        document |= measure_all(
            num_rows, rounds=_QUICK_ROUNDS if flags.quick else _ROUNDS, scratch=Path(scratch)
        )
        print_figures(document)
        document["figures"] = figures_of(document)
    return 0


def measure_all(num_rows: int, *, rounds: int, scratch: Path) -> dict[str, Any]:
    """Return the figures of each conversion of the file, and our peak memory on a larger file."""
    file, large = scratch / "day_0.gz", scratch / "day_1.gz"
    write_tsv_gz(file, num_rows)
    results = measure(file, num_rows, [OURS, *PYARROW], rounds=rounds, scratch=scratch)
    # A gzip file may consist of several members.
    with open(large, "wb") as copies:
        for _ in range(_LARGER):
            copies.write(file.read_bytes())
    return {
        "rows": num_rows,
        "packed_bytes": file.stat().st_size,
        "ways": figures(results, num_rows),
        "ratio_to_pyarrow": ratio_to_pyarrow(results),
        "large": run(OURS, large, scratch / "large"),
    }


if __name__ == "__main__":
    sys.exit(main())
