"""The preprocessing step, and the stock script beside it, as processes of their own: seconds, processor time, memory.

Memory is the proportional share of anonymous memory (Linux `Pss_Anon`), summed over the process and those that it
forks: what a page shared by two of them costs is counted once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from components.contracts.manifests import Model, TrainingSet
from components.runtime.durable import sha256_tree
from components.storage.uris import local_path
from components.store.models import model_folder

REPOSITORY = Path(__file__).resolve().parents[1]
THRESHOLD = 2
_POLL_SECONDS = 0.02


class Failed(Exception):
    """A process ended with an error; the message ends with its last words."""


class Run(NamedTuple):
    """One process from start to end."""

    seconds: float
    processor_seconds: float
    """Of it and its children."""
    peak: int
    """Bytes."""
    said: str


def step(raw: Path, place: Path, run: str, *, parent: str = "none", flags: tuple[str, ...] = ()) -> Run:
    """The step on the raw rows of a manifest; writes `place/work/<run>/preprocessing` and `place/<run>.json`."""
    command = [sys.executable, "-m", "components.preprocessing", f"--run={run}", f"--parent={parent}"]
    command += [f"--store={place / 'store'}", f"--work={place / 'work'}", f"--raw-dataset={raw}"]
    command += [f"--output={place / run}.json", f"--frequency-threshold={THRESHOLD}", *flags]
    return _measure(command)


def stock(raw: Path, out: Path) -> Run:
    """The stock script on the same rows; what an earlier run left in `out` is removed before."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.stock_nvtabular", str(raw.parent), str(out)]
    return _measure([*command, f"--frequency-threshold={THRESHOLD}"])


def keep_as_model(place: Path, run: str, model_id: str) -> None:
    """Stores the workflow of a run as a trained model's, so that a round can go on from it."""
    training_set = TrainingSet.read(place / f"{run}.json")
    folder = model_folder(place / "store", model_id)
    shutil.copytree(local_path(training_set.workflow_uri), folder / Model.WORKFLOW)
    Model(
        model_id=model_id,
        uri=folder.as_uri(),
        backend="pytorch",
        config={},
        slot_sizes=training_set.slot_sizes,
        parent_model_id=None,
        seed=0,
        num_train_rows=training_set.num_train_rows,
        optimizer_step=1,
        early_stopping={},
        last_event_time=training_set.last_event_time,
        raw_digest=training_set.raw_digest,
        sha256={"workflow": sha256_tree(folder / Model.WORKFLOW)},
        created_at="2026-01-01T00:00:00+00:00",
    ).write(folder / Model.MANIFEST)


def import_seconds() -> float:
    """Start of an interpreter that imports what the step imports, and ends."""
    code = (
        "from components.runtime.interpreter import end_quickly, importing\n"
        "from components.preprocessing.lean_imports import lean_imports\n"
        "end_quickly()\n"
        "with importing(), lean_imports(): import components.preprocessing.preprocess"
    )
    return _measure([sys.executable, "-W", "ignore", "-c", code]).seconds


def phases(run: Run) -> dict[str, float]:
    """The stock script's own seconds by phase."""
    found: dict[str, float] = json.loads(run.said.strip().splitlines()[-1])
    return found


def _measure(command: list[str]) -> Run:
    before = os.times()
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_anonymous, _tree(process.pid))))
        time.sleep(_POLL_SECONDS)
    seconds = time.perf_counter() - began
    said, after = process.communicate()[0], os.times()
    if process.returncode:
        raise Failed(f"{command[2:4]} ended with {process.returncode}: {said[-500:]}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(seconds, used, peak, said)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield from _tree(child)


def _anonymous(pid: int) -> int:
    try:
        found = re.search(r"^Pss_Anon:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0
