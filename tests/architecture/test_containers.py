"""Images built by podman, and the compiled pipeline in them: `make test-images`, which needs root and an index.

A base is a Debian with Debian's Python 3.11 under the very name in the Dockerfiles, so those are built unchanged. All
lies in a storage of its own, where no release can take a stand-in for the real base; a second run builds from its
layers. What this cannot show: Python's own base images, CUDA, NVIDIA's images, a kubelet.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from components.contracts.manifests import RawDataset
from components.store.runs import find_outcome
from pipelines.images import DOCKERFILES, ENVIRONMENT_OF_STEP, image_name
from pipelines.local import runner
from pipelines.local.environments import python_of
from pipelines.package import compile_pipeline
from pipelines.placement import Placement
from tests.support.dockerfiles import environment, stages
from tests.support.paths import REPOSITORY
from tests.support.recommenders import accept_into

pytestmark = [pytest.mark.images, pytest.mark.timeout(5400)]
STORAGE = "/var/lib/containers/evergreen-tests"
TAG = "tests"
USER = 10001
CONFINED = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp", "--cap-drop=all"),
    *("--security-opt=no-new-privileges", f"--user={USER}", "--passwd=false", "--network=none"),
    *("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"),
)
"""Podman's own limits are above what a root without SYS_RESOURCE may set."""
DEBIAN = {
    "slim": "ca-certificates,python3.11",
    "full": "ca-certificates,python3.11-dev,python3.11-venv,python3-pip,g++",
}
CEILINGS_MB = {"driver": 950, "preprocessing": 1150, "validation": 2950, "training": 1700}
"""Of an image, by its lock, uncompressed, with the base; torch's CPU build."""
PLAIN = [image for image in DOCKERFILES if environment(image)]
"""The images without anything of NVIDIA's."""
HANDED_OVER = ("PATH", "VIRTUAL_ENV", "PYTHONPATH", "TMPDIR")
"""What the local runner sets for an environment of a laptop."""


@pytest.fixture(scope="module")
def podman(tmp_path_factory):
    """Runs podman with a storage of its own; runc, since crun refuses hybrid cgroups; as root, who may mount."""
    missing = [name for name in ("podman", "runc", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"containers need root and podman, runc, mmdebstrap; here: uid {os.geteuid()}, without {missing}")
    folder = tmp_path_factory.mktemp("podman")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{STORAGE}"\nrunroot = "/run/containers/evergreen-tests"\n'
    )
    engine = '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    # Settings of containers.conf are of one machine: they reach no image. A step says `--network=none` itself.
    mounts = json.dumps([f"{path}:{path}:ro" for path in pip_places()] + [f"{folder}/pip.conf:/etc/pip.conf:ro"])
    (folder / "build.conf").write_text(f'{engine}[containers]\nnetns = "host"\nvolumes = {mounts}\n')
    (folder / "run.conf").write_text(engine)
    lines = [f"{name} = {value}" for name, value in pip_settings().items()]
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))

    def variables(purpose: str) -> dict[str, str]:
        conf = {"CONTAINERS_CONF": f"{folder}/{purpose}.conf", "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf"}
        return {**os.environ, **conf}

    return variables


@pytest.fixture(scope="module")
def images(podman, tmp_path_factory):
    """Builds the images by the project's own command over stand-in bases; image -> reference."""
    variables = podman("build")
    for base in sorted({stage.base for image in PLAIN for stage in stages(image)}):
        name = f"docker.io/library/{base}"
        if subprocess.run(["podman", "image", "exists", name], env=variables).returncode:
            root = tmp_path_factory.mktemp("base") / "root.tar"
            packages = DEBIAN["slim" if "slim" in base else "full"]
            link = "ln -s /usr/bin/python3.11 $1/usr/local/bin/python"
            make = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", f"--customize-hook={link}"]
            subprocess.run([*make, "bookworm", str(root)], check=True)
            subprocess.run(["podman", "import", "--quiet", str(root), name], check=True, env=variables)
            root.unlink()
    command = [sys.executable, "-m", "pipelines.build_images", *PLAIN, "--engine", "podman", "--dirty", "--tag", TAG]
    log = REPOSITORY / "build" / "test-images.log"
    log.parent.mkdir(exist_ok=True)
    with open(log, "wb") as output:
        done = subprocess.run(command, cwd=REPOSITORY, env=variables, stdout=output, stderr=subprocess.STDOUT)
    assert done.returncode == 0, log.read_text()[-3000:]
    return {image: f"localhost/{image_name(image)}:{TAG}" for image in PLAIN}


def pip_settings() -> dict[str, str]:
    """How pip of this machine is configured, by its files and variables."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    pairs = (line.partition("=") for line in listed.stdout.splitlines())
    return {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in pairs}


def pip_places() -> list[str]:
    """Files and folders of this machine that its pip's settings name; of an index also what lies beside its pages."""
    words = [word for value in pip_settings().values() for word in value.split()]
    indexes = [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")]
    others = [Path(word) for word in words if word.startswith("/")]
    return sorted({str(path) for path in (*indexes, *others) if path.exists()})


def inspect(podman, reference: str) -> dict:
    command = ["podman", "image", "inspect", reference]
    done = subprocess.run(command, env=podman("run"), check=True, capture_output=True, text=True)
    return json.loads(done.stdout)[0]


def test_images_are_no_larger_than_their_ceilings(podman, images):
    found = {image: inspect(podman, reference) for image, reference in images.items()}
    sizes = {image: facts["Size"] / 1e6 for image, facts in found.items()}
    print(f"\n{'image':18}{'MB':>8}{'ceiling':>9}{'layers':>8}")
    for image, size in sorted(sizes.items()):
        layers = len(found[image]["RootFS"]["Layers"])
        print(f"{image:18}{size:8.0f}{CEILINGS_MB[environment(image)]:9}{layers:8}")
    assert all(size <= CEILINGS_MB[environment(image)] for image, size in sizes.items())
    # One environment, one layer: the second, over the base's.
    for lock in CEILINGS_MB:
        assert len({found[image]["RootFS"]["Layers"][1] for image in PLAIN if environment(image) == lock}) == 1


@pytest.mark.parametrize("image", sorted(PLAIN))
def test_entry_point_helps_in_a_confined_container(podman, images, image):
    command = ["podman", "run", "--rm", *CONFINED, images[image], "--help"]
    done = subprocess.run(command, env=podman("run"), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout[:17]) == (0, "usage: python -m "), done.stderr[-3000:]


@pytest.fixture
def volume():
    """A folder that the images' user may write; not pytest's, which belongs to this user alone."""
    with tempfile.TemporaryDirectory(prefix="evergreen-containers-") as folder:
        yield Path(folder)


def give_to_user(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, USER, 0)


def turn(folder: Path, lake: Path) -> dict:
    """One run of the compiled pipeline from `lake` into `folder`; what it came to, in numbers."""
    folders = runner.LocalFolders(root=folder)
    arguments = folders.pipeline_arguments()
    accept_into(folders.store)
    package = folder / "retraining.yaml"
    compile_pipeline(package, Placement())
    give_to_user(folder)
    settings = "preprocessing.frequency_threshold=1 model.embedding_dim=4 model.tower=[8] "
    settings += "gate.min_auc=0 gate.max_calibration_factor=1000"
    arguments |= {"lake": str(lake), "settings": settings, "trigger_id": "tiny", "server": "onnxruntime"}
    pythons = {name: python_of(name, REPOSITORY) for name in set(ENVIRONMENT_OF_STEP.values())}
    paths = {"root": folders.artifacts, "logs": folders.logs, "source": REPOSITORY}
    try:
        runner.run_pipeline(package, arguments, pythons=pythons, **paths)
    except runner.PipelineFailed as error:
        logs = (f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folders.logs.glob("*.log")))
        pytest.fail("\n".join([str(error)[-500:], *logs]))
    outcome = find_outcome(folders.store, "tiny")
    (graph,) = folders.repository.rglob("*.onnx")
    weights = {item.name: numpy_helper.to_array(item) for item in onnx.load(graph).graph.initializer}
    (raw,) = folders.artifacts.rglob("raw_dataset")
    (metrics,) = folders.artifacts.rglob("evaluation/metrics")
    dataset = RawDataset.read(raw)
    return {
        "state": outcome.state,
        "rows": (dataset.num_train_rows, dataset.num_holdout_rows),
        "metrics": json.loads(metrics.read_text()),
        "weights": weights,
    }


def test_compiled_pipeline_comes_to_the_same_in_containers(podman, images, volume, monkeypatch):
    lake, world = volume / "lake", volume / "world.json"
    size = ["--rows", "2000", "--days", "2", "--last-day", "2026-01-02", "--seed", "1"]
    simulate = ["simulate", "--lake", str(lake), "--world", str(world), *size]
    volume.chmod(0o755)
    give_to_user(volume)
    mount = f"--volume={volume}:{volume}"
    command = ["podman", "run", "--rm", *CONFINED, mount, images["inference_client"], *simulate]
    subprocess.run(command, env=podman("run"), check=True)
    outside = turn(volume / "outside", lake)
    steps = []

    def contained(command, variables, log):
        """A task's own command line in its image, with the variables that the compiled pipeline gives it."""
        step = command[command.index("--function_to_execute") + 1]
        steps.append(step)
        added = {k: v for k, v in variables.items() if k not in HANDED_OVER and os.environ.get(k) != v}
        flags = [f"--env={name}={value}" for name, value in added.items()]
        program, *rest = command
        run = ["podman", "run", "--rm", *CONFINED, mount, *flags, f"--entrypoint={program}", images[step], *rest]
        return subprocess.run(run, env=podman("run"), stdout=log, stderr=subprocess.STDOUT).returncode

    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)  # the pipeline sets it, not who tests
    monkeypatch.setattr(runner, "_run_step", contained)
    # KFP makes the folders of a task's outputs as root before it; on a cluster the volume's group may write.
    previous = os.umask(0)
    try:
        inside = turn(volume / "inside", lake)
    finally:
        os.umask(previous)
    assert set(steps) == set(ENVIRONMENT_OF_STEP)
    assert (inside["state"], inside["rows"]) == (outside["state"], outside["rows"])
    assert inside["state"] == "released"
    assert sum(inside["rows"]) == 2000
    assert inside["metrics"] == pytest.approx(outside["metrics"], rel=1e-4)
    assert inside["weights"].keys() == outside["weights"].keys()
    for name, weights in inside["weights"].items():
        np.testing.assert_allclose(weights, outside["weights"][name], rtol=1e-3, atol=1e-5, err_msg=name)
    writers = {path.stat().st_uid for path in (volume / "inside" / "store").rglob("*")}
    assert writers == {USER}
