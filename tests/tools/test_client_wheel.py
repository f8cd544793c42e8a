"""Tests of `make client-wheel`: a service with only this wheel can score and log requests."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from evergreen.contracts.criteo import CATEGORICAL
from testing.paths import REPOSITORY
from tools import client_wheel

LIBRARIES = [
    str(site)
    for name in ("serving", "driver")
    for site in (REPOSITORY / ".venvs" / name).glob("lib/python*/site-packages")
]
"""Folders that contain the installed dependencies in their oldest accepted versions, so that
nothing is downloaded."""


def distribution(name: str) -> importlib.metadata.Distribution:
    """Return the distribution from the first of LIBRARIES that has it."""
    return next(importlib.metadata.distributions(name=name, path=LIBRARIES))


def needed(texts, extras=frozenset({""})):
    """Return the distributions that the requirements in `texts` need, recursively and by name."""
    found = {}
    for requirement in map(Requirement, texts):
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            found[requirement.name] = distribution(requirement.name)
            found |= needed(found[requirement.name].requires or (), requirement.extras or {""})
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    assert client_wheel.main(["--output", str(folder)]) == 0
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment with only the wheel and its declared dependencies."""
    folder = tmp_path_factory.mktemp("service") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    install = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        wheel,
    ]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (installed,) = importlib.metadata.distributions(name=client_wheel.NAME, path=[str(site)])
    for each in needed(installed.requires).values():
        # Several distributions install files below the package `google`.
        tops = {
            Path(*file.parts[: 1 + (file.parts[0] == "google")])
            for file in each.files
            if ".." not in file.parts
        }
        for top in tops - {Path("__pycache__")}:
            (site / top).parent.mkdir(exist_ok=True)
            (site / top).symlink_to(each.locate_file(top))
    return python


def run(python, text, *arguments, given="", **environment):
    """Return what the interpreter `python` prints for the program `text`.

    The interpreter's path does not include the repository.
    """
    command = [python, "-I", "-c", text, *arguments]
    done = subprocess.run(
        command, input=given, env=environment, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_wheel_has_one_name_for_every_python_and_accepts_tested_versions(wheel):
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
        texts = {
            name: held.read(name).decode() for name in names if name.endswith((".py", "METADATA"))
        }
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "evergreen",
        "evergreen_client",
        "inference_client",
    }
    (metadata,) = (texts.pop(name) for name in list(texts) if name.endswith("METADATA"))
    required = [
        Requirement(line.partition(": ")[2])
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist")
    ]
    assert {each.name for each in required if each.marker is None} == {
        "msgspec",
        "numpy",
        "tritonclient",
    }
    for each in required:
        assert str(each.specifier) == f">={distribution(each.name).version}"
    for name, text in texts.items():
        tree = ast.parse(text, feature_version=(3, 10))
        roots = {
            (node.module or "").partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        assert not roots & {"components", "controller", "pipelines", "monitoring", "cli", "demo"}, (
            name
        )


PROGRAM = """
import doctest, sys, inference_client
from evergreen.events.locations import open_publisher
from evergreen.storage.uris import open_objects
from inference_client.errors import ContractError
tried = doctest.testmod(inference_client)
assert tried.attempted and not tried.failed
loaded = {name.partition(".")[0] for name in sys.modules}
print(loaded & {"inference_client", "components", "pyarrow", "pandas", "torch"})
for ask in (lambda: open_publisher("kafka://host:9092/topic"), lambda: open_publisher("pubsub://project/topic"),
            lambda: open_objects("gs://bucket/models")):
    try:
        ask()
    except ContractError as error:
        print(error)
"""


def test_docstring_of_module_runs_without_heavy_libraries_or_names_extra(python):
    loaded, *printed = run(python, PROGRAM).splitlines()
    assert loaded == "{'inference_client'}"
    assert [re.findall(r"evergreen-client\[\w+\]", line) for line in printed] == [
        [f"evergreen-client[{x}]"] for x in ("kafka", "pubsub", "gcs")
    ]
    assert "expected confluent_kafka to be installed" in printed[0]


def test_programs_of_page_run_unchanged(python, server, store, score_rows, read_log, tmp_path):
    page = (REPOSITORY / "docs" / "guides" / "log-from-your-service.md").read_text()
    impression, outcome, shutdown, outage, threads = re.findall(
        r"^```python\n(.*?)^```$", page, flags=re.M | re.S
    )
    place = {
        "EVERGREEN_SERVER": server.url,
        "EVERGREEN_RECOMMENDER": str(store / "recommender" / "1.json"),
        "EVERGREEN_LOG": f"sqlite:///{tmp_path}/log.db",
    }
    request_id, _, shown = run(python, impression, **place).partition(" ")
    run(python, outcome, given=f"{request_id} 0 click\n{request_id} 0 conversion\n", **place)
    assert run(python, shutdown, **place) == "1 rows are in the log\n"
    logged, *lines = run(python, outage, **place).splitlines()
    assert logged == "[True, True, False]"
    assert 'evergreen_client_log_dropped_rows_total{recommender="click_model"} 1' in lines
    assert (
        lines[-1]
        == "lost: 2 rows and 0 outcomes could not be published and are lost: no broker answers"
    )
    assert len(json.loads(run(python, threads, **place))) == 20
    ranked, click, conversion, scored, *others = read_log(tmp_path / "log.db")
    assert (ranked.request_id, len(ranked), len(scored), len(others)) == (request_id, 3, 1, 20)
    for record in (ranked, scored, *others):
        np.testing.assert_array_equal(record.scores, score_rows(record.dense, record.categorical))
    assert (np.diff(ranked.scores) <= 0).all()
    assert json.loads(shown) == ranked.categorical[:, CATEGORICAL.index("C3")].tolist()
    for program, event in ((click, "click"), (conversion, "conversion")):
        assert (program.request_ids, program.rows.tolist(), program.event) == (
            (request_id,),
            [0],
            event,
        )
    assert len({record.categorical[0, 0] for record in others}) == 4
