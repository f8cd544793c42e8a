"""Measure the cost of a complete run from trigger to serving, by step.

Run by `make benchmark-round`. A first model trains on a day's first rows, and is released to a real
Triton. After the first model, incremental runs of all sizes follow one after another. Each run
reads the next rows of the same day. As with the monitor's local trigger, `evergreen run` starts as
a process, and runs every step in the environment of its image. The measurement starts when this
process starts. The version serves once Triton has loaded it and returned the expected scores, and
the journal has recorded it as live. The notes of the steps contain the times from which the seconds
of steps and gaps are computed.

The fixed cost is the time of a run with `EMPTY_ROWS` rows. The gate accepts every model here, so
every run ends with a release.
"""

import sys
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from benchmarks.command import benchmark_parser, documented, run_to_end
from benchmarks.spread import Figure, spread
from demo.runner import LocalFolders
from demo.simulation.simulator import Simulator, write_lake
from demo.triton import TritonServer
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import Model
from evergreen.contracts.raw_rows import DAY_PARTITION, EVENT_TIME
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import moment_of
from evergreen.registry.recommenders import accept
from evergreen.registry.runs import StepNote, read_notes
from evergreen.runtime.flags import whoami
from evergreen.storage.uris import local_path

EMPTY_ROWS = 1_000
"""Number of rows in the run whose duration is reported as the fixed cost."""
TARGETS = {EMPTY_ROWS: 25.0, 100_000: 25.0}
"""Target seconds from trigger to serving, by the number of rows in the run."""
STARTS = "processes and KFP"
"""Key for the seconds outside all steps: the start of the run, KFP, and the start of each
interpreter."""


class RunSeconds(NamedTuple):
    """Seconds of one run."""

    rows: int
    """Number of training and held-out rows in the run's window."""
    serving: float
    """Seconds from the trigger until the new version served."""
    steps: dict[str, float]
    """Seconds of each step before the new version serves. The key `STARTS` has the seconds outside
    all steps."""


def run_seconds(
    rows: int, notes: Sequence[StepNote], *, triggered: datetime, serving: datetime
) -> RunSeconds:
    """Return the duration of a run and of its steps, computed from the notes of the steps.

    Raises:
        ValueError: a step did not end, or it began before the trigger. In both cases, the notes
            belong to another run.
    """
    steps: dict[str, float] = {}
    for note in notes:
        begun = moment_of(note.started_at)
        if note.seconds is None or begun < triggered:
            raise ValueError(
                f"note of {note.step} begins at {note.started_at} and took {note.seconds} s"
            )
        until = min(begun + timedelta(seconds=note.seconds), serving)
        steps[note.step] = max((until - begun).total_seconds(), 0.0)
    total = (serving - triggered).total_seconds()
    steps[STARTS] = total - sum(steps.values())
    return RunSeconds(rows, total, steps)


def report(results: dict[int, list[RunSeconds]]) -> dict[str, Any]:
    """Print the table, and return it as a document with figures."""
    names = list(next(iter(results.values()))[0].steps)
    print(
        f"{'rows':>10} {'runs':>6} {'to serving':>20} "
        + " ".join(f"{name[:17]:>17}" for name in names)
    )
    document: dict[str, Any] = {"runs": {}, "figures": []}
    for rows, runs in results.items():
        serving = spread([each.serving for each in runs])
        steps = {name: spread([each.steps[name] for each in runs]) for name in names}
        shown = serving.shown(".1f")
        print(
            f"{rows:>10,} {len(runs):>6} {shown:>20} "
            + " ".join(f"{steps[n].median:>17.2f}" for n in names)
        )
        document["runs"][str(rows)] = {
            "runs": len(runs),
            "serving_seconds": serving,
            "steps": steps,
        }
        name = f"round of {rows:,} rows"
        document["figures"] += [
            Figure(f"{name}, from trigger to serving", serving, "s", target=TARGETS.get(rows)),
            *(Figure(f"{name}, {step}", seconds, "s") for step, seconds in steps.items()),
        ]
    return document


BASE_ROWS = 100_000
SIZES = {EMPTY_ROWS: 5, 10_000: 3, 100_000: 3, 1_000_000: 1}
"""Number of runs by size. The size of a run is its number of rows."""
QUICK_SIZES = {EMPTY_ROWS: 2, 10_000: 1}
_DAY = date(2026, 3, 1)
ACCEPT_ALL = {
    "min_auc": 0.01,
    "max_auc_loss": 1.0,
    "max_slice_loss": 1000,
    "max_calibration_factor": 1000,
}


class Bench:
    """Lake, registry and Triton server of the benchmark, with a method that runs the pipeline."""

    def __init__(self, folder: Path, server: TritonServer, times: Any) -> None:
        """Compile the pipeline, and accept a recommender whose gate passes every model.

        Args:
            folder: Root of the `LocalFolders`, including the lake.
            server: Running server over the folder's model repository.
            times: Event times of all rows of the lake [n], ascending datetimes in UTC.
        """
        self._folders = LocalFolders(root=folder)
        self._server = server
        self._times = times
        self._package = folder / "retraining.yaml"
        recommender = CRITEO_RECOMMENDER.with_settings(
            {f"gate.{name}": value for name, value in ACCEPT_ALL.items()}
        )
        now = datetime.now(timezone.utc)
        accept(
            self._folders.store,
            recommender,
            who=whoami(),
            why="runs are measured, not models",
            now=now,
        )
        run_to_end([sys.executable, "-m", "cli", "compile", f"--output={self._package}"])

    def run(self, rows: int) -> RunSeconds | None:
        """Run the pipeline over the next `rows` rows of the lake, and return its seconds.

        If the run would contain only a part of its last request, it leaves out the complete
        request. Returns None if no version was released, because the gate was undecided with so few
        rows.
        """
        first, before = self._num_read(), promotion_journal.current(self._folders.store)
        parameters: list[str] = []
        expected = len(self._times) - first
        if first + rows < len(self._times):
            end = self._times[first + rows]
            expected = bisect_left(self._times, end) - first
            parameters.append(f"window_end={end.isoformat()}")
        command = [sys.executable, "-m", "cli", "run", f"--package={self._package}"]
        command += [f"--folder={self._folders.root}", f"--triton-urls={self._server.grpc_url}"]
        command += [*(f"-p{each}" for each in parameters)]
        triggered = datetime.now(timezone.utc)
        run_to_end(command)
        live = promotion_journal.current(self._folders.store)
        if live is None or live == before:
            return None
        run = max(
            (self._folders.store / "runs").iterdir(), key=lambda path: path.stat().st_mtime
        ).name
        notes = read_notes(self._folders.store, run)
        read = self._num_read() - first
        if read != expected:
            raise RuntimeError(f"the run read {read} rows, expected {expected}")
        return run_seconds(rows, notes, triggered=triggered, serving=moment_of(live.time))

    def _num_read(self) -> int:
        """Return the number of rows up to the newest row of the live model."""
        live = promotion_journal.current(self._folders.store)
        if live is None:
            return 0
        newest = datetime.fromisoformat(
            Model.read(local_path(live.model_uri) / Model.MANIFEST).last_event_time
        )
        return bisect_right(self._times, newest)


def measure(folder: Path, sizes: dict[int, int], *, seed: int) -> dict[int, list[RunSeconds]]:
    """Run every size, and return the seconds of all runs except the first model's run."""
    simulator = Simulator.create(seed)
    total = BASE_ROWS + sum(rows * count for rows, count in sizes.items())
    write_lake(simulator, str(folder / "lake"), rows=total, days=1, last_day=_DAY, seed=seed)
    times = pq.read_table(
        folder / "lake" / DAY_PARTITION.format(day=_DAY), columns=[EVENT_TIME]
    ).column(0)
    results: dict[int, list[RunSeconds]] = {rows: [] for rows in sizes}
    with TritonServer(folder / "repository", log=folder / "logs" / "triton.log") as server:
        bench = Bench(folder, server, sorted(times.to_pylist()))
        bench.run(BASE_ROWS)
        for turn in range(max(sizes.values())):
            for rows, count in sizes.items():
                if turn < count:
                    measured = bench.run(rows)
                    results[rows] += [measured] if measured else []
                    text = (
                        f"{measured.serving:.1f} s" if measured else "released nothing, not counted"
                    )
                    print(f"  round of {rows:,} rows: {text}", file=sys.stderr, flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = benchmark_parser("round", __doc__, quick="small runs only")
    parser.add_argument(
        "--seed", type=int, default=7, help="seed of the simulator (default: %(default)s)"
    )
    flags = parser.parse_args(argv)
    with (
        documented(flags) as document,
        tempfile.TemporaryDirectory(prefix="evergreen-round-") as folder,
    ):
        document |= report(
            measure(Path(folder), QUICK_SIZES if flags.quick else SIZES, seed=flags.seed)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
