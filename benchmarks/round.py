"""A whole round's cost, from trigger to serving, by step: `make benchmark-round`.

A first model learns a day's first rows and is released to a real Triton. Then incremental rounds follow, each over the
next rows of that day, of every size in turn. A round is what the monitor's local trigger starts: `evergreen run` as a
process, every step in the environment of its image, the released version loaded and proven. It is triggered when that
process is started, and serves when Triton's own HTTP endpoint says that the new version is ready. Where the seconds
went is read from the notes that the steps left: steps, and the gaps between them.

The fixed cost is that of a round of `EMPTY_ROWS` rows, measured like the others. The gate accepts every model here, so
that every round goes through to the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from benchmarks import machine
from benchmarks.spread import named, print_target, spread
from components.contracts.criteo import DAY_PARTITION, EVENT_TIME
from components.contracts.manifests import Model
from components.contracts.serving import MODEL_NAME
from components.storage.uris import local_path
from components.store import promotion_journal
from components.store.promotion_journal import moment_of
from components.store.runs import StepNote, read_notes

if TYPE_CHECKING:
    from pipelines.local.triton import TritonServer

EMPTY_ROWS = 1_000
"""Rows of a round that counts as empty."""
TARGETS = {EMPTY_ROWS: 25.0, 100_000: 45.0}
"""Seconds from trigger to serving, by the round's rows."""
STARTS = "processes and KFP"
"""What is in no step's note: starting the run, KFP, and each step's interpreter before it notes its begin and after."""


class RoundSeconds(NamedTuple):
    """One round."""

    rows: int
    """Rows of its window, training and held-out."""
    serving: float
    """Seconds from the trigger until the server answered as the new version."""
    steps: dict[str, float]
    """Seconds that each step noted, as far as they lie before `serving`; and `STARTS`, the rest of it."""


def round_seconds(rows: int, notes: Sequence[StepNote], *, triggered: datetime, serving: datetime) -> RoundSeconds:
    """The seconds of a round whose steps left `notes`.

    Raises:
        ValueError: a step did not end, or begins before the trigger: the notes are not of this round.
    """
    steps: dict[str, float] = {}
    for note in notes:
        begun = moment_of(note.started_at)
        if note.seconds is None or begun < triggered:
            raise ValueError(f"note of {note.step} begins at {note.started_at} and took {note.seconds} s")
        until = min(begun + timedelta(seconds=note.seconds), serving)
        steps[note.step] = max((until - begun).total_seconds(), 0.0)
    total = (serving - triggered).total_seconds()
    steps[STARTS] = total - sum(steps.values())
    return RoundSeconds(rows, total, steps)


def report(results: dict[int, list[RoundSeconds]]) -> dict[str, Any]:
    """Prints the table and the targets; the same as a document."""
    names = list(next(iter(results.values()))[0].steps)
    print(f"{'rows':>10} {'rounds':>6} {'to serving':>20} " + " ".join(f"{name[:17]:>17}" for name in names))
    document: dict[str, Any] = {}
    for rows, rounds in results.items():
        serving = spread([each.serving for each in rounds])
        steps = {name: spread([each.steps[name] for each in rounds]) for name in names}
        shown = f"{serving.median:.1f} ({serving.least:.1f}..{serving.most:.1f})"
        print(f"{rows:>10,} {len(rounds):>6} {shown:>20} " + " ".join(f"{steps[n].median:>17.2f}" for n in names))
        document[str(rows)] = {"rounds": len(rounds), **named({"serving_seconds": serving, "steps": steps})}
        if rows in TARGETS:
            is_met = serving.median <= TARGETS[rows]
            print_target(f"round of {rows:,} rows", f"{serving.median:.1f} s", f"{TARGETS[rows]:g} s", is_met=is_met)
    # Only as good as the steps are linear: training learns several passes, as many as its rows are worth.
    every = [each for rounds in results.values() for each in rounds]
    per_row, fixed = np.polyfit([each.rows for each in every], [each.serving for each in every], 1).tolist()
    print(f"line through all rounds: {fixed:.1f} s and {1e6 * per_row:.0f} s per million rows")
    return {**document, "line": {"fixed_seconds": fixed, "seconds_per_row": per_row}}


BASE_ROWS = 100_000
SIZES = {EMPTY_ROWS: 5, 10_000: 3, 100_000: 3, 1_000_000: 1}
"""Rows of a round -> how many rounds."""
QUICK_SIZES = {EMPTY_ROWS: 2, 10_000: 1}
_DAY = date(2026, 3, 1)
_POLL_SECONDS = 0.01
_RUN_SECONDS = 1800.0
ACCEPT_ALL = ("min_auc=0.01", "max_auc_loss=1.0", "accept_inconclusive=true")


class Bench:
    """One lake, one store and one Triton, and rounds over them."""

    def __init__(self, folder: Path, server: TritonServer, times: Any) -> None:
        """Compiles the pipeline.

        Args:
            folder: What `LocalFolders` names lies below it, the lake too.
            server: Runs, over the folder's model repository.
            times: Event times of all rows of the lake [n], ascending, datetimes in UTC.
        """
        from pipelines.local.runner import LocalFolders

        self._folders = LocalFolders(root=folder)
        self._server = server
        self._times = times
        self._package = folder / "retraining.yaml"
        _run_command([sys.executable, "-m", "pipelines", "compile", f"--output={self._package}"])

    def round(self, rows: int) -> RoundSeconds:
        """The next `rows` rows of the lake, from trigger to serving."""
        first = self._num_learned()
        parameters = [*ACCEPT_ALL, f"triton_urls={self._server.grpc_url}"]
        if first + rows < len(self._times):
            parameters.append(f"window_end={self._times[first + rows].isoformat()}")
        command = [sys.executable, "-m", "pipelines", "run", f"--package={self._package}"]
        command += [f"--folder={self._folders.root}", *(f"-p{each}" for each in parameters)]
        version = self._version() + 1
        url = f"{self._server.http_url}/v2/models/{MODEL_NAME}/versions/{version}/ready"
        is_over = threading.Event()
        triggered = datetime.now(timezone.utc)
        with ThreadPoolExecutor(1) as thread:
            ready = thread.submit(_wait_until_ready, url, is_over)
            try:
                _run_command(command)
            finally:
                is_over.set()
        serving = ready.result()
        if serving is None or self._version() != version:
            raise RuntimeError(f"version {version} does not serve after a round of {rows} rows")
        run = max((self._folders.store / "runs").iterdir(), key=lambda path: path.stat().st_mtime).name
        notes = read_notes(self._folders.store, run)
        learned = self._num_learned() - first
        if learned != rows:
            raise RuntimeError(f"a round of {rows} rows read {learned}")
        return round_seconds(rows, notes, triggered=triggered, serving=serving)

    def _version(self) -> int:
        live = promotion_journal.current(self._folders.store)
        return live.version if live else 0

    def _num_learned(self) -> int:
        """Rows up to the live model's watermark."""
        live = promotion_journal.current(self._folders.store)
        if live is None:
            return 0
        watermark = datetime.fromisoformat(Model.read(local_path(live.model_uri) / Model.MANIFEST).last_event_time)
        return bisect_right(self._times, watermark)


def _wait_until_ready(url: str, is_over: threading.Event) -> datetime | None:
    """When the URL first answered 200; None where the round was over before."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while not is_over.wait(_POLL_SECONDS):
        with suppress(OSError), opener.open(url, timeout=5):
            return datetime.now(timezone.utc)
    return None


def _run_command(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RUN_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{command[2:4]} ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")


def measure(folder: Path, sizes: dict[int, int], *, seed: int) -> dict[int, list[RoundSeconds]]:
    """Rounds of every size, in turns as long as a size has any left; the first model's round is not among them."""
    # The pipelines' packages are not in every environment that reads this module's figures.
    from inference_client.simulation.lake import write_lake
    from inference_client.simulation.world import World
    from pipelines.local.triton import TritonServer

    world = World.create(seed)
    total = BASE_ROWS + sum(rows * count for rows, count in sizes.items())
    write_lake(world, folder / "lake", rows=total, days=1, last_day=_DAY, seed=seed)
    times = pq.read_table(folder / "lake" / DAY_PARTITION.format(day=_DAY), columns=[EVENT_TIME]).column(0)
    results: dict[int, list[RoundSeconds]] = {rows: [] for rows in sizes}
    with TritonServer(folder / "repository", log=folder / "logs" / "triton.log") as server:
        bench = Bench(folder, server, sorted(times.to_pylist()))
        bench.round(BASE_ROWS)
        for turn in range(max(sizes.values())):
            for rows, count in sizes.items():
                if turn < count:
                    results[rows].append(bench.round(rows))
                    print(f"  round of {rows:,} rows: {results[rows][-1].serving:.1f} s", file=sys.stderr, flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.round", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small rounds only")
    parser.add_argument("--seed", type=int, default=7, help="seed of the simulated world")
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks/round.json"), help="JSON file to write")
    flags = parser.parse_args(argv)
    found, work = machine.facts(), machine.OtherWork()
    print("; ".join(f"{name} {value}" for name, value in found.items() if value is not None), flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evergreen-round-") as folder:
        results = measure(Path(folder), QUICK_SIZES if flags.quick else SIZES, seed=flags.seed)
    document = {"machine": found, **report(results), "seconds": time.monotonic() - began}
    if warning := work.warning():
        print(warning)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    flags.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
