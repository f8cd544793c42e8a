"""The images of steps and programs without Docker: what each Dockerfile copies is there, suffices and starts.

The COPY lines are replayed into an empty folder, where the image's own code is then all there is.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.images import ENVIRONMENT_OF_STEP, TRAINING_IMAGES, image_name, step_of_image

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = sorted(ENVIRONMENT_OF_STEP)
PROGRAMS = ("inference_client", "monitoring")
"""Images that are no step of the pipeline; both install the driver's lock."""
IMAGES = sorted({*STEPS, *TRAINING_IMAGES.values(), *PROGRAMS})
OURS = ("components", "inference_client", "monitoring", "pipelines")
HEAVY = ("kfp", "pyarrow", "torch", "nvtabular", "pandas", "dask", "tensorflow", "tritonclient", "onnx", "onnxruntime")


def module(image: str) -> str:
    """What `python -m` runs in the image."""
    return image if image in PROGRAMS else f"components.{step_of_image(image_name(image))}"


def instructions(image: str) -> list[tuple[str, str]]:
    """Keyword and argument of each instruction of the image's Dockerfile."""
    step = image if image in PROGRAMS else step_of_image(image_name(image))
    name = "Dockerfile" if image == step else f"Dockerfile.{image.removeprefix(f'{step}_')}"
    text = (REPOSITORY / module(image).replace(".", "/") / name).read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(keyword, rest) for keyword, _, rest in (line.partition(" ") for line in lines)]


@pytest.fixture
def image(tmp_path):
    """Replays the COPY lines of an image's Dockerfile; gives the folder that is the image's root."""

    def build(name: str) -> Path:
        root, here = tmp_path / "image", "/"
        for keyword, argument in instructions(name):
            if keyword == "WORKDIR":
                here = argument
            if keyword == "COPY":
                source, target = argument.split()
                target += Path(source).name if target.endswith("/") else ""
                final = root / os.path.join(here, target).lstrip("/")
                final.parent.mkdir(parents=True, exist_ok=True)
                if (REPOSITORY / source).is_dir():
                    shutil.copytree(REPOSITORY / source, final, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copyfile(REPOSITORY / source, final)
        return root

    return build


def python_path(name: str) -> str:
    """Where the image's Python finds our code first."""
    variables = " ".join(argument for keyword, argument in instructions(name) if keyword == "ENV")
    return dict(assignment.split("=", 1) for assignment in shlex.split(variables))["PYTHONPATH"].split(":")[0]


@pytest.mark.parametrize("name", IMAGES)
def test_image_holds_every_module_of_ours_that_its_code_may_import(name, image):
    folder = image(name) / python_path(name).lstrip("/")
    missing = set()
    for source in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for imported in names:
                if imported and imported.split(".")[0] in OURS:
                    path = folder.joinpath(*imported.split("."))
                    if not path.is_dir() and not path.with_suffix(".py").exists():
                        missing.add(imported)
    assert not missing


@pytest.mark.parametrize("name", IMAGES)
def test_image_starts_its_program_and_helps_without_a_heavy_import(name, image):
    root = image(name)
    report = "import json, sys, runpy; sys.argv[1:] = ['--help']\n"
    report += f"try: runpy.run_module('{module(name)}', run_name='__main__', alter_sys=True)\n"
    report += "finally: print(json.dumps([sorted(sys.modules), sys.modules['components'].__file__]))"
    done = subprocess.run(
        [sys.executable, "-c", report],
        cwd=root,
        env={"PYTHONPATH": str(root / python_path(name).lstrip("/")), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m {module(name)} ")
    loaded, package = json.loads(done.stdout.splitlines()[-1])
    assert Path(package).is_relative_to(root), "the image's own code was not what ran"
    assert {name.partition(".")[0] for name in loaded}.isdisjoint(HEAVY)


@pytest.mark.parametrize("name", [*STEPS, *PROGRAMS])
def test_image_installs_its_environments_lock_and_runs_its_program_as_nobody_special(name):
    found = instructions(name)
    lock = f"requirements/{ENVIRONMENT_OF_STEP.get(name, 'driver')}.lock"
    copied = [argument.split() for keyword, argument in found if keyword == "COPY"]
    (target,) = [target for source, target in copied if source == lock]
    (install,) = [argument for keyword, argument in found if keyword == "RUN"]
    assert f"--no-deps -r {target}" in install
    commands = [argument for keyword, argument in found if keyword == "ENTRYPOINT"]
    assert [json.loads(command) for command in commands] == [["python", "-m", module(name)]]
    assert ("USER", "10001") in found


def test_hugectrs_image_is_nvidias_with_our_code_first_and_hugectr_still_found():
    found = instructions("training_hugectr")
    assert ("FROM", "nvcr.io/nvidia/merlin/merlin-hugectr:24.06") in found
    (variables,) = [argument for keyword, argument in found if keyword == "ENV"]
    assert "PYTHONPATH=/app:${PYTHONPATH}" in variables
    locked = (REPOSITORY / "requirements" / "training.lock").read_text().splitlines()
    asked = (REPOSITORY / "requirements" / "training-hugectr.txt").read_text().splitlines()
    assert {line for line in asked if not line.startswith("#")} <= set(locked)
    commands = [argument for keyword, argument in found if keyword == "ENTRYPOINT"]
    assert [json.loads(command) for command in commands] == [["python", "-m", "components.training"]]
    assert ("USER", "10001") in found


@pytest.mark.parametrize("step", STEPS)
def test_component_names_the_image_of_its_step(step):
    component = getattr(importlib.import_module(f"components.{step}.component"), step)
    assert component.component_spec.implementation.container.image == image_name(step)
