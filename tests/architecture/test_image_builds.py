"""Tests of `make images`: its commands, and the files of the checkout that an engine sees.

One test builds an image if podman is installed. All other tests put a script called docker or
podman on PATH that records its arguments.
"""

import json
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from demo.stack import DIRECT, LOOPBACK, Stack, answers, free_port
from pipelines.images import DOCKERFILES, image_name
from testing.paths import REPOSITORY
from tests.support.dockerfiles import environment, lay_out, stages
from tools import build_images

GIT = shutil.which("git")
REGISTRY = "europe-docker.pkg.dev/my-project/evergreen"
NOTING = """
import json, os, sys
with open(os.environ["ENGINE_NOTES"], "a") as notes:
    print(json.dumps(sys.argv[1:]), file=notes)
if sys.argv[2] == os.environ.get("ENGINE_FAILS"):
    sys.exit("the engine says no")
if sys.argv[2] == "image":
    print(os.environ.get("ENGINE_KNOWS", ""))
"""
# A `#!` line cannot name a Python whose path contains a space.
SCRIPT = f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", NOTING])} "$0" "$@"\n'


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        [GIT, *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A repository with this checkout, its uncommitted changes, and files that no image needs."""
    if GIT is None:
        pytest.skip("git is not installed")
    try:
        listed = git(REPOSITORY, "ls-files", "-co", "--exclude-standard").splitlines()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"git cannot list the files of the repository: {error.stderr.strip()}")
    folder = tmp_path_factory.mktemp("original")
    for name in listed:
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, folder / name)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "as it is")
    (folder / ".git" / "info" / "exclude").write_text("*.key\n*.parquet\n")
    for planted in (
        "service-account.key",
        "components/secret.key",
        ".venvs/driver/pyvenv.cfg",
        "build/data.parquet",
        "evergreen/contracts/__pycache__/old.cpython-311.pyc",
        "monitoring/__pycache__/deep/old.pyc",
        "components/build/lib/old.py",
        "components/training/build/old.py",
        "monitoring/.ruff_cache/1/old.py",
        "inference_client/rows.parquet",
    ):
        (folder / planted).parent.mkdir(parents=True, exist_ok=True)
        (folder / planted).write_text("not for an image")
    return folder


@pytest.fixture
def tree(original, tmp_path, monkeypatch):
    """A clean checkout for one test."""
    folder = tmp_path / "checkout"
    shutil.copytree(original, folder)
    monkeypatch.setattr(build_images, "_REPOSITORY", folder)
    monkeypatch.setattr(build_images, "DIGESTS", folder / "build" / "images.txt")
    for variable in build_images.INDEXES:
        monkeypatch.delenv(variable, raising=False)
    return folder


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """`engines(*names)` limits PATH to git and scripts named `names`.

    The returned function reads the calls that the scripts recorded.
    """
    folder, notes = tmp_path / "bin", tmp_path / "notes"

    def install(*names: str):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(SCRIPT)
            (folder / name).chmod(0o755)
        (folder / "git").symlink_to(GIT)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.setenv("ENGINE_NOTES", str(notes))

        def calls() -> list[list[str]]:
            lines = notes.read_text().splitlines() if notes.exists() else []
            return [[Path(words[0]).name, *words[1:]] for words in map(json.loads, lines)]

        return calls

    return install


def flags(command: list[str], name: str) -> list[str]:
    return [value for flag, value in zip(command, command[1:]) if flag == name]


def test_every_image_is_built_from_its_dockerfile_and_named_by_revision(tree, engines):
    calls = engines("docker")
    assert build_images.main(["--registry", REGISTRY]) == 0
    revision = git(tree, "rev-parse", "HEAD")
    builds = [command for command in calls() if command[1] == "build"]
    assert {flags(command, "--file")[0]: flags(command, "--tag") for command in builds} == {
        path: [f"{REGISTRY}/{image_name(name)}:{revision}"] for name, path in DOCKERFILES.items()
    }
    for command in builds:
        assert flags(command, "--build-arg") == [
            f"VERSION={revision}",
            f"REVISION={revision}",
            "SOURCE=unknown",
        ]
        assert command[-1] == "."
    assert not [command for command in calls() if command[1] == "push"]


def test_uncommitted_changes_are_refused_or_named_in_tag_if_allowed(tree, engines, capsys):
    calls = engines("docker")
    (tree / "components" / "new.py").write_text("")
    assert build_images.main([]) == 2
    assert "1 files are not committed, such as components/new.py" in capsys.readouterr().err
    assert calls() == []
    assert build_images.main(["--dirty", "monitoring"]) == 0
    (tag,) = flags(calls()[-1], "--tag")
    assert tag == f"evergreen-monitoring:{git(tree, 'rev-parse', 'HEAD')}-dirty"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--tag", "latest"], "an immutable tag"),
        (["--tag", "a b"], "an immutable tag"),
        (["--push"], "--registry"),
        (["nothing"], "image nothing is unknown"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_built(
    tree, engines, capsys, arguments, word
):
    calls = engines("docker")
    assert build_images.main(arguments) == 2
    assert word in capsys.readouterr().err
    assert calls() == []


def test_podman_is_used_where_requested(tree, engines):
    calls = engines("docker", "podman")
    assert build_images.main(["extraction", "--engine", "podman"]) == 0
    assert [command[0] for command in calls()] == ["podman"]


def test_podman_treats_name_without_registry_as_local(tree, engines):
    calls = engines("podman")
    assert build_images.main(["extraction", "--engine", "podman", "--tag", "v1"]) == 0
    assert flags(calls()[0], "--tag") == ["localhost/evergreen-extraction:v1"]


def test_digests_of_docker_are_those_of_repository_that_was_pushed_to(tree, engines, monkeypatch):
    calls, digest = engines("docker"), f"sha256:{'2' * 64}"
    known = [
        f"elsewhere/evergreen-monitoring@sha256:{'1' * 64}",
        f"{REGISTRY}/evergreen-monitoring@{digest}",
    ]
    words = ["monitoring", "--registry", REGISTRY, "--push", "--tag", "v1"]
    assert build_images.main(words) == 3  # The image was pushed, but the engine reports no digest.
    monkeypatch.setenv("ENGINE_KNOWS", json.dumps(known))
    assert build_images.main(words) == 0
    assert calls()[-1][1:] == [
        "image",
        "inspect",
        *calls()[-1][3:5],
        f"{REGISTRY}/evergreen-monitoring:v1",
    ]
    assert (
        tree / "build" / "images.txt"
    ).read_text() == f"{REGISTRY}/evergreen-monitoring@{digest}\n"


@pytest.fixture
def podman_storage(tmp_path, monkeypatch):
    """Separate storage for the real podman."""
    if not shutil.which("podman"):
        pytest.skip("podman is not installed")
    text = f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/root"\nrunroot = "{tmp_path}/run"\n'
    (tmp_path / "storage.conf").write_text(text)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))


def test_digests_of_podman_are_those_that_registry_has(tree, podman_storage, tmp_path, monkeypatch):
    if not shutil.which("docker-registry"):
        pytest.skip("docker-registry is not installed")
    port = free_port()
    files = {
        "registry.yml": "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: '{tmp_path}/registry'}}}}\nhttp: {{addr: "
        f"'{LOOPBACK}:{port}'}}\n",
        "registries.conf": f'[[registry]]\nlocation = "{LOOPBACK}:{port}"\ninsecure = true\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
    (tree / "monitoring" / "Dockerfile").write_text("FROM scratch\nCOPY monitoring/__init__.py /\n")
    with Stack(logs=tmp_path / "logs", variables={}) as stack:
        stack.start("registry", ["docker-registry", "serve", str(tmp_path / "registry.yml")])
        address = f"http://{LOOPBACK}:{port}/v2/"
        stack.wait_until(lambda: answers(address), what="the registry", seconds=60)
        words = ["monitoring", "--engine", "podman", "--registry", f"{LOOPBACK}:{port}/e", "--push"]
        assert build_images.main([*words, "--tag", "v1", "--dirty"]) == 0
        (line,) = (tree / "build" / "images.txt").read_text().splitlines()
        image, digest = line.split("@")
        assert image == f"{LOOPBACK}:{port}/e/evergreen-monitoring"
        url, accept = (
            f"{address}e/evergreen-monitoring/manifests/",
            "application/vnd.oci.image.manifest.v1+json",
        )
        for name in ("v1", digest):
            with DIRECT.open(
                urllib.request.Request(url + name, headers={"Accept": accept}), timeout=60
            ) as answer:
                assert answer.headers["Docker-Content-Digest"] == digest


def test_requested_but_absent_engine_is_named(tree, engines, capsys):
    engines("docker")
    assert build_images.main(["extraction", "--engine", "podman"]) == 3
    assert "podman is not on PATH" in capsys.readouterr().err


def test_failed_build_pushes_nothing(tree, engines, monkeypatch, capsys):
    calls = engines("docker")
    monkeypatch.setenv("ENGINE_FAILS", "build")
    assert build_images.main(["--registry", REGISTRY, "--push"]) == 3
    assert "docker build of deployment ended with code 1" in capsys.readouterr().err
    assert [command[1] for command in calls()] == ["build"]


def test_address_of_private_index_is_passed_on_without_being_stored(tree, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:word@index.example/simple")
    for name in DOCKERFILES:
        command = build_images.build_command(
            "docker", name, "x:1", tag="1", revision="1", source="s"
        )
        assert ("PIP_INDEX_URL" in flags(command, "--build-arg")) == (environment(name) is not None)
        assert "user:word" not in shlex.join(command)
        # An undeclared ARG would be an error. An ARG in the last stage would be visible in the
        # image.
        build, *later = stages(name)
        assert ("PIP_INDEX_URL" in build.all("ARG")) == (environment(name) is not None)
        assert not any("PIP_INDEX_URL" in stage.all("ARG") for stage in later)


def test_dry_run_prints_equivalent_script(tree, engines, capsys):
    calls = engines("docker")
    assert build_images.main(["--registry", REGISTRY, "--push", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert calls() == []
    subprocess.run(["/bin/sh", "-ec", script], check=True, cwd=tree)
    by_script = calls()
    assert len(by_script) == 2 * len(DOCKERFILES)
    build_images.main(["--registry", REGISTRY, "--push"])
    assert [c for c in calls()[len(by_script) :] if c[1] in ("build", "push")] == by_script


def test_make_passes_its_variables_on(tree):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    words = [
        "make",
        "-s",
        "images",
        "DRY_RUN=1",
        "REVISION=abc",
        "PUSH=1",
        "IMAGES=monitoring",
        "TAG=v1",
    ]
    words += [f"PYTHON={shlex.quote(sys.executable)}", f"REGISTRY={REGISTRY}"]
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=True)
    build, push = done.stdout.splitlines()
    assert push == f"docker push {REGISTRY}/evergreen-monitoring:v1"
    assert "REVISION=abc" in shlex.split(build)


CODE = ("evergreen/", "components/", "controller/", "demo/", "inference_client/", "monitoring/")


def laid_out(name: str, root: Path, context: Path) -> set[str]:
    """Return the project's files in the image."""
    return {
        path.relative_to(root).as_posix()
        for path in lay_out(name, root, context).rglob("*")
        if path.is_file()
    }


def test_engine_sees_files_that_images_copy_and_no_other_files(tree, podman_storage, tmp_path):
    context, committed = tmp_path / "context", set(git(tree, "ls-files").splitlines())
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    command = [
        "podman",
        "build",
        "-q",
        f"--output=type=local,dest={context}",
        f"--file={tmp_path}/Dockerfile",
        tree,
    ]
    subprocess.run(command, check=True)
    sent = {path.relative_to(context).as_posix() for path in context.rglob("*") if path.is_file()}
    others = {path for path in sent if not path.startswith(CODE)}
    assert {Path(path).parent.name for path in others} == {"requirements"}
    assert sent <= committed
    for name in DOCKERFILES:
        for stage in stages(name):
            assert all(
                (context / source).exists() for origin, source, _ in stage.copies() if not origin
            )
        here = laid_out(name, tmp_path / f"{name}-here", tree)
        ours = {
            path
            for path in here
            if not path.startswith("app/") or path.removeprefix("app/") in committed
        }
        ours = {path for path in ours if not Path(path).name.startswith("Dockerfile")}
        assert laid_out(name, tmp_path / f"{name}-sent", context) == ours
