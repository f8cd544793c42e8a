"""Build images with podman, and run containers of these images.

The tests replace each base image by a stand-in. The images are in a separate storage. A stand-in is
a Debian with Python 3.11. Debian 13 lacks Python 3.11, so its stand-in uses Debian 12's packages.
Each stand-in has the name of the real base in the Dockerfiles, so the Dockerfiles are built
unchanged. A second run reuses the layers.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pipelines.images import DOCKERFILES, image_name
from testing.paths import REPOSITORY
from tests.support.dockerfiles import environment, lock, stages

STORAGE = "/var/lib/containers/evergreen-tests"
TAG = "tests"
USER = 10001
CONFINED = (
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp", "--cap-drop=all"),
    *("--security-opt=no-new-privileges", f"--user={USER}", "--passwd=false"),
)
DEBIAN = {
    "slim": "ca-certificates,python3.11",
    "full": "ca-certificates,python3.11,libpython3.11-dev,python3-pip,g++",
}
OLDER_PACKAGES_TOO = (
    "sed s/trixie/bookworm/ $1/etc/apt/sources.list > $1/etc/apt/sources.list.d/older.list"
)
PLAIN = [image for image in DOCKERFILES if environment(image)]
"""Images that contain no NVIDIA software."""
TRITON = "nvcr.io/nvidia/tritonserver:26.10-py3"
"""NVIDIA's image, replaced by the laptop's tritonserver. All containers of the pod share the
namespaces of this container."""
SERVED_AT = [f"{service}.evergreen.svc.cluster.local" for service in ("triton", "triton-headless")]
"""Host names of the cluster, which resolve to this machine in a container."""
HANDED_OVER = ("PATH", "VIRTUAL_ENV", "PYTHONPATH", "TMPDIR")
"""Variables that the local runner sets in an environment on a laptop."""


@pytest.fixture(scope="session")
def podman(tmp_path_factory):
    """Run podman as root with a separate storage.

    Podman uses runc, because crun refuses hybrid cgroups. Only root may mount.
    """
    missing = [name for name in ("podman", "runc", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"containers need root and podman, runc, mmdebstrap; here: uid {os.geteuid()}, without "
            f"{missing}"
        )
    folder = tmp_path_factory.mktemp("podman")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{STORAGE}"\nrunroot = '
        '"/run/containers/evergreen-tests"\n'
    )
    engine = '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    # Settings in containers.conf apply to this machine and reach no image. A step passes
    # `--network=none` itself.
    mounts = json.dumps(
        [f"{path}:{path}:ro" for path in pip_places()] + [f"{folder}/pip.conf:/etc/pip.conf:ro"]
    )
    (folder / "build.conf").write_text(
        f'{engine}[containers]\nnetns = "host"\nvolumes = {mounts}\n'
    )
    # Podman's default limits are higher than root may set without SYS_RESOURCE.
    limits = 'default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]'
    hosts = f'base_hosts_file = "{folder}/hosts"'
    (folder / "run.conf").write_text(
        f'{engine}infra_image = "{TRITON}"\n[containers]\n{limits}\n{hosts}\n'
    )
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join(SERVED_AT)}\n")
    lines = [f"{name} = {value}" for name, value in pip_settings().items()]
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))

    def variables(purpose: str) -> dict[str, str]:
        conf = {
            "CONTAINERS_CONF": f"{folder}/{purpose}.conf",
            "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
        }
        return {**os.environ, **conf}

    return variables


@pytest.fixture(scope="session")
def images(podman, tmp_path_factory):
    """Build the images with the project's command over stand-in bases.

    Return the images' references.
    """
    variables = podman("build")
    for base in sorted({stage.base for image in PLAIN for stage in stages(image)}):
        name = f"docker.io/library/{base}"
        if subprocess.run(["podman", "image", "exists", name], env=variables).returncode:
            root = tmp_path_factory.mktemp("base") / "root.tar"
            packages = DEBIAN["slim" if "slim" in base else "full"]
            link = "ln -s /usr/bin/python3.11 $1/usr/local/bin/python"
            make = [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={packages}",
                f"--customize-hook={link}",
            ]
            suite = base.rpartition("-")[2]
            make += [f"--setup-hook={OLDER_PACKAGES_TOO}"] if suite == "trixie" else []
            subprocess.run([*make, suite, str(root)], check=True)
            subprocess.run(
                ["podman", "import", "--quiet", str(root), name], check=True, env=variables
            )
            root.unlink()
    started = time.monotonic()
    logs = REPOSITORY / "build" / "test-images"
    logs.mkdir(parents=True, exist_ok=True)
    builds = {}
    # Images of one lock share a layer and are built one after another. Images of different locks
    # are built in parallel, because podman checks on one core whether a layer exists.
    for locked in sorted({lock(image) for image in PLAIN}):
        names = [image for image in PLAIN if lock(image) == locked]
        command = [
            sys.executable,
            "-m",
            "tools.build_images",
            *names,
            "--engine",
            "podman",
            "--dirty",
        ]
        with open(logs / f"{locked}.log", "wb") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            builds[locked] = subprocess.Popen(
                [*command, "--tag", TAG], cwd=REPOSITORY, env=variables, **streams
            )
    codes = {lock: process.wait() for lock, process in builds.items()}
    failed = [
        (logs / f"{locked}.log").read_text()[-3000:] for locked, code in codes.items() if code
    ]
    assert not failed, "\n".join(failed)
    print(f"\n{len(PLAIN)} images built in {time.monotonic() - started:.0f} s")
    return {image: f"localhost/{image_name(image)}:{TAG}" for image in PLAIN}


def pip_settings() -> dict[str, str]:
    """Return pip's configuration on this machine, from its files and variables."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    pairs = (line.partition("=") for line in listed.stdout.splitlines())
    return {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in pairs}


def pip_places() -> list[str]:
    """Return the local files and folders that pip's settings name.

    If a setting names a package index as a local path, the folder of the index's pages is included.
    """
    words = [word for value in pip_settings().values() for word in value.split()]
    indexes = [
        Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")
    ]
    others = [Path(word) for word in words if word.startswith("/")]
    return sorted({str(path) for path in (*indexes, *others) if path.exists()})


@pytest.fixture
def volume():
    """Create a folder that the images' user may write.

    pytest's own folder is private to the user who runs pytest.
    """
    with tempfile.TemporaryDirectory(prefix="evergreen-containers-") as folder:
        yield Path(folder)


def give_to_user(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, USER, 0)


def in_containers(podman, images, steps, *flags):
    """Run a task's command in its image.

    The function replaces the local runner's `_run_step`.
    """

    def contained(command, variables, log):
        step = command[command.index("--function_to_execute") + 1]
        steps.append(step)
        added = {
            k: v for k, v in variables.items() if k not in HANDED_OVER and os.environ.get(k) != v
        }
        given = [f"--env={name}={value}" for name, value in added.items()]
        program, *rest = command
        run = [
            "podman",
            "run",
            "--rm",
            *CONFINED,
            *flags,
            *given,
            f"--entrypoint={program}",
            images[step],
            *rest,
        ]
        return subprocess.run(
            run, env=podman("run"), stdout=log, stderr=subprocess.STDOUT
        ).returncode

    return contained
