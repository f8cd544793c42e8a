"""The project's images built by podman, and the compiled pipeline in them.

`make test-images` runs this module, which needs root and a package index. The tests do not cover
Python's own base images (`containers` describes the stand-ins), CUDA, NVIDIA's images, or a
kubelet.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import numpy_helper

from controller.deployment_target import TargetSettings
from demo import runner
from demo.environments import python_of
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.manifests import RawDataset, ValidationReport
from evergreen.registry.runs import find_outcome
from pipelines.images import ENVIRONMENT_OF_STEP
from pipelines.package import compile_pipeline
from pipelines.placement import Placement
from testing.controllers import answering
from testing.paths import REPOSITORY
from testing.recommenders import accept_into
from testing.validation_models import make_dataset, release_validated
from tests.support.containers import CONFINED, PLAIN, USER, give_to_user, in_containers
from tests.support.dockerfiles import lock

pytestmark = [pytest.mark.images, pytest.mark.timeout(5400)]
CEILINGS_MB = {"driver": 1060, "preprocessing": 1150, "validation-trixie": 1650, "training": 1790}
"""Maximum uncompressed size in MB of the images of each lock. The size includes the base image and
torch's CPU build."""


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
        print(f"{image:18}{size:8.0f}{CEILINGS_MB[lock(image)]:9}{layers:8}")
    assert all(size <= CEILINGS_MB[lock(image)] for image, size in sizes.items())
    # Each image has two layers: the base, and its environment.
    for locked in CEILINGS_MB:
        assert (
            len({found[image]["RootFS"]["Layers"][1] for image in PLAIN if lock(image) == locked})
            == 1
        )


@pytest.mark.parametrize("image", sorted(PLAIN))
def test_entry_point_prints_help_in_confined_container(podman, images, image):
    command = ["podman", "run", "--rm", *CONFINED, "--network=none", images[image], "--help"]
    done = subprocess.run(command, env=podman("run"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(("usage: python -m ", "usage: evergreen "))


def run_pipeline(
    folder: Path, lake: Path, controller: Callable[[runner.LocalFolders], Any]
) -> dict:
    """Run the compiled pipeline on `lake`, and return the numbers of its result.

    All output is below `folder`. `controller` returns a context. Within this context, release
    requests to the registry are carried out.
    """
    folders = runner.LocalFolders(root=folder)
    paths_by_name = {**folders.locations(), "lake": str(lake), "server": "onnxruntime"}
    accept_into(folders.store, CRITEO_RECOMMENDER)
    package = folder / "retraining.yaml"
    compile_pipeline(package, Placement())
    give_to_user(folder)
    settings = "preprocessing.frequency_threshold=1 model.embedding_dim=4 model.tower=[8] "
    settings += "gate.min_auc=0 gate.max_calibration_factor=1000"
    arguments = {"settings": settings, "trigger_id": "tiny"}
    pythons = {name: python_of(name, REPOSITORY) for name in set(ENVIRONMENT_OF_STEP.values())}
    paths = {"root": folders.artifacts, "logs": folders.logs, "source": REPOSITORY}
    try:
        with controller(folders):
            runner.run_pipeline(
                package, arguments, locations=paths_by_name, name="tiny", pythons=pythons, **paths
            )
    except runner.PipelineFailed as error:
        logs = (
            f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(folders.logs.glob("*.log"))
        )
        pytest.fail("\n".join([str(error)[-500:], *logs]))
    outcome = find_outcome(folders.store, "tiny")
    (graph,) = folders.repository.rglob("*.onnx")
    weights = {
        item.name: numpy_helper.to_array(item) for item in onnx.load(graph).graph.initializer
    }
    (raw,) = folders.artifacts.rglob("raw_dataset")
    (metrics,) = folders.artifacts.rglob("evaluation/metrics")
    dataset = RawDataset.read(raw)
    return {
        "state": outcome.state,
        "rows": (dataset.num_train_rows, dataset.num_holdout_rows),
        "metrics": json.loads(metrics.read_text()),
        "weights": weights,
    }


def answering_here(folders: runner.LocalFolders) -> Any:
    """Carry out release requests in this process."""
    return answering(TargetSettings(store=folders.store, repository=folders.repository.as_uri()))


@contextmanager
def answering_in_container(
    podman, images, mount: str, folders: runner.LocalFolders
) -> Iterator[None]:
    """Carry out release requests in a container, as the user of the controller's image."""
    name = "evergreen-tested-controller"
    flags = [f"--store={folders.store}", f"--repository={folders.repository.as_uri()}"]
    flags += ["--triton-urls=", "--interval-seconds=0.2"]
    command = ["podman", "run", "--rm", f"--name={name}", *CONFINED, "--network=none", mount]
    command += ["--entrypoint=python", images["deployment"], "-m", "controller", *flags]
    with open(folders.root / "controller.log", "wb") as log:
        process = subprocess.Popen(command, env=podman("run"), stdout=log, stderr=log)
        try:
            yield
        finally:
            subprocess.run(["podman", "rm", "--force", "--ignore", name], env=podman("run"))
            process.wait(60)


def test_compiled_pipeline_has_same_result_in_containers(podman, images, volume, monkeypatch):
    lake, simulator = volume / "lake", volume / "simulator.json"
    size = ["--rows", "2000", "--days", "2", "--last-day", "2026-01-02", "--seed", "1"]
    simulate = ["lake", "--lake", str(lake), "--simulator", str(simulator), *size]
    volume.chmod(0o755)
    give_to_user(volume)
    mount = f"--volume={volume}:{volume}"
    command = [
        "podman",
        "run",
        "--rm",
        *CONFINED,
        "--network=none",
        mount,
        images["inference_client"],
        *simulate,
    ]
    subprocess.run(command, env=podman("run"), check=True)
    outside = run_pipeline(volume / "outside", lake, answering_here)
    steps = []
    # The compiled pipeline sets ORT_DISABLE_TELEMETRY.
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    monkeypatch.setattr(
        runner, "_run_step", in_containers(podman, images, steps, "--network=none", mount)
    )
    # KFP creates the folders of a task's outputs as root beforehand. On a cluster, the group of the
    # volume has write permission.
    previous = os.umask(0)
    try:
        inside = run_pipeline(
            volume / "inside", lake, partial(answering_in_container, podman, images, mount)
        )
    finally:
        os.umask(previous)
    assert set(steps) == set(ENVIRONMENT_OF_STEP)
    assert (inside["state"], inside["rows"]) == (outside["state"], outside["rows"])
    assert inside["state"] == "released"
    assert sum(inside["rows"]) == 2000
    assert inside["metrics"] == pytest.approx(outside["metrics"], rel=1e-4)
    assert inside["weights"].keys() == outside["weights"].keys()
    for name, weights in inside["weights"].items():
        np.testing.assert_allclose(
            weights, outside["weights"][name], rtol=1e-3, atol=1e-5, err_msg=name
        )
    writers = {path.stat().st_uid for path in (volume / "inside" / "store").rglob("*")}
    assert writers == {USER}


PRINT_MESSAGES = """
import json, sys
from pathlib import Path
import tensorflow_data_validation as tfdv
from google.protobuf.json_format import MessageToDict
from components.validation.schema import check_statistics
from components.validation.schema_versions import read_schema
from components.validation.tfdv_statistics import read_statistics
statistics, schema, in_force = (Path(word) for word in sys.argv[1:])
statistics, schema, in_force = read_statistics(statistics), read_schema(schema), read_schema(in_force)
told = {"statistics": statistics.message, "schema": schema, "anomalies": check_statistics(statistics, in_force)}
print(json.dumps({"version": tfdv.__version__, **{name: MessageToDict(each) for name, each in told.items()}}))
"""  # noqa: E501
"""Program that prints TFDV's version, and each of TFDV's messages about a run as fields."""


def leaves(value, path="") -> dict:
    """Map each path within `value` to its value."""
    if not isinstance(value, dict | list):
        return {path: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        name: leaf for key, each in pairs for name, leaf in leaves(each, f"{path}/{key}").items()
    }


def assert_alike(found: dict, expected: dict, *, rel: float) -> None:
    """Assert equality. Floating-point numbers may differ by the fraction `rel`."""
    found, expected = leaves(found), leaves(expected)
    fractions = {path: leaf for path, leaf in expected.items() if isinstance(leaf, float)}
    assert {path: found.get(path) for path in fractions} == pytest.approx(fractions, rel=rel, abs=0)
    assert {**found, **fractions} == expected


def spoiled(table: pa.Table) -> pa.Table:
    """Return a copy of `table` with faults in which TFDV finds anomalies.

    The faults are labels and numbers out of bounds, NaN values, an empty column and a new category.
    """
    rows = np.arange(len(table))
    columns = {
        "label": np.where(rows == 0, 2, rows % 2),
        "I3": pa.nulls(len(rows)),
        "I5": np.where(rows == 7, np.nan, 3.0),
        "I7": np.where(rows == 9, -5e8, 3.0),
        "C4": np.where(rows % 2, 999_999_937, 5),
    }
    for name, column in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, name, pa.array(column).cast(table.schema.field(name).type))
    return table


def validated(python, folder: Path, seen: Path, run: str) -> tuple[dict, dict, str]:
    """Run the validation step with the command `python`, which sees `folder` at the path `seen`.

    Returns:
        TFDV's messages, the report and the page.
    """
    work = seen / "work" / run / "validation"
    flags = {"run": run, "store": (seen / "store").as_uri(), "work": (seen / "work").as_uri()}
    flags |= {
        "raw-dataset": seen / f"{run}.json",
        "output": seen / f"{run}.report.json",
        "html": seen / f"{run}.html",
    }
    done = python(
        "-m", "components.validation", *(f"--{name}={value}" for name, value in flags.items())
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    in_force = seen / "work" / "r1" / "validation" / "schema.pbtxt"
    fields = python("-c", PRINT_MESSAGES, work / "statistics.pb", work / "schema.pbtxt", in_force)
    assert fields.returncode == 0, fields.stderr[-3000:]
    report = json.loads((folder / f"{run}.report.json").read_text())
    report.pop("crc32")  # the last digits of the numbers may differ
    return json.loads(fields.stdout), report, (folder / f"{run}.html").read_text()


def test_newer_tfdv_of_image_decides_like_older_tfdv_of_laptop(
    podman, images, volume, criteo_table
):
    laptop, image = volume / "laptop", volume / "image"
    for run, rows, parent in (
        ("r1", criteo_table(3000), None),
        ("r2", spoiled(criteo_table(2000, seed=1)), "m1"),
    ):
        (laptop / run).mkdir(parents=True)
        pq.write_table(rows, laptop / run / "part-0.parquet", row_group_size=700)
        made = make_dataset(laptop / run, len(rows), recommender=CRITEO_RECOMMENDER)
        replace(made, parent_model_id=parent).write(laptop / f"{run}.json")
    (laptop / "store").mkdir()
    variables = {"cwd": REPOSITORY, "env": {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}}
    mount = [
        f"--volume={image}:{laptop}",
        "--network=none",
        "--entrypoint=python",
        images["validation"],
    ]
    programs = {
        laptop: [python_of("validation", REPOSITORY)],
        image: ["podman", "run", "--rm", *CONFINED, *mount],
    }

    def runner(folder: Path):
        settings = variables if folder == laptop else {"env": podman("run")}
        return lambda *words: subprocess.run(
            [*programs[folder], *words], capture_output=True, text=True, **settings
        )

    volume.chmod(0o755)
    for run in ("r1", "r2"):
        # After the copy, both folders contain the same champion.
        shutil.copytree(laptop, image, dirs_exist_ok=True)
        give_to_user(image)
        (older, report, page), (newer, its_report, its_page) = (
            validated(runner(folder), folder, laptop, run) for folder in (laptop, image)
        )
        assert older.pop("version") != newer.pop("version")
        assert_alike(newer, older, rel=1e-12)
        assert_alike(its_report, report, rel=1e-9)
        assert its_page == page
        if run == "r1":
            release_validated(
                laptop / "store", "m1", ValidationReport.read(laptop / "r1.report.json")
            )
    assert older["anomalies"]["anomalyInfo"].keys() == {"label", "I3", "I5", "I7"}
