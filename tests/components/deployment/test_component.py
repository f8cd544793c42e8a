"""The KFP component, called as the executor calls it."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from components.contracts.manifests import Verdict
from components.deployment.component import deployment
from components.store import runs


class Logged(dict):
    def log_metric(self, name, value):
        self[name] = value


@pytest.fixture
def arguments(make_candidate, tmp_path):
    store = tmp_path / "store"
    artifacts = {}
    for name, manifest in zip(("model", "verdict", "raw_dataset"), make_candidate(store, 1)):
        artifacts[name] = SimpleNamespace(path=str(tmp_path / name))
        manifest.write(artifacts[name].path)
    folders = {"store": store.as_uri(), "work": str(tmp_path), "repository": (tmp_path / "a repository").as_uri()}
    return {
        "run": "run-1", "triton_urls": "", "server": "python", "device": "cpu",
        "rollout": "full", "instances": 2, "response_cache": False, "target_memory": "", "trigger_id": "",
        **folders, **artifacts,
        "release": SimpleNamespace(path=str(tmp_path / "outputs" / "release")), "metrics": Logged(),
    }  # fmt: skip


def test_component_leaves_the_release_and_its_numbers(arguments):
    deployment.python_func(**arguments)
    with open(arguments["release"].path) as file:
        written = json.load(file)
    assert (written["kind"], written["version"], written["trigger_id"]) == ("Release", 1, None)
    assert arguments["metrics"]["version"] == 1
    assert 0 <= arguments["metrics"]["parity_max_abs_diff"] <= 1e-5


def test_component_whose_verdict_is_stale_ends_without_a_release_and_without_a_retry(arguments, tmp_path):
    stale = Verdict.read(arguments["verdict"].path)
    dataclasses.replace(stale, champion_model_id="model-0", champion_reference="current").write(
        arguments["verdict"].path
    )
    deployment.python_func(**arguments)
    assert not (tmp_path / "outputs" / "release").exists()
    [note] = runs.read_notes(tmp_path / "store", "run-1")
    assert (note.state, "judged against model-0" in note.reason) == ("refused", True)


def test_component_ends_with_the_steps_exit_code(arguments):
    with pytest.raises(SystemExit) as ended:
        deployment.python_func(**{**arguments, "triton_urls": "nonsense"})
    assert ended.value.code == 2
