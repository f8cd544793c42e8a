"""Tests of the Dockerfiles without Docker: their content, and whether the copied files suffice.

The test copies the files of all COPY lines to an empty folder. The folder then contains all of the
image's own code. `test_containers.py` runs the programs in real images. `test_image_builds.py`
tests how images are built.
"""

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from demo.environments import python_of
from evergreen.runtime.onnx_runtime import SILENT
from pipelines.images import (
    DOCKERFILES,
    ENVIRONMENT_OF_STEP,
    STEP_OF_VARIANT,
    TRAINING_IMAGES,
    image_name,
)
from testing.paths import REPOSITORY
from tests.support.dockerfiles import VENV, entrypoint, environment, lay_out, lock, module, stages
from tests.support.sources import HEAVY, PACKAGES, imports_of, value_after

STEPS = sorted(ENVIRONMENT_OF_STEP)
IMAGES = sorted(DOCKERFILES)
OURS_ALONE = [image for image in IMAGES if environment(image)]
"""Images that install only one lock of the project. All other images add the project's code to an
image of NVIDIA."""
IN_SLIM_BASE = {
    *(
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "librt.so.1",
        "libpthread.so.0",
        "ld-linux-x86-64.so.2",
    ),
    *("libgcc_s.so.1", "libstdc++.so.6", "libz.so.1"),
}
"""Libraries in the slim base image: glibc, GCC's run-time libraries and zlib. Debian marks the
packages of these libraries as required, or apt depends on them."""
OPTIONAL = (
    *("tbbpool.cpython-311-x86_64-linux-gnu.so", "omppool.cpython-311-x86_64-linux-gnu.so"),
    "libcaffe2_nvrtc.so",
)
"""Libraries that may be absent. Numba has a fallback for its threading layers. Torch's kernel
compiler needs a library of the GPU driver. Nodes with a GPU mount this library."""
ONLY_IN_TESTS = "mpi4py"
"""Package that needs MPI's library. Only test environments have this library."""
CUDA_FOLDER = "nvidia"
"""Folder of CUDA's own packages, if torch is the CUDA build. The packages contain transports for
networks that a node may lack."""
DEBIAN_12_GLIBC_MINOR = 36
HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.fixture
def image(tmp_path):
    """Replays the COPY lines of a Dockerfile, and returns the image's root folder."""
    return lambda name: lay_out(name, tmp_path / "image")


def python_path(name: str) -> str:
    """Return the first path at which the image's Python finds the project's code."""
    return stages(name)[-1].variables({})["PYTHONPATH"].split(":")[0]


def test_every_dockerfile_of_repository_is_image_that_is_built():
    # Hidden folders and build/ contain ignored files.
    folders = [
        p for p in REPOSITORY.iterdir() if p.is_dir() and p.name[0] != "." and p.name != "build"
    ]
    found = [p for folder in folders for p in folder.rglob("Dockerfile*")]
    assert sorted(p.relative_to(REPOSITORY).as_posix() for p in found) == sorted(
        DOCKERFILES.values()
    )
    assert set(TRAINING_IMAGES.values()) | set(STEP_OF_VARIANT) | set(ENVIRONMENT_OF_STEP) <= set(
        DOCKERFILES
    )


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_finds_nothing(name):
    if not HADOLINT.exists():
        pytest.skip("hadolint is not in this environment")
    done = subprocess.run(
        [HADOLINT, REPOSITORY / DOCKERFILES[name]], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", IMAGES)
def test_image_contains_every_own_module_that_its_code_may_import(name, image):
    folder = image(name) / python_path(name).lstrip("/")
    missing = set()
    for source in folder.rglob("*.py"):
        for name in imports_of(ast.parse(source.read_text())):
            path = folder.joinpath(*name.split("."))
            if (
                name.split(".")[0] in PACKAGES
                and not path.is_dir()
                and not path.with_suffix(".py").exists()
            ):
                missing.add(name)
    assert not missing


@pytest.mark.parametrize("name", IMAGES)
def test_image_contains_no_own_package_that_its_code_never_imports(name, image):
    folder = image(name) / python_path(name).lstrip("/")
    packages = {path.relative_to(folder).parts for path in folder.glob("*/*") if path.is_dir()}
    packages = {parts for parts in packages if parts[0] == "components"}
    wanted = {tuple(module(name).split("."))}
    for source in folder.rglob("*.py"):
        here = source.relative_to(folder).parts[:2]
        names = {tuple(each.split(".")[:2]) for each in imports_of(ast.parse(source.read_text()))}
        wanted |= names - {here}
    assert packages <= wanted


@pytest.mark.parametrize("name", IMAGES)
def test_image_starts_its_program_and_prints_help_without_heavy_imports(name, image):
    root = image(name)
    code = (
        f"import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('{module(name)}', "
        "None, '__main__', True)"
    )
    path = root / python_path(name).lstrip("/")
    expression = "[sorted(sys.modules), sys.modules['evergreen'].__file__]"
    (loaded, package), printed = value_after(code, expression, folder=root, python_path=path)
    assert printed.startswith(("usage: python -m ", "usage: evergreen "))
    assert Path(package).is_relative_to(root), "the program ran code from outside the image"
    assert {name.partition(".")[0] for name in loaded}.isdisjoint(HEAVY)


def renders_pages(name: str) -> bool:
    """Return whether a program of the image writes HTML pages.

    Code in the package `evergreen` does not count as a program.
    """
    sources = {source for origin, source, _ in stages(name)[-1].copies() if not origin} - {
        "evergreen"
    }
    files = [path for source in sources for path in (REPOSITORY / source).rglob("*.py")]
    return any("from evergreen.reports" in path.read_text() for path in files)


DRAWN = [name for name in IMAGES if renders_pages(name)]
"""Images with a program that writes HTML pages."""


@pytest.mark.parametrize("name", DRAWN)
def test_image_renders_pages_from_templates_it_contains_with_locked_jinja(name, image):
    root = image(name)
    code = (
        "from evergreen.reports.page import refusal_page\n page = refusal_page('a step', '<why>')"
    )
    drawn, _ = value_after(
        code, "page", folder=root, python_path=root / python_path(name).lstrip("/")
    )
    assert "<h1>a step refused" in drawn
    assert "&lt;why&gt;" in drawn
    locked = (REPOSITORY / "requirements" / f"{lock(name)}.lock").read_text()
    assert {"jinja2", "markupsafe"} <= set(re.findall(r"^([a-z0-9-]+)==", locked, re.MULTILINE))
    suffixes = {path.suffix for path in (REPOSITORY / "evergreen" / "reports").rglob("*.*")} - {
        ".pyc"
    }
    seen = re.findall(
        r"^!evergreen/\*\*/\*(\.\w+)$", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE
    )
    assert suffixes <= set(seen)


@pytest.mark.parametrize("name", OURS_ALONE)
def test_image_installs_its_lock_in_stage_that_is_not_shipped(name):
    build, shipped = stages(name)
    torch = (
        [("", "requirements/torch.txt", "/tmp/torch.txt")]
        if environment(name) == "training"
        else []
    )
    assert build.copies() == [
        ("", f"requirements/{lock(name)}.lock", "/tmp/requirements.lock"),
        *torch,
    ]
    assert (REPOSITORY / build.copies()[0][1]).is_file()
    (install,) = build.all("RUN")
    assert f"python -m venv --without-pip {VENV} " in install
    assert (
        f"pip --python {VENV}/bin/python install --no-cache-dir --no-deps --require-hashes -r "
        "/tmp/requirements.lock" in install
    )
    assert ("build", VENV, VENV) in shipped.copies()
    assert shipped.all("RUN") == ["python -m compileall -q /app"], (
        "containers cannot write bytecode, so the image must contain it"
    )
    assert shipped.variables({"PATH": "/usr/local/bin"})["PATH"] == f"{VENV}/bin:/usr/local/bin"


def test_images_of_one_lock_share_their_layers_up_to_code():
    beginnings = defaultdict(set)
    for name in OURS_ALONE:
        build, shipped = stages(name)
        beginnings[lock(name)].add(
            (build.base, *build.instructions, shipped.base, shipped.instructions[0])
        )
    assert {locked: len(found) for locked, found in beginnings.items()} == dict.fromkeys(
        beginnings, 1
    )


def test_every_base_is_pinned_and_both_stages_have_same_python():
    bases = {name: [stage.base for stage in stages(name)] for name in IMAGES}
    for name in OURS_ALONE:
        full, slim = bases[name]
        debian = "trixie" if lock(name).endswith("-trixie") else "bookworm"
        assert re.fullmatch(rf"python:3\.11\.\d+-{debian}", full)
        # The environment's `python` links to the interpreter of the stage that created it.
        assert slim == full.replace(f"-{debian}", f"-slim-{debian}")
    assert len({bases[name][0].rpartition("-")[0] for name in OURS_ALONE}) == 1
    for name in STEP_OF_VARIANT:
        assert bases[name] == ["nvcr.io/nvidia/merlin/merlin-hugectr:24.06"]


@pytest.mark.parametrize("name", IMAGES)
def test_image_states_its_content_and_runs_as_unprivileged_user(name):
    shipped = stages(name)[-1]
    assert shipped.all("USER") == ["10001"], "runAsNonRoot needs a numeric user"
    assert entrypoint(name) == ["python", "-m", module(name)]
    labels = shipped.labels(
        {"REVISION": "3f2a9c1", "VERSION": "v7", "SOURCE": "https://git.example/e"}
    )
    assert labels == {
        "org.opencontainers.image.title": image_name(name),
        "org.opencontainers.image.version": "v7",
        "org.opencontainers.image.revision": "3f2a9c1",
        "org.opencontainers.image.source": "https://git.example/e",
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    # All instructions that depend on the commit come last, so that a new label rebuilds no layers.
    kinds = [keyword for keyword, _ in shipped.instructions]
    assert kinds.index("ARG") > max(
        i for i, kind in enumerate(kinds) if kind in ("COPY", "RUN", "ENV", "WORKDIR")
    )


@pytest.mark.parametrize("name", IMAGES)
def test_container_writes_no_bytecode_and_its_home_is_writable_in_pods(name):
    variables = stages(name)[-1].variables({})
    assert (variables["PYTHONDONTWRITEBYTECODE"], variables["PYTHONUNBUFFERED"]) == ("1", "1")
    assert variables["HOME"] == "/tmp"


@pytest.mark.parametrize("name", IMAGES)
def test_image_forbids_telemetry_of_onnxruntime(name):
    assert SILENT.items() <= stages(name)[-1].variables({}).items()


@pytest.mark.parametrize("home", sorted({environment(name) for name in OURS_ALONE}))
def test_compiled_packages_need_no_library_that_slim_base_lacks(home):
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    packages = python_of(home, REPOSITORY).parents[1] / "lib" / "python3.11" / "site-packages"
    files = [
        path
        for path in packages.rglob("*.so*")
        if path.is_file()
        and path.name not in OPTIONAL
        and not {CUDA_FOLDER, ONLY_IN_TESTS} & set(path.relative_to(packages).parts)
    ]
    command = ["readelf", "--dynamic", "--wide", *files]
    output = subprocess.run(command, capture_output=True, text=True, timeout=240).stdout
    needed = set(re.findall(r"\(NEEDED\)\s+Shared library: \[([^]]+)\]", output))
    assert "libc.so.6" in needed
    bundled = {path.name for path in packages.rglob("*.so*")}
    assert needed - bundled <= IN_SLIM_BASE
    tags = " ".join(path.read_text() for path in packages.glob("*.dist-info/WHEEL"))
    assert (
        max(int(minor) for minor in re.findall(r"-manylinux_2_(\d+)_x86_64", tags))
        <= DEBIAN_12_GLIBC_MINOR
    )


@pytest.mark.parametrize("name", sorted(STEP_OF_VARIANT))
def test_merlin_image_finds_our_code_first_and_its_own_packages_too(name):
    (only,) = stages(name)
    assert (
        only.variables({"PYTHONPATH": "/usr/local/hugectr/lib"})["PYTHONPATH"]
        == "/app:/usr/local/hugectr/lib"
    )
    locked = (
        (REPOSITORY / "requirements" / f"{ENVIRONMENT_OF_STEP[STEP_OF_VARIANT[name]]}.lock")
        .read_text()
        .split("\n")
    )
    requirements = (REPOSITORY / only.copies()[0][1]).read_text().splitlines()
    assert {line for line in requirements if not line.startswith("#")} <= {
        line.removesuffix(" \\") for line in locked
    }


@pytest.mark.parametrize("step", STEPS)
def test_component_names_image_of_its_step(step):
    component = getattr(importlib.import_module(f"components.{step}.component"), step)
    assert component.component_spec.implementation.container.image == image_name(step)
