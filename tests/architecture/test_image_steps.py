"""Each image's program does its work with the image's own files, as another user, on a root that it cannot write.

No engine is needed: the last stage's files are laid out (`dockerfiles.lay_out`), the environment that was built from
the same lock stands in for /opt/venv, ENV is the image's. One test marked slow builds /opt/venv by the Dockerfile's own
line. What this cannot show: the base image's system libraries, NVIDIA's images, the size.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import onnxruntime
import pytest

from components.contracts.manifests import RawDataset
from pipelines.local.environments import python_of
from tests.support.dockerfiles import VENV, entrypoint, environment, lay_out, stages
from tests.support.paths import REPOSITORY
from tests.support.recommenders import accept_into

USER = 10001
WITHOUT_REPOSITORY = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
sys.path_hooks[:] = [hook for hook in sys.path_hooks if "__editable__" not in repr(hook)]
"""
"""The driver environment also finds this repository, where people installed it; an image has what was copied."""


class Machine:
    """A volume, a /tmp and the images' files below one folder that another user may enter."""

    def __init__(self, folder: Path) -> None:
        self.volume, self.temporary, self._images = folder / "volume", folder / "tmp", folder / "images"
        self._site = folder / "site"
        for path in (folder, self.volume, self.temporary, self._images, self._site):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        (self._site / "sitecustomize.py").write_text(WITHOUT_REPOSITORY)
        if os.geteuid() == 0:
            os.chown(self.volume, USER, USER)
            os.chown(self.temporary, USER, USER)

    def accept_into(self, store: Path) -> None:
        """Accepts Criteo's recommender into a store that is the images' user's."""
        accept_into(store)
        if os.geteuid() == 0:
            for path in [store, *store.rglob("*")]:
                os.chown(path, USER, USER)

    def run(self, image: str, *arguments: str, command: list[str] | None = None, venv: Path | None = None) -> str:
        """What the image's entry point (or `command`) prints, given these arguments; it must end with 0."""
        root = self._images / image
        if not root.exists():
            lay_out(image, root)
            for path in [root, *root.rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)
        venv = venv or python_of(environment(image) or "", REPOSITORY).parents[1]
        places = {VENV: str(venv), "/app": f"{root}/app", "/tmp": str(self.temporary)}
        variables = stages(image)[-1].variables({"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"})
        for name, value in variables.items():
            parts = [next((v + p[len(k) :] for k, v in places.items() if p.startswith(k)), p) for p in value.split(":")]
            variables[name] = ":".join(parts)
        variables["PYTHONPATH"] += f":{self._site}"
        variables["TMPDIR"] = places["/tmp"]
        program, *rest = command or entrypoint(image)
        drop = [shutil.which("setpriv"), f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        done = subprocess.run(
            [*(drop if os.geteuid() == 0 else []), str(venv / "bin" / program), *rest, *arguments],
            cwd=root / "app",
            env=variables,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{image}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def machine():
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("run as root, and setpriv is absent: no other user to run as")
    # Not pytest's folder, which belongs to this user alone.
    with tempfile.TemporaryDirectory(prefix="evergreen-images-") as folder:
        Path(folder).chmod(0o755)
        yield Machine(Path(folder))
        for path in Path(folder).rglob("*"):
            if path.is_dir():
                path.chmod(0o755)


def test_images_run_the_pipeline_from_a_lake_to_a_published_model(machine):
    volume = machine.volume
    places = ["--run", "tiny", "--store", f"file://{volume}/store", "--work", f"file://{volume}/work"]
    lake, world = f"{volume}/lake", f"{volume}/world.json"
    size = ["--rows", "2000", "--days", "2", "--last-day", "2026-01-02", "--seed", "1"]
    machine.run("inference_client", "simulate", "--lake", lake, "--world", world, *size)
    raw, report, prepared, model, verdict, release = (
        f"{volume}/{name}.json" for name in ("raw", "report", "prepared", "model", "verdict", "release")
    )
    settings = "preprocessing.frequency_threshold=1 model.embedding_dim=4 model.tower=[8] "
    settings += "gate.min_auc=0 gate.max_calibration_factor=1000"
    machine.accept_into(volume / "store")
    machine.run("extraction", *places, "--lake", f"file://{lake}", "--settings", settings, "--output", raw)
    machine.run("validation", *places, "--raw-dataset", raw, "--output", report)
    machine.run("preprocessing", *places, "--raw-dataset", raw, "--output", prepared)
    machine.run("training", *places, "--training-set", prepared, "--validation-report", report, "--output", model)
    judged = ["--raw-dataset", raw, "--training-set", prepared, "--model", model, "--output", verdict]
    machine.run("evaluation", *places, *judged)
    inputs = ["--raw-dataset", raw, "--model", model, "--verdict", verdict, "--output", release]
    machine.run(
        "deployment", *places[:4], *inputs, "--repository", f"file://{volume}/repository", "--server", "onnxruntime"
    )
    machine.run("run_outcome", *places[:4], "--kfp-state", "SUCCEEDED")
    kept = RawDataset.read(Path(raw))
    assert kept.num_train_rows + kept.num_holdout_rows == 2000
    (outcome,) = (volume / "store" / "runs").rglob("outcome.json")
    assert json.loads(outcome.read_text())["state"] == "released"
    (graph,) = (volume / "repository").rglob("*.onnx")
    assert onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"]).get_outputs()
    writers = {path.stat().st_uid for path in (volume / "store").rglob("*")}
    assert writers == {USER if os.geteuid() == 0 else os.geteuid()}


def test_monitors_image_also_runs_the_uploader(machine):
    assert machine.run("monitoring", "--help").startswith("usage: python -m monitoring ")
    archive, lake = machine.volume / "archive", machine.volume / "uploaded"
    command = ["python", "-m", "monitoring.uploader"]
    machine.run("monitoring", "--archive", str(archive), "--lake", str(lake), "--once", command=command)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_build_stage_of_the_drivers_images_makes_an_environment_that_runs_them(machine, tmp_path):
    build, _ = stages("extraction")
    (line,) = build.all("RUN")
    (_, lock, target) = build.copies()[0]
    venv = machine.volume.parent / "venv"
    # The base image has one `python` and its `pip`; here a bare environment has.
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "base"], check=True)
    line = line.replace(VENV, str(venv)).replace(target, str(REPOSITORY / lock))
    path = f"{tmp_path}/base/bin:{os.environ['PATH']}"
    subprocess.run(["sh", "-ec", line], check=True, env={**os.environ, "PATH": path}, timeout=1000)
    assert not (venv / "bin" / "pip").exists()
    lake = machine.volume / "lake-of-a-fresh-environment"
    size = ["--rows", "200", "--days", "1", "--last-day", "2026-01-02", "--seed", "1"]
    world = str(lake.with_suffix(".json"))
    machine.run("inference_client", "simulate", "--lake", str(lake), "--world", world, *size, venv=venv)
    for image in ("extraction", "deployment", "run_outcome", "inference_client", "monitoring"):
        assert machine.run(image, "--help", venv=venv).startswith("usage: python -m ")
    places = [
        "--run",
        "fresh",
        "--store",
        f"file://{machine.volume}/fresh",
        "--work",
        f"file://{machine.volume}/fresh-work",
    ]
    output = machine.volume / "fresh.json"
    machine.accept_into(machine.volume / "fresh")
    machine.run("extraction", *places, "--lake", f"file://{lake}", "--output", str(output), venv=venv)
    assert RawDataset.read(output).num_train_rows > 0
