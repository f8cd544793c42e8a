"""Tests of the package's metadata: its version, its requirements and the files of its wheel."""

import re
import subprocess
import sys
import zipfile

import pytest
import yaml
from packaging.requirements import Requirement

from testing.paths import REPOSITORY

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def locked(environment: str) -> dict[str, str]:
    """Map the name of each package in a lock to its version."""
    text = (REPOSITORY / "requirements" / f"{environment}.lock").read_text()
    torch = (REPOSITORY / "requirements" / "torch.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([^ \n]+)", f"{text}\n{torch}", flags=re.M))


def test_version_is_newest_of_changelog():
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == PROJECT["version"]


@pytest.mark.parametrize(
    ("extra", "environment"),
    [
        (None, "driver"),
        ("kubeflow", "driver"),
        ("gcs", "driver"),
        ("kafka", "driver"),
        ("pubsub", "driver"),
        ("serving", "driver"),
        ("training", "training"),
        ("validation", "validation"),
        ("preprocessing", "preprocessing"),
    ],
)
def test_locks_have_versions_that_wheel_requires(extra, environment):
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    versions = locked(environment)
    for requirement in map(Requirement, texts):
        assert versions[requirement.name.lower()] in requirement.specifier, requirement


def test_wheel_has_command_and_files_that_programs_read(tmp_path):
    source = tmp_path / "source"
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    roots = {"cli", "components", "controller", "demo", "evergreen", "inference_client"}
    roots |= {"monitoring", "pipelines", "tools", "pyproject.toml", "README.md", "LICENSE"}
    for name in filter(None, names):
        if name.partition("/")[0] in roots and (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "wheel", *flags, "--wheel-dir", str(tmp_path), source]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob(f"evergreen-{PROJECT['version']}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        points = archive.read(f"evergreen-{PROJECT['version']}.dist-info/entry_points.txt")
    assert b"evergreen = cli.__main__:main" in points
    read_by_programs = {
        name
        for name in names
        if name.partition("/")[0] in roots
        and name.endswith((".txt", ".css", ".j2", ".json", ".yaml"))
        and name != "tools/verbs.txt"
    }
    assert read_by_programs <= files
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in files)


def test_pre_commit_has_versions_of_lock():
    document = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    hooks = {hook["id"]: hook for repo in document["repos"] for hook in repo["hooks"]}
    assert hooks.keys() == {"ruff", "ruff-format", "codespell", "check-yaml", "actionlint"}
    versions = locked("driver.test")
    for hook, package in (("ruff", "ruff"), ("ruff-format", "ruff"), ("codespell", "codespell")):
        pinned = f"{package}=={versions[package]}"
        assert pinned in hooks[hook]["additional_dependencies"]
