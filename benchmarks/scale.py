"""Measure each step's resources by window size, and the cost of a vocabulary's key.

`python -m benchmarks.scale` writes lakes of 100,000 to 20 million rows. On each lake, extraction,
validation, preprocessing and the training of a first model run as processes. The figures are
processor seconds, peak anonymous memory of the step and its children, and bytes left on disk
(docs/kubernetes/scale.md). Each row is narrow, with two numbers and three categories. The column
`user` has one distinct key per 20 rows. A line through the two largest windows extrapolates to a
billion rows.

The cost of a key is measured separately: in counting and admitting, in encoding, and in the served
graph's look-up table.

Prints tables, and writes all figures as JSON.
"""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.command import benchmark_parser, documented, measure
from benchmarks.full_window import write_days
from benchmarks.spread import Figure, spread
from demo.environments import python_of
from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import TrainingSet
from evergreen.contracts.raw_rows import DAY_PARTITION, EVENT_TIME, LABEL, REQUEST_ID, ROW
from evergreen.registry.recommenders import accept
from evergreen.runtime.flags import whoami

SIZES, QUICK_SIZES = (100_000, 1_000_000, 5_000_000, 20_000_000), (100_000, 400_000)
FOLLOWED_TO = (10_000_000, 100_000_000, 1_000_000_000)
KEYS, QUICK_KEYS = (1_000_000, 4_000_000), (100_000, 400_000)
WIDE_ROWS = 2_000_000
"""Window sizes in rows for the measurement with Criteo's columns."""
DAY_ROWS, FILE_ROWS, REQUEST_ROWS, USER_ROWS, NUM_ITEMS = 2_000_000, 250_000, 10, 20, 100_000
FEATURES = Features(numeric=("price", "age"), categorical=("user", "item", "device"))
STEPS = {
    "extraction": "driver",
    "validation": "validation",
    "preprocessing": "preprocessing",
    "training": "training",
}
"""Environment of each step."""
_FIRST_DAY = datetime(2026, 1, 1, tzinfo=timezone.utc)


class StepNeeds(NamedTuple):
    """Resources of one step on one window."""

    rows: int
    seconds: float
    processor_seconds: float
    peak: int
    """Peak memory in bytes."""
    disk: int
    """Bytes on disk after the step."""


class FittedLine(NamedTuple):
    """A straight line through two points."""

    start: float
    slope: float

    def at(self, x: float) -> float:
        """Return the value of the line at a point."""
        return self.start + self.slope * x


def line_through(points: Sequence[tuple[float, float]]) -> FittedLine:
    """Return the line through two points.

    >>> line_through([(1, 5), (4, 11)])
    FittedLine(start=3.0, slope=2.0)
    """
    (x, y), (x2, y2) = points
    slope = (y2 - y) / (x2 - x)
    return FittedLine(y - slope * x, slope)


def write_lake(lake: Path, *, rows: int, days: int) -> None:
    """Write `rows` rows over `days` days, in files of at most `FILE_ROWS`."""
    day_rows = -(-rows // (days * FILE_ROWS)) * FILE_ROWS
    random = np.random.default_rng(rows)
    for begin in range(0, rows, FILE_ROWS):
        number = np.arange(begin, min(begin + FILE_ROWS, rows))
        n = len(number)
        day, index = np.divmod(number, day_rows)
        start = int(_FIRST_DAY.timestamp() * 1e6)
        times = (
            start
            + day * 86_400_000_000
            + index // REQUEST_ROWS * (86_000_000_000 * REQUEST_ROWS // day_rows)
        )
        table = pa.table(
            {
                LABEL: pa.array((random.random(n) < 0.1).astype(np.int32)),
                "price": pa.array(
                    random.lognormal(3, 1, n).astype(np.float32), mask=random.random(n) < 0.05
                ),
                "age": pa.array(random.integers(0, 365, n).astype(np.float32)),
                "user": pa.array(random.integers(0, max(1, rows // USER_ROWS), n)),
                "item": pa.array(np.minimum(random.zipf(1.2, n), NUM_ITEMS)),
                "device": pa.array(random.integers(0, 10, n)),
                REQUEST_ID: pa.array(
                    [f"request-{each:012d}" for each in (number // REQUEST_ROWS).tolist()]
                ),
                ROW: pa.array((number % REQUEST_ROWS).astype(np.int32)),
                EVENT_TIME: pa.array(times, pa.timestamp("us", tz="UTC")),
            }
        )
        name: date = (_FIRST_DAY + timedelta(days=int(day[0]))).date()
        folder = lake / DAY_PARTITION.format(day=name)
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            table, folder / f"part-{begin // FILE_ROWS:05d}.parquet", row_group_size=65_536
        )


def measure_steps(
    folder: Path, rows: int, *, wide: bool = False
) -> tuple[dict[str, StepNeeds], int]:
    """Return each step's resources for a window of `rows` rows, and its number of ids.

    `folder` is removed afterwards. `wide` selects Criteo's 39 columns instead of five.
    """
    described = CRITEO_RECOMMENDER if wide else Recommender(name="scale", features=FEATURES)
    (write_days if wide else write_lake)(folder / "lake", rows=rows, days=max(1, rows // DAY_ROWS))
    accept(folder / "store", described, who=whoami(), why="to be measured", now=_FIRST_DAY)
    shared = [f"--store={folder / 'store'}", "--run=r", f"--work={folder / 'work'}"]
    flags = {
        "extraction": [f"--lake={folder / 'lake'}", "--parent=none", "--champion=none"],
        "validation": [
            f"--raw-dataset={folder / 'extraction.json'}",
            f"--valid-dataset={folder / 'valid.json'}",
            "--champion=none",
        ],
        "preprocessing": [f"--raw-dataset={folder / 'valid.json'}"],
        "training": [f"--training-set={folder / 'preprocessing.json'}"],
    }
    found = {}
    for step, environment in STEPS.items():
        command = [str(python_of(environment)), "-m", f"components.{step}", *shared, *flags[step]]
        run = measure([*command, f"--output={folder / step}.json"])
        disk = sum(
            path.stat().st_size
            for path in (folder / "work" / "r" / step).rglob("*")
            if path.is_file()
        )
        found[step] = StepNeeds(rows, run.seconds, run.processor_seconds, run.peak, disk)
        print(f"{rows:,} rows, {step}: {found[step]}", flush=True)
    ids = sum(TrainingSet.read(folder / "preprocessing.json").slot_sizes)
    shutil.rmtree(folder)
    return found, ids


# -- measure the cost of a key


def count_keys(keys: int) -> None:
    """Merge the category counts of two processes, and admit all categories."""
    from components.preprocessing.vocabularies import next_column, unseen_column
    from components.preprocessing.window_statistics import merged
    from evergreen.config.preprocessing import PreprocessingSettings

    counted = (_some_keys(keys), np.full(keys, 5, np.int64))
    values, counts = merged([({"user": counted}, {}), ({"user": counted}, {})])[0]["user"]
    next_column(
        unseen_column(np.zeros(0, np.int64)), values, counts, now=1, rules=PreprocessingSettings()
    )


def encode_keys(keys: int) -> None:
    """Encode rows with a vocabulary, as each process of a step does."""
    from evergreen.contracts.workflow import FeatureWorkflow

    one = Features(numeric=(), categorical=("user",))
    nothing = np.zeros(0, np.float32)
    workflow = FeatureWorkflow(
        features=one,
        vocabularies=(_some_keys(keys)[::-1],),
        means=nothing,
        stds=nothing,
        frequency_threshold=1,
    )
    workflow.encode_categorical(np.arange(250_000)[:, None])


def build_graph(keys: int) -> None:
    """Build the served graph's look-up table."""
    from evergreen.serving.graph.encoding import build_table

    build_table(_some_keys(keys), np.arange(keys, dtype=np.int32))


def _some_keys(keys: int) -> Any:
    """Return distinct keys, ascending."""
    return np.arange(keys) * 1_000_003


USES = {each.__name__: each for each in (count_keys, encode_keys, build_graph)}


def measure_keys(sizes: Sequence[int]) -> dict[str, float]:
    """Return the peak anonymous memory per additional key of a vocabulary, by use of the keys.

    The unit is bytes.
    """
    found = {}
    for name in USES:
        peaks = [
            (
                float(keys),
                float(
                    measure(
                        [sys.executable, "-m", "benchmarks.scale", "--use", name, str(keys)]
                    ).peak
                ),
            )
            for keys in sizes
        ]
        found[name] = line_through(peaks).slope
        print(f"{name}: {found[name]:.0f} bytes a key", flush=True)
    return found


def print_needs(needs: dict[str, list[StepNeeds]]) -> dict[str, dict[str, FittedLine]]:
    """Print the measurements and the extrapolations.

    A straight line through the two largest windows gives an extrapolation. Small windows use fewer
    processes, so they are left out of the line.
    """
    lines = {}
    for step, measured in needs.items():
        lines[step] = {
            name: line_through([(each.rows, getattr(each, name)) for each in measured[-2:]])
            for name in ("processor_seconds", "peak", "disk")
        }
        print(f"\n{step}: rows, processor seconds, peak MB, disk MB")
        rows = [(f"{n.rows:,}", n.processor_seconds, n.peak, n.disk) for n in measured]
        rows += [
            (f"{n:,} by the line", *(line.at(n) for line in lines[step].values()))
            for n in FOLLOWED_TO
        ]
        for name, seconds, peak, disk in rows:
            print(f"  {name:>26}  {seconds:10,.0f}  {peak / 1e6:10,.0f}  {disk / 1e6:12,.0f}")
    return lines


def figures(needs: Mapping[str, Sequence[StepNeeds]], keys: Mapping[str, float]) -> list[Figure]:
    """Return a figure for each step and window size, and for each use of a vocabulary's keys."""
    found = []
    for step, measured in needs.items():
        for each in measured:
            name = f"{step} of {each.rows:,} rows"
            found += [
                Figure(f"{name}, processor time", spread([each.processor_seconds]), "s"),
                Figure(f"{name}, peak memory", spread([each.peak / 1e6]), "MB"),
                Figure(f"{name}, on disk", spread([each.disk / 1e6]), "MB"),
            ]
    return found + [Figure(f"{use}, a key", spread([size]), "bytes") for use, size in keys.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the steps by window size, measure the cost of a key, and return 0."""
    parser = benchmark_parser("scale", __doc__, quick="small windows and few keys (two minutes)")
    parser.add_argument("--sizes", type=int, nargs="+", help="rows of the windows")
    parser.add_argument(
        "--use",
        nargs=2,
        help="measure only one use of keys, with this number of keys",
        metavar="WHAT",
    )
    flags = parser.parse_args(argv)
    if flags.use:
        USES[flags.use[0]](int(flags.use[1]))
        return 0
    sizes = flags.sizes or (QUICK_SIZES if flags.quick else SIZES)
    with documented(flags) as document, tempfile.TemporaryDirectory(prefix="scale-") as scratch:
        document["keys"] = measure_keys(QUICK_KEYS if flags.quick else KEYS)
        needs: dict[str, list[StepNeeds]] = {step: [] for step in STEPS}
        document["ids"] = {}
        for rows in sizes:
            found, document["ids"][rows] = measure_steps(Path(scratch) / str(rows), rows)
            for step, each in found.items():
                needs[step].append(each)
        lines = print_needs(needs)
        wide, _ = measure_steps(Path(scratch) / "wide", min(WIDE_ROWS, max(sizes)), wide=True)
        document["wide"] = {step: each._asdict() for step, each in wide.items()}
        document["figures"] = figures(needs, document["keys"])
        document["figures"] += [
            figure._replace(name=f"39 columns, {figure.name}")
            for figure in figures({step: [each] for step, each in wide.items()}, {})
        ]
        document["steps"] = {
            step: [each._asdict() for each in measured] for step, measured in needs.items()
        }
        document["lines"] = {
            step: {name: line._asdict() for name, line in of_step.items()}
            for step, of_step in lines.items()
        }
    return 0


if __name__ == "__main__":
    sys.exit(main())
