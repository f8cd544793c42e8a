"""Compare the speed of preprocessing with a stock NVTabular script on the same rows.

Run by `make benchmark-preprocessing`.

1. A first run of the step (fit, transform, verification and publishing), compared with the script's
   fit, transform and to_parquet. If the two outputs differ (`same_encoding`), the benchmark fails,
   because the times would not be comparable.
2. An incremental run, which extends vocabularies without a new fit. The script cannot extend
   vocabularies, so the script repeats its fit. Parts 1 and 2 are measured with 200,000 rows and
   with a million rows. The other parts are measured only with a million rows.
3. Fixed cost: an incremental run of few rows, including interpreter and imports.
4. Seconds, processor time and memory of both engines (NVTabular and NumPy) in parts 1 to 3.
5. Memory for two window sizes. The figure is the proportional share of anonymous memory (Linux
   `Pss_Anon`) of the process and its children.

All figures are for complete processes. The processes run one after another, in another order every
round. Each ratio divides two figures of the same round. A missed target is printed, and the exit
code stays 0. All figures are written as JSON.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import raw_windows, same_encoding
from benchmarks.command import Run, benchmark_parser, documented, measure
from benchmarks.spread import Figure, Spread, spread
from benchmarks.stock_nvtabular import FREQUENCY_THRESHOLD
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import Model, RawDataset, TrainingSet
from evergreen.registry.models import model_folder
from evergreen.runtime.durable import sha256_tree
from evergreen.storage.uris import local_path
from testing.releases import keep_model


def step(
    raw: Path, bench: Path, run: str, *, parent: str | None = None, **settings: int | str
) -> Run:
    """Return the command that runs the step on a manifest's raw rows.

    The command writes `bench/work/<run>/preprocessing` and `bench/<run>.json`.
    """
    merged: dict[str, int | str] = {"frequency_threshold": FREQUENCY_THRESHOLD, **settings}
    recommender = CRITEO_RECOMMENDER.with_settings(
        {f"preprocessing.{name}": value for name, value in merged.items()}
    )
    replace(RawDataset.read(raw), parent_model_id=parent, recommender=recommender).write(raw)
    command = [sys.executable, "-m", "components.preprocessing", f"--run={run}"]
    command += [f"--store={bench / 'store'}", f"--work={bench / 'work'}", f"--raw-dataset={raw}"]
    command += [f"--output={bench / run}.json"]
    return measure(command)


def stock(raw: Path, out: Path) -> Run:
    """Remove earlier output, and return the command that runs the stock script on the same rows."""
    shutil.rmtree(out, ignore_errors=True)
    return measure([sys.executable, "-m", "benchmarks.stock_nvtabular", str(raw.parent), str(out)])


def save_as_model(bench: Path, run: str, model_id: str) -> None:
    """Store a run's workflow as part of a model, so that another run can continue from it."""
    training_set = TrainingSet.read(bench / f"{run}.json")
    folder = model_folder(bench / "store", model_id)
    shutil.copytree(local_path(training_set.workflow_uri), folder / Model.WORKFLOW)
    keep_model(
        bench / "store",
        model_id,
        slot_sizes=training_set.slot_sizes,
        recommender=CRITEO_RECOMMENDER,
        last_event_time=training_set.last_event_time,
        watermark=training_set.watermark,
        raw_digest=training_set.raw_digest,
        sha256={"workflow": sha256_tree(folder / Model.WORKFLOW)},
    )


TARGETS = {200_000: 4.0, 1_000_000: 6.0}
"""Target speed as a multiple of the script's speed, by the number of rows."""
FIXED_TARGET_SECONDS, FIXED_ROWS = 5.0, 10_000
MEMORY_TARGET = 1.15
"""Maximum ratio of two peaks of memory: the peak with four times as many rows, divided by the peak
with the original rows."""
_PARTITION_ROWS = 65_536


class PreprocessingBench:
    """Folders for two windows, for a registry with the first window's model, and for output."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        """Write the windows, and fit the model."""
        self.folder, self.num_rows = folder, num_rows
        self.first = raw_windows.write_window(folder / "first", num_rows, seed=1)
        self.later = raw_windows.write_window(folder / "later", num_rows, seed=2, is_later=True)
        self.few = raw_windows.write_window(folder / "few", FIXED_ROWS, seed=3, is_later=True)
        self.full_run()
        save_as_model(folder, "full", "m0")

    def full_run(self) -> Run:
        """Run the step for a first model."""
        return step(self.first, self.folder, "full")

    def incremental_run(self, raw: Path, **settings: int | str) -> Run:
        """Run the step with the model as parent."""
        return step(raw, self.folder, "incremental", parent="m0", **settings)

    def against_stock(
        self, ours: Callable[[], Run], raw: Path, *, num_rows: int, rounds: int
    ) -> dict[str, Any]:
        """Return the figures of the step and of the stock script on the same rows.

        In each round, the step and the script run one after the other.
        """
        measured: list[dict[str, Run]] = []
        for number in range(rounds):
            turns = [("ours", ours), ("stock", lambda: stock(raw, self.folder / "stock"))]
            measured.append({name: run() for name, run in (turns if number % 2 else turns[::-1])})
        seconds = {
            name: spread([runs[name].seconds for runs in measured]) for name in ("stock", "ours")
        }
        processor = [
            runs["stock"].processor_seconds / runs["ours"].processor_seconds for runs in measured
        ]
        return {
            "num_rows": num_rows,
            "seconds": seconds,
            "ratio": spread([runs["stock"].seconds / runs["ours"].seconds for runs in measured]),
            "ratio_of_processor_seconds": spread(processor),
        }


def full(bench: PreprocessingBench, rounds: int) -> dict[str, Any]:
    """Measure a first run, and compare both outputs."""
    result = bench.against_stock(
        bench.full_run, bench.first, num_rows=bench.num_rows, rounds=rounds
    )
    ours = bench.folder / "work" / "full" / "preprocessing"
    result["rows_compared_and_the_same"] = same_encoding.expect_same(bench.folder / "stock", ours)
    result["figures"] = _figures("first round", result)
    print(
        f"  the same output as the script's: {result['rows_compared_and_the_same']:,} rows compared"
    )
    return result


def incremental(bench: PreprocessingBench, rounds: int) -> dict[str, Any]:
    """Measure a run that only extends vocabularies."""
    ours = partial(bench.incremental_run, bench.later)
    result = bench.against_stock(ours, bench.later, num_rows=bench.num_rows, rounds=rounds)
    result["figures"] = _figures("incremental round", result)
    return result


def fixed(bench: PreprocessingBench, rounds: int) -> dict[str, Any]:
    """Measure a run of few rows."""
    ours = partial(bench.incremental_run, bench.few)
    result = bench.against_stock(ours, bench.few, num_rows=FIXED_ROWS, rounds=rounds)
    name = f"incremental round of {FIXED_ROWS:,} rows, whole process"
    result["figures"] = [Figure(name, result["seconds"]["ours"], "s", target=FIXED_TARGET_SECONDS)]
    return result


def engines(bench: PreprocessingBench, rounds: int) -> dict[str, Any]:
    """Compare NVTabular's engine with NumPy's engine on the same rows."""
    cases: dict[str, Callable[[str], Run]] = {
        "first round": lambda engine: step(bench.first, bench.folder, "engines", engine=engine),
        "incremental round": lambda engine: bench.incremental_run(bench.later, engine=engine),
        f"{FIXED_ROWS:,} rows": lambda engine: bench.incremental_run(bench.few, engine=engine),
    }
    results: dict[str, Any] = {}
    for case, run in cases.items():
        measured = []
        for number in range(rounds):
            turns = ("numpy", "nvtabular") if number % 2 else ("nvtabular", "numpy")
            measured.append({engine: run(engine) for engine in turns})
        of_engines = {
            engine: {
                figure: spread([getattr(runs[engine], figure) for runs in measured])
                for figure in Run._fields
            }
            for engine in turns
        }
        ratios = {
            f: spread([getattr(r["nvtabular"], f) / getattr(r["numpy"], f) for r in measured])
            for f in Run._fields
        }
        results[case] = {**of_engines, "nvtabular_to_numpy": ratios}
        ratio_text = ", ".join(f"{figure} {ratio.median:.2f}" for figure, ratio in ratios.items())
        print(f"  {case}: NVTabular's engine to NumPy's: {ratio_text}")
    return results


def memory(bench: PreprocessingBench, rounds: int) -> dict[str, Any]:
    """Measure the peak memory for the rows, and for four times as many rows.

    Both runs use the same partition size.
    """
    larger = raw_windows.write_window(
        bench.folder / "larger", 4 * bench.num_rows, seed=4, is_later=True
    )
    peaks = {}
    for name, raw in (("once", bench.later), ("four times", larger)):
        peaks[name] = min(
            bench.incremental_run(raw, partition_rows=_PARTITION_ROWS).peak
            for _ in range(min(rounds, 2))
        )
    ratio, script = (
        peaks["four times"] / peaks["once"],
        stock(bench.later, bench.folder / "stock").peak,
    )
    of_sizes = Figure(
        "peak memory of four times the rows", spread([ratio]), peer="once", target=MEMORY_TARGET
    )
    figures = [
        of_sizes,
        Figure(
            "peak memory of four times the rows, MiB", spread([peaks["four times"] / 2**20]), "MiB"
        ),
        Figure("peak memory of the script, once the rows", spread([script / 2**20]), "MiB"),
    ]
    return {"peak": peaks, "ratio": ratio, "stock": script, "figures": figures}


def _figures(title: str, result: dict[str, Any]) -> list[Figure]:
    rows, seconds, script = (
        result["num_rows"],
        result["seconds"]["ours"],
        "the stock NVTabular script",
    )
    name, rates = (
        f"{title} of {rows:,} rows",
        Spread(*(rows / seconds[i] for i in (0, 2, 1))),
    )
    return [
        Figure(name, result["ratio"], peer=script, target=TARGETS[rows], is_least=True),
        Figure(f"{name}, processor time", result["ratio_of_processor_seconds"], peer=script),
        Figure(f"{name}, rate", rates, "rows/s"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all parts, and return 0."""
    quick = "two minutes: 200,000 rows and one round, so start-up weighs more"
    parser = benchmark_parser("preprocessing", __doc__, quick=quick)
    flags = parser.parse_args(argv)
    small, large = TARGETS
    rounds = 1 if flags.quick else 5
    every: tuple[Callable[..., dict[str, Any]], ...] = (full, incremental, fixed, engines, memory)
    parts = {small: every} if flags.quick else {small: every[:2], large: every}
    with documented(flags) as document, tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        results: dict[str, Any] = {}
        document["figures"], document["results"] = [], results
        for num_rows, of_size in parts.items():
            bench = PreprocessingBench(Path(scratch) / str(num_rows), num_rows)
            found = results[f"{num_rows:,} rows"] = {
                part.__name__: part(bench, rounds) for part in of_size
            }
            document["figures"] += [
                figure for each in found.values() for figure in each.pop("figures", [])
            ]
    return 0


if __name__ == "__main__":
    sys.exit(main())
