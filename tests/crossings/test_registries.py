"""Tests of the export of two real runs to a real MLflow and to a Model Registry test double."""

import json
import os
import urllib.request
from dataclasses import asdict, replace
from types import SimpleNamespace

import onnx
import pytest
import yaml

from demo.environments import python_of
from demo.stack import DIRECT, Stack, answers, free_port
from evergreen.contracts.manifests import Verdict
from evergreen.registry.models import graph_folder, verdict_paths
from evergreen.registry.promotion_journal import CANARY, ROLLBACK, append_promotion, read_journal
from testing.paths import REPOSITORY
from testing.warm import Warm
from tests.support.model_registry import ModelRegistry

PYTHON = python_of("export")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON.exists(), reason=f"{PYTHON} is absent: make environments ENVIRONMENTS=export"
    ),
]
IMPORTS = "import cli.registries.mlflow_server, cli.registries.kubeflow"
PROGRAM = "import runpy; runpy.run_module('cli.registries', run_name='__main__', alter_sys=True)"


def call(mlflow, path, body=None):
    """Call a real server's REST API without the server's client."""
    content = None if body is None else json.dumps(body).encode()
    url, head = f"{mlflow}/api/2.0/mlflow/{path}", {"Content-Type": "application/json"}
    return json.load(DIRECT.open(urllib.request.Request(url, content, head), timeout=30))


def state_of(mlflow):
    """Return MLflow's runs, its versions by the registry's version number, and its aliases."""
    versions = call(mlflow, "model-versions/search?filter=name%3D%27click_model%27")[
        "model_versions"
    ]
    numbers = {each["version"]: int(by_key(each["tags"])["evergreen.version"]) for each in versions}
    aliases = call(mlflow, "registered-models/get?name=click_model")["registered_model"].get(
        "aliases", []
    )
    return SimpleNamespace(
        runs=call(mlflow, "runs/search", {"experiment_ids": ["1"], "max_results": 100})["runs"],
        versions=[(numbers[each["version"]], each) for each in versions],
        aliases={each["alias"]: numbers[each["version"]] for each in aliases},
    )


def by_key(pairs):
    return {each["key"]: each["value"] for each in pairs}


@pytest.fixture(scope="module")
def exported(chain, tmp_path_factory):
    """A registry that is exported repeatedly. After each export, both targets are read."""
    folder = tmp_path_factory.mktemp("registries")
    store, kubeflow = chain.copied_to(folder / "chain").root / "store", ModelRegistry()
    mlflow = f"http://127.0.0.1:{(port := free_port())}"
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "NO_PROXY": "*",
    }
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **quiet}
    made = SimpleNamespace(store=store, artifacts=folder / "artifacts", kubeflow=kubeflow)

    def export(name, url=mlflow):
        flags = ["--store", str(store), "--mlflow", url, "--model-registry", kubeflow.url]
        code, output = warm.run(PROGRAM, flags, variables=environment, folder=folder)
        held, state = (
            json.loads(json.dumps(kubeflow.items)),
            state_of(mlflow) if url == mlflow else None,
        )
        setattr(made, name, SimpleNamespace(code=code, output=output, mlflow=state, kubeflow=held))

    server = [str(PYTHON), "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    server += [
        "--backend-store-uri",
        f"sqlite:///{folder}/db",
        "--artifacts-destination",
        str(made.artifacts),
    ]
    with (
        Stack(logs=folder / "logs", variables=environment) as stack,
        Warm(PYTHON, IMPORTS, environment) as warm,
    ):
        stack.start("mlflow", server)
        export("away", f"http://127.0.0.1:{free_port()}")
        stack.wait_until(lambda: answers(f"{mlflow}/health"), what="MLflow's start", seconds=240)
        # Simulate an export that is killed between two of its calls.
        tags = {"model_id": chain.rounds[1].training.model_id, "verdict": "pass"}
        call(mlflow, "experiments/create", {"name": "click_model"})
        tags = [{"key": key, "value": tags[key]} for key in tags]
        call(mlflow, "runs/create", {"experiment_id": "1", "tags": tags})
        kubeflow.items["artifacts"].pop()
        export("first")
        journal = read_journal(store)
        line = replace(journal[0], lease=journal[-1].lease)
        append_promotion(store, replace(line, action=CANARY, share=0.1))
        export("canary")
        append_promotion(store, replace(line, action=ROLLBACK))
        export("back")
        kubeflow.is_old = True
        export("old")
    yield made
    kubeflow.close()


def test_unavailable_registry_is_reported_and_other_registry_is_filled(exported):
    assert exported.away.code == 3
    (line,) = (line for line in exported.away.output.splitlines() if "evergreen.export" in line)
    assert "MLflow: " in line
    assert "Traceback" not in exported.away.output
    assert [each["name"] for each in exported.away.kubeflow["model_versions"]] == ["1", "2"]


def test_registry_without_api_v1_is_named(exported):
    (line,) = (line for line in exported.old.output.splitlines() if "evergreen.export" in line)
    assert exported.old.code == 3
    assert (
        f"{exported.kubeflow.url} answers 404 to the API v1, expected a Kubeflow Hub with" in line
    )
    assert exported.old.kubeflow == exported.back.kubeflow


def test_every_evaluated_round_is_exported_once_as_run_with_its_verdict(chain, exported):
    runs = {by_key(run["data"]["tags"])["model_id"]: run for run in exported.first.mlflow.runs}
    assert len(exported.first.mlflow.runs) == 2
    assert runs.keys() == {this.training.model_id for this in chain.rounds}
    for model, run in runs.items():
        verdict = Verdict.read(verdict_paths(exported.store, model)[0])
        metrics, parameters = by_key(run["data"]["metrics"]), by_key(run["data"]["params"])
        for name, value in asdict(verdict.candidate).items():
            assert metrics.get(name) == pytest.approx(value), name
        assert metrics["lead_low"] == pytest.approx(verdict.difference.low)
        assert (metrics["holdout_rows"], run["info"]["status"]) == (verdict.num_rows, "FINISHED")
        assert (parameters["training.learning_rate"], parameters["model.tower"]) == (
            "0.003",
            "[16, 8]",
        )
        assert by_key(run["data"]["tags"])["verdict"] == verdict.decision
        (card,) = exported.artifacts.rglob(f"{run['info']['run_id']}/artifacts/card.html")
        assert f"Model card: {model}" in card.read_text()


def test_every_version_has_its_graph_and_tensors_of_graph_as_signature(exported):
    assert sorted(number for number, _ in exported.first.mlflow.versions) == [1, 2]
    for number, version in exported.first.mlflow.versions:
        stored = graph_folder(exported.store, number)
        model_id = version["source"].removeprefix("models:/")
        (folder,) = exported.artifacts.rglob(f"{model_id}/artifacts")
        for name in ("model.onnx", "model.data"):
            assert (folder / name).read_bytes() == (stored / name).read_bytes()
        described = yaml.safe_load((folder / "MLmodel").read_text())
        assert described["flavors"]["python_function"]["loader_module"] == "mlflow.onnx"
        graph = onnx.load(stored / "model.onnx", load_external_data=False).graph
        for side, tensors in (("inputs", graph.input), ("outputs", graph.output)):
            specs = {
                each["name"]: each["tensor-spec"]
                for each in json.loads(described["signature"][side])
            }
            assert list(specs) == [each.name for each in tensors]
            for spec, tensor in zip(specs.values(), (each.type.tensor_type for each in tensors)):
                assert spec["dtype"] == onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
                assert spec["shape"] == [
                    -1 if each.dim_param else each.dim_value for each in tensor.shape.dim
                ]


def test_aliases_change_only_with_release_canary_and_rollback(exported):
    stages = [exported.first, exported.canary, exported.back]
    assert [stage.code for stage in stages] == [0, 0, 0], [stage.output for stage in stages]
    aliases = [{"champion": 2}, {"champion": 2, "candidate": 1}, {"champion": 1}]
    assert [stage.mlflow.aliases for stage in stages] == aliases
    for stage, expected in zip(stages, aliases):
        properties = stage.kubeflow["registered_models"][0]["customProperties"]
        for name in ("champion", "candidate"):
            assert properties[name]["string_value"] == str(expected.get(name, ""))
        assert stage.mlflow.runs == exported.first.mlflow.runs
        assert len(stage.mlflow.versions) == len(stage.kubeflow["model_versions"]) == 2


def test_model_registry_has_each_versions_graph_and_numbers_by_its_api(exported):
    assert exported.kubeflow.faults == []
    held = exported.back.kubeflow
    uris = {each["id"]: each["uri"] for each in held["artifacts"]}
    for version in held["model_versions"]:
        (uri,) = (
            uris[artifact]
            for artifact, of in exported.kubeflow.version_of.items()
            if of == version["id"]
        )
        assert uri == (graph_folder(exported.store, int(version["name"])) / "model.onnx").as_uri()
        properties = version["customProperties"]
        verdict = Verdict.read(
            verdict_paths(exported.store, properties["model_id"]["string_value"])[0]
        )
        assert properties["auc"]["double_value"] == verdict.candidate.auc
        assert (properties["verdict"]["string_value"], version["description"]) == (
            verdict.decision,
            verdict.reason,
        )
