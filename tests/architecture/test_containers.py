"""Images built by podman, and the compiled pipeline in them: `make test-images`, which needs root and an index.

What this cannot show: Python's own base images (`containers` says what stands for them), CUDA, NVIDIA's images, a
kubelet.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from components.contracts.manifests import RawDataset
from components.store.runs import find_outcome
from pipelines.images import ENVIRONMENT_OF_STEP
from pipelines.local import runner
from pipelines.local.environments import python_of
from pipelines.package import compile_pipeline
from pipelines.placement import Placement
from tests.support.containers import CONFINED, PLAIN, USER, give_to_user, in_containers
from tests.support.dockerfiles import environment
from tests.support.paths import REPOSITORY
from tests.support.recommenders import accept_into

pytestmark = [pytest.mark.images, pytest.mark.timeout(5400)]
CEILINGS_MB = {"driver": 950, "preprocessing": 1150, "validation": 2950, "training": 1700}
"""Of an image, by its lock, uncompressed, with the base; torch's CPU build."""


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
    command = ["podman", "run", "--rm", *CONFINED, "--network=none", images[image], "--help"]
    done = subprocess.run(command, env=podman("run"), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout[:17]) == (0, "usage: python -m "), done.stderr[-3000:]


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
    command = ["podman", "run", "--rm", *CONFINED, "--network=none", mount, images["inference_client"], *simulate]
    subprocess.run(command, env=podman("run"), check=True)
    outside = turn(volume / "outside", lake)
    steps = []
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)  # the pipeline sets it, not who tests
    monkeypatch.setattr(runner, "_run_step", in_containers(podman, images, steps, "--network=none", mount))
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
