"""Submitting through the real kfp client, against an HTTP double of the KFP API."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from components.contracts.errors import ContractError, PermanentError, TemporaryError
from pipelines.__main__ import main
from pipelines.retraining import PIPELINE_NAME
from pipelines.submit import submit
from tests.monitoring.acting.kfp_double import KfpDouble, Refused

GOLDEN = Path(__file__).parent / "golden" / "retraining.yaml"


class KfpWithPipelines(KfpDouble):
    """The double, with the API that keeps pipelines and their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.pipelines: list[dict] = []
        self.uploads: list[bytes] = []

    def reply(self, method: str, target: str, body: bytes) -> dict:
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        path = parts.path.removeprefix("/apis/v2beta1/")
        if self.failure is None and path.startswith("pipelines"):
            self.requests.append((method, parts.path))
            if (method, path) == ("GET", "pipelines"):
                return {"pipelines": self.select(self.pipelines, query)}
            if (method, path) == ("POST", "pipelines/upload"):
                return self.upload_pipeline(query, body)
            if (method, path) == ("POST", "pipelines/upload_version"):
                return self.upload_version(query, body)
        return super().reply(method, target, body)

    def upload_pipeline(self, query: dict, body: bytes) -> dict:
        if "namespace" in query:
            raise Refused(400, "in single-user mode a request shouldn't contain a namespace")
        if any(pipeline["display_name"] == query["name"] for pipeline in self.pipelines):
            raise Refused(409, f"the name {query['name']} is taken")
        self.uploads.append(uploaded_file(body))
        pipeline = {"pipeline_id": f"p{len(self.pipelines) + 1}", "display_name": query["name"]}
        self.pipelines.append(pipeline)
        return pipeline

    def upload_version(self, query: dict, body: bytes) -> dict:
        if query["pipelineid"] not in {pipeline["pipeline_id"] for pipeline in self.pipelines}:
            raise Refused(404, f"pipeline {query['pipelineid']}")
        if any(version["display_name"] == query["name"] for version in self.versions):
            raise Refused(409, f"the version {query['name']} is taken")
        self.uploads.append(uploaded_file(body))
        version = {"pipeline_version_id": f"v{len(self.versions) + 1}", "display_name": query["name"]}
        self.versions.append({**version, "pipeline_id": query["pipelineid"]})
        return version


def uploaded_file(body: bytes) -> bytes:
    """The one file of a multipart form."""
    boundary = body.partition(b"\r\n")[0]
    header, _, content = body.split(boundary)[1].partition(b"\r\n\r\n")
    assert b'name="uploadfile"' in header
    return content.removesuffix(b"\r\n")


@pytest.fixture
def server():
    double = KfpWithPipelines()
    yield double
    double.close()


@pytest.fixture
def send(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(package=GOLDEN, **changes) -> str:
        values = {"host": server.url, "namespace": "", "experiment": "evergreen", "parameters": {}}
        values |= {"upload_version": None, "timeout_seconds": (2.0, 2.0)}
        return submit(package, **{**values, **changes})

    return make


def test_run_is_created_in_the_experiment_with_the_parameters_given(server, send):
    parameters = {"min_auc": 0.7, "max_epochs": 2, "accept_inconclusive": True, "tower": "32,16", "window_end": ""}
    run_id = send(parameters=parameters)
    (run,), (experiment,) = server.runs, server.experiments
    assert run_id == run["run_id"]
    assert experiment["display_name"] == "evergreen"
    assert run["experiment_id"] == experiment["experiment_id"]
    assert run["body"]["runtime_config"]["parameters"] == parameters
    spec, platform = yaml.safe_load_all(GOLDEN.read_text())
    assert run["body"]["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}


def test_second_run_joins_the_same_experiment(server, send):
    send()
    send()
    assert len(server.experiments) == 1
    assert len(server.runs) == 2


def test_first_upload_makes_the_pipeline_and_later_ones_only_versions(server, send):
    send(upload_version="3f2a9c1")
    send(upload_version="9c13f2a")
    (pipeline,) = server.pipelines
    assert pipeline["display_name"] == PIPELINE_NAME
    assert [(v["display_name"], v["pipeline_id"]) for v in server.versions] == [("3f2a9c1", "p1"), ("9c13f2a", "p1")]
    assert set(server.uploads) == {GOLDEN.read_bytes()}
    assert len(server.runs) == 2


def test_version_name_that_is_taken_starts_no_run(server, send):
    send(upload_version="same")
    with pytest.raises(PermanentError, match=r"answered 409 .*the version same is taken"):
        send(upload_version="same")
    assert len(server.runs) == 1


def test_single_user_installation_is_never_told_of_a_namespace(server, send, capsys):
    # The double refuses namespaces as such a server does.
    command = ["submit", "--package", str(GOLDEN), "--host", server.url, "-p", "min_auc=0.7"]
    assert main([*command, "--upload-version", "v"]) == 0
    assert capsys.readouterr().out.strip() == server.runs[0]["run_id"]
    assert server.runs[0]["body"]["runtime_config"]["parameters"] == {"min_auc": 0.7}


def test_multi_user_installation_is_told_of_its_namespace(server, send):
    with pytest.raises(PermanentError, match="shouldn't contain a namespace"):
        send(namespace="team-a")
    assert server.requests == [("GET", "/apis/v2beta1/experiments")]


@pytest.mark.parametrize("namespace", ["", "kubeflow", "team-a"])
def test_server_that_never_answers_is_given_up_in_time(server, send, namespace):
    server.silence.set()
    begun = time.monotonic()
    with pytest.raises(TemporaryError, match=f"KFP at {server.url} does not answer"):
        send(namespace=namespace, upload_version="v", timeout_seconds=(0.2, 0.2))
    assert time.monotonic() - begun < 5.0


def test_absent_server_is_a_temporary_error_of_one_line(server, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    server.close()
    assert main(["submit", "--package", str(GOLDEN), "--host", server.url]) == 3
    told = capsys.readouterr().err
    assert re.fullmatch(rf"error: KFP at {server.url} does not answer: .*\n", told)


@pytest.mark.parametrize(("status", "kind"), [(500, TemporaryError), (503, TemporaryError), (403, PermanentError)])
def test_servers_refusal_is_quoted(server, send, status, kind):
    server.failure = status
    with pytest.raises(kind, match=f"answered {status} .*as the test says"):
        send()


def test_unknown_parameter_is_refused_before_anything_is_sent(server, send):
    with pytest.raises(ContractError, match="parameter min_acu is unknown, expected some of accept_inconclusive, "):
        send(parameters={"min_acu": 0.7}, upload_version="v")
    assert server.requests == []


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read: No such file"), ("", "is no compiled pipeline"), ("a: [", "is no compiled pipeline")],
)
def test_file_that_is_no_compiled_pipeline_is_refused(server, send, tmp_path, content, words):
    package = tmp_path / "a package.yaml"
    if content is not None:
        package.write_text(content)
    with pytest.raises(ContractError, match=f"a package.yaml {words}"):
        send(package)
    assert server.requests == []


def test_nothing_is_written_into_the_home(server, send, tmp_path):
    send(upload_version="v")
    assert list(tmp_path.rglob("*.json")) == []
    assert json.dumps(server.runs[0]["body"]["runtime_config"].get("parameters", {})) == "{}"
