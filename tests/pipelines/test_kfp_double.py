"""Tests that the KFP API test double answers like a real server 2.17.0.

`kfp_answers.json` has the real server's requests and answers. Long messages are cut with `...`.
"""

import json
import re
import shlex
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from testing.paths import REPOSITORY
from tests.support.kfp_server import ErrorAnswer, KfpServer

RECORDED = (REPOSITORY / "tests" / "support" / "kfp_answers.json").read_text()
# The recorded answers contain the former parameter `lake`, which is replaced by a parameter of the
# current pipeline.
ANSWERS = json.loads(re.sub(r'lake(\\?":)', r"settings\1", RECORDED))
GOLDEN = REPOSITORY / "tests" / "pipelines" / "golden" / "retraining.yaml"
NAMED = ("state", "storage_state", "status", "mode", "multi_user", "code")
"""Fields whose values the client interprets as names."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
PIPELINE, VERSION = "1e8ee6d8-6ebd-4144-b74a-34442b31cbfe", "40e53d70-9e4e-4bb4-9719-87410144386e"
ENDED, NEVER = "ba6d12df-9927-4382-a9c6-0c030e8c8ff3", "00000000-0000-0000-0000-000000000000"
ASKED = [name for name, answer in ANSWERS.items() if not answer["request"].startswith("GET ")]


def call(
    url: str, method: str = "GET", body: bytes | None = None, kind: str = "application/json"
) -> tuple[int, dict]:
    request = urllib.request.Request(
        url.replace(" ", "%20"), body, {"Content-Type": kind}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def upload(url: str, path: Path) -> tuple[int, dict]:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="uploadfile"; filename="f"\r\n\r\n'
        + path.read_bytes()
    )
    return call(url, "POST", form + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")


@pytest.fixture
def server():
    """A test double with the objects that the recorded requests refer to.

    The test double has its own ids.
    """
    double = KfpServer()
    double.api = f"{double.url}/apis/v2beta1"
    for name in (
        "pipelines/upload?name=evergreen-retraining",
        "pipelines/upload_version?name=kfp2&pipelineid=p1",
    ):
        assert upload(f"{double.api}/{name}&description=sha256:f7", GOLDEN)[0] == 200
    assert (
        upload(
            f"{double.api}/pipelines/upload_version?name=third&pipelineid=p1&description=sha256:f8",
            GOLDEN,
        )[0]
        == 200
    )
    double.runs.append({**double.add_run("ended", "SUCCEEDED"), "run_id": ENDED})
    yield double
    double.close()


def fields(value) -> object:
    """Return the form of an answer: its fields, the kinds of their values, and the names of states.

    A compiled pipeline is treated as a single value, whose fields are not listed.
    """
    if isinstance(value, dict):
        plain = {"pipeline_spec": lambda _: "a pipeline"} | dict.fromkeys(NAMED, lambda each: each)
        return {key: plain.get(key, fields)(each) for key, each in sorted(value.items())}
    return [fields(value[0])] if isinstance(value, list) and value else type(value).__name__


def refuse(status: int, text: str):
    def raises(*_):
        raise ErrorAnswer(status, text)

    return raises


def changed(**values):
    return lambda answer, *given: {**answer(*given), **values}


@pytest.mark.parametrize("name", ASKED)
def test_double_answers_like_real_server(server, name):
    compare(server, name)


@pytest.mark.parametrize(
    ("name", "method", "otherwise"),
    [
        ("create_bad_version", "check_version", refuse(404, "version not found")),
        ("create_bad_version", "check_version", refuse(500, "internal server error")),
        ("create_bad_version", "check_version", lambda *_: None),
        ("create_bad_account", "create_run", refuse(400, "account nobody does not exist")),
        ("create_bad_account", "create_run", changed(state="FAILED")),
        ("create_bad_account", "create_run", changed(state="Pending")),
        ("create_bad_account", "create_run", changed(error={"message": "no such account"})),
        ("create_empty_name", "create_run", refuse(400, "Run name cannot be empty")),
        ("create_unknown_parameter", "check_parameters", lambda *_: None),
        ("terminate_ended", "change_run", lambda *_: {}),
        ("run_absent", "change_run", refuse(404, "no run")),
        ("recurring_five_fields", "create_schedule", refuse(400, "six fields are expected")),
        ("runs_filter", "page", lambda *_: {"runs": [], "total_size": 0}),
        ("versions", "list_versions", lambda *_: {}),
    ],
)
def test_double_with_other_answers_would_be_found(server, monkeypatch, name, method, otherwise):
    answer = getattr(server, method)
    monkeypatch.setattr(server, method, lambda *given: otherwise(answer, *given))
    with pytest.raises(AssertionError):
        compare(server, name)


def test_run_that_ended_has_fields_and_states_of_real_one(server):
    recorded = ANSWERS["run_failed"]["body"]
    body = {"display_name": "weekly", "service_account": "evergreen-pipeline"}
    body |= {"pipeline_version_reference": {"pipeline_id": "p1", "pipeline_version_id": "v2"}}
    made = call(f"{server.api}/runs", "POST", json.dumps(body).encode())[1]
    (run,) = server.named("weekly")
    server.end(
        run, "FAILED", deployment="FAILED", root="FAILED", training="SUCCEEDED", executor="FAILED"
    )
    shown = call(f"{server.api}/runs/{made['run_id']}")[1]
    assert [each["state"] for each in shown["state_history"]] == [
        each["state"] for each in recorded["state_history"]
    ]
    tasks = {
        each["display_name"]: each["state"] for each in shown.pop("run_details")["task_details"]
    }
    there = {
        each.partition(": ")[0]: each.rpartition(" ")[2]
        for each in recorded["run_details"]["task_details"]
    }
    assert {name: there[name] for name in tasks if name != "executor"} == {
        name: state for name, state in tasks.items() if name != "executor"
    }
    assert fields(shown) == fields(
        {key: value for key, value in recorded.items() if key != "run_details"}
    )


def compare(server, name: str) -> None:
    """Send a recorded request to the test double, and assert that the answers are equal."""
    recorded = ANSWERS[name]
    text = recorded["request"].replace(PIPELINE, "p1").replace(VERSION, "v2")
    if "uploadfile=@" in text:
        path = GOLDEN if "retraining" in text else REPOSITORY / "README.md"
        status, body = upload(server.api + text.split()[2], path)
    elif text.startswith("-X POST"):
        words = shlex.split(text.partition(" -d ")[0])
        _, _, content = text.partition(" -d ")
        status, body = call(server.api + words[2], "POST", content.encode())
    else:
        status, body = call(server.api + text)
    assert status == recorded["status"]
    if status == 200:
        assert fields(body) == fields(recorded["body"])
        return
    expected = {key: str(value).removesuffix("...") for key, value in recorded["body"].items()}
    assert {
        key: UUID.sub("ID", str(value)[: len(expected[key])]) for key, value in body.items()
    } == {key: UUID.sub("ID", value) for key, value in expected.items()}


def test_double_lists_schedules_and_runs_like_real_server(server):
    recorded = ANSWERS["recurring_runs"]["body"]["recurringRuns"][0]
    requested = {
        "display_name": "nightly",
        "max_concurrency": "1",
        "mode": "ENABLE",
        "no_catchup": True,
    }
    requested |= {
        "trigger": recorded["trigger"],
        "runtime_config": {"parameters": {"trigger_reason": "schedule"}},
    }
    requested |= {"pipeline_version_reference": {"pipeline_id": "p1", "pipeline_version_id": "v2"}}
    assert call(f"{server.api}/recurringruns", "POST", json.dumps(requested).encode())[0] == 200
    listed = call(f"{server.api}/recurringruns")[1]
    assert fields(listed) == fields(ANSWERS["recurring_runs"]["body"])
    server.runs.clear()
    run = server.fire("s1")
    server.end(run, "FAILED")
    (shown,) = call(f"{server.api}/runs?sort_by=created_at desc&page_size=3")[1]["runs"]
    expected = ANSWERS["runs_list"]["body"]["runs"][0]
    assert fields({key: value for key, value in shown.items() if key != "run_details"}) == fields(
        expected
    )
    assert [each["state"] for each in shown["state_history"]] == [
        each["state"] for each in expected["state_history"]
    ]
    for each in (shown, expected):
        assert re.fullmatch(r"evergreen-retraining\w+-1-\d+", each["display_name"])


@pytest.mark.parametrize("name", ["run_failed", "run_refused", "run_succeeded"])
def test_runs_tasks_have_names_that_its_end_is_read_by(name):
    """`describe_end` distinguishes steps, drivers and groups of tasks by the names of tasks."""
    from types import SimpleNamespace

    from evergreen.runtime.kubeflow import describe_end

    body = ANSWERS[name]["body"]
    tasks = [each.partition(": ") for each in body["run_details"]["task_details"]]
    details = [
        SimpleNamespace(display_name=task, state=states.split(" > ")[-1])
        for task, _, states in tasks
    ]
    run = SimpleNamespace(run_id="r", state=body["state"], service_account="a", error=None)
    run.run_details = SimpleNamespace(task_details=details)
    ended = {"run_failed": "FAILED: deployment failed"}.get(name, "SUCCEEDED")
    assert describe_end(run) == f"run r ended {ended}"
