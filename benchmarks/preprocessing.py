"""How fast preprocessing is, beside a stock NVTabular script on the same rows: `make benchmark-preprocessing`.

1. A first round: fit, transform, verification and publishing, against the script's fit, transform and to_parquet. That
   both say the same is checked in the run (`same_encoding`), or the figures would be of something else.
2. An incremental round: vocabularies are extended, nothing is refitted; the script knows no such thing and fits again.
3. Fixed cost: an incremental round of few rows, interpreter and imports included.
4. Memory at two sizes of the window.

Whole processes, in turns, every round in another order; a ratio is of one round's two. A missed target is printed as
missed, and the exit code stays 0. Writes all figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, preprocessing_process, raw_windows, same_encoding
from benchmarks.preprocessing_process import Run
from benchmarks.spread import spread
from components.runtime.durable import write_whole

FULL_TARGET, INCREMENTAL_TARGET = 1.8, 4.0
FIXED_TARGET_SECONDS, FIXED_ROWS = 5.0, 10_000
MEMORY_TARGET = 1.15
"""Of four times the rows, as a multiple of the memory of once the rows."""
_PARTITION_ROWS = "--partition-rows=65536"


class Place:
    """Folders of one benchmark: two windows, a store with a model fitted on the first, and what is written."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        """Writes the windows, and fits the model."""
        self.folder, self.num_rows = folder, num_rows
        self.first = raw_windows.write_window(folder / "first", num_rows, seed=1)
        self.later = raw_windows.write_window(folder / "later", num_rows, seed=2, is_later=True)
        self.few = raw_windows.write_window(folder / "few", FIXED_ROWS, seed=3, is_later=True)
        self.full_round()
        preprocessing_process.keep_as_model(folder, "full", "m0")

    def full_round(self) -> Run:
        """A first round of the step."""
        return preprocessing_process.step(self.first, self.folder, "full")

    def incremental_round(self, raw: Path, *flags: str) -> Run:
        """A round that goes on from the model."""
        return preprocessing_process.step(raw, self.folder, "incremental", parent="m0", flags=flags)

    def stock_script(self, raw: Path) -> Run:
        """The peer."""
        return preprocessing_process.stock(raw, self.folder / "stock")


def against_stock(ours: Callable[[], Run], stock: Callable[[], Run], num_rows: int, rounds: int) -> dict[str, Any]:
    """Figures of both in turns."""
    taken: list[dict[str, Run]] = []
    for number in range(rounds):
        turns = [("ours", ours), ("stock", stock)]
        taken.append({name: run() for name, run in (turns if number % 2 else turns[::-1])})
    rates = {name: spread([num_rows / runs[name].seconds for runs in taken]) for name in ("stock", "ours")}
    ratios = spread([runs["stock"].seconds / runs["ours"].seconds for runs in taken])
    of_processor = spread([runs["stock"].processor_seconds / runs["ours"].processor_seconds for runs in taken])
    return {
        "num_rows": num_rows,
        "rows_per_second": {name: rate._asdict() for name, rate in rates.items()},
        "seconds": {name: spread([runs[name].seconds for runs in taken])._asdict() for name in rates},
        "ratio": ratios._asdict(),
        "ratio_of_processor_seconds": of_processor._asdict(),
        "stock_phases": preprocessing_process.phases(taken[-1]["stock"]),
    }


def full(place: Place, rounds: int) -> dict[str, Any]:
    """A first round; both outputs are compared."""
    result = against_stock(place.full_round, lambda: place.stock_script(place.first), place.num_rows, rounds)
    ours = place.folder / "work" / "full" / "preprocessing"
    result["rows_compared_and_the_same"] = same_encoding.expect_same(place.folder / "stock", ours)
    _print("first round", result, FULL_TARGET)
    print(f"  the same output as the script's: {result['rows_compared_and_the_same']:,} rows compared")
    return result


def incremental(place: Place, rounds: int) -> dict[str, Any]:
    """A round that only extends vocabularies."""
    result = against_stock(
        lambda: place.incremental_round(place.later),
        lambda: place.stock_script(place.later),
        place.num_rows,
        rounds,
    )
    _print("incremental round", result, INCREMENTAL_TARGET)
    return result


def fixed(place: Place, rounds: int) -> dict[str, Any]:
    """A round of few rows."""
    result = against_stock(
        lambda: place.incremental_round(place.few), lambda: place.stock_script(place.few), FIXED_ROWS, rounds
    )
    result["import_seconds"] = spread([preprocessing_process.import_seconds() for _ in range(rounds)])._asdict()
    seconds = result["seconds"]["ours"]
    print(
        f"incremental round of {FIXED_ROWS:,} rows, whole process: {seconds['median']:.2f} s "
        f"({seconds['least']:.2f} to {seconds['most']:.2f}), of that interpreter and imports "
        f"{result['import_seconds']['median']:.2f} s; the "
        f"script {result['seconds']['stock']['median']:.2f} s; target {FIXED_TARGET_SECONDS} s: "
        f"{_met(seconds['median'] <= FIXED_TARGET_SECONDS)}"
    )
    return result


def memory(place: Place, rounds: int) -> dict[str, Any]:
    """Peak memory of a round on once and four times the rows, in partitions of the same size."""
    larger = raw_windows.write_window(place.folder / "larger", 4 * place.num_rows, seed=4, is_later=True)
    peaks = {}
    for name, raw in (("once", place.later), ("four times", larger)):
        peaks[name] = min(place.incremental_round(raw, _PARTITION_ROWS).peak for _ in range(min(rounds, 2)))
    stock = place.stock_script(place.later).peak
    ratio = peaks["four times"] / peaks["once"]
    print(
        f"peak memory of {place.num_rows:,} and {4 * place.num_rows:,} rows: {peaks['once'] / 2**20:.0f} and "
        f"{peaks['four times'] / 2**20:.0f} MiB, {ratio:.2f} times; target {MEMORY_TARGET}: "
        f"{_met(ratio <= MEMORY_TARGET)} (the script, once: {stock / 2**20:.0f} MiB)"
    )
    return {"peak": peaks, "ratio": ratio, "stock": stock}


PARTS: dict[str, Callable[[Place, int], dict[str, Any]]] = {
    "full": full,
    "incremental": incremental,
    "fixed": fixed,
    "memory": memory,
}


def _print(title: str, result: dict[str, Any], target: float) -> None:
    rates, ratio = result["rows_per_second"], result["ratio"]
    print(
        f"{title} of {result['num_rows']:,} rows: {rates['ours']['median']:,.0f} rows/s, the script "
        f"{rates['stock']['median']:,.0f}; {ratio['median']:.2f} times ({ratio['least']:.2f} to {ratio['most']:.2f}), "
        f"in processor time {result['ratio_of_processor_seconds']['median']:.2f}; target {target}: "
        f"{_met(ratio['median'] >= target)}",
        flush=True,
    )


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def build_parser() -> argparse.ArgumentParser:
    """The benchmark's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preprocessing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="two minutes: 200,000 rows and one round, so start-up weighs more")
    add("--only", action="append", choices=list(PARTS), help="may be repeated")
    add("--rows", type=int, default=1_000_000, help="of a window (default %(default)s)")
    add("--output", type=Path, default=Path("build/benchmarks/preprocessing.json"), help="JSON file with all figures")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen parts; 0 = all figures are there, whether or not they meet their targets."""
    flags = build_parser().parse_args(argv)
    facts, other_work = machine.facts(), machine.OtherWork()
    facts |= {name: machine.version_of(name) for name in ("nvtabular", "dask")}
    print("; ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    results = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        place = Place(Path(scratch), 200_000 if flags.quick else flags.rows)
        for name in flags.only or PARTS:
            results[name] = PARTS[name](place, 1 if flags.quick else 5)
    if warning := other_work.warning():
        print(warning)
    document = {"machine": facts, "quick": flags.quick, "other_work_share": other_work.share(), "results": results}
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(flags.output, json.dumps(document, indent=2) + "\n")
    print(f"written: {flags.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
