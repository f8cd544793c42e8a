"""Tests of submitting through the real kfp client, against an HTTP double of the KFP API."""

import hashlib
import json
import re
import time
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from cli.__main__ import main
from cli.runs import print_runs, read_runs
from components.run_outcome.component import run_outcome
from evergreen.registry.runs import (
    RunOutcome,
    kubeflow_name,
    read_outcomes,
    step_note,
    store_name,
    write_outcome,
)
from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.runtime.kubeflow import EXPERIMENT, SERVICE_ACCOUNT, KubeflowServer, wait
from pipelines import submit
from pipelines.images import ENVIRONMENT_OF_STEP
from pipelines.package import read_parameters, with_locations
from pipelines.retraining import PIPELINE_NAME
from pipelines.submit import RunRequest
from tests.support.errors import raises
from tests.support.kfp_server import KfpServer
from tests.support.yaml_texts import documents

GOLDEN = Path(__file__).parent / "golden" / "retraining.yaml"


@pytest.fixture
def server():
    double = KfpServer()
    yield double
    double.close()


@pytest.fixture
def send(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(
        package=GOLDEN,
        *,
        parameters=MappingProxyType({}),
        upload_version="",
        namespace="",
        timeout_seconds=(2.0, 2.0),
    ) -> str:
        texts = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in parameters.items()
        }
        read = read_parameters(package, [f"{name}={text}" for name, text in texts.items()])
        target = KubeflowServer(server.url, namespace=namespace, timeout_seconds=timeout_seconds)
        source = submit.upload(target, package, upload_version) if upload_version else package
        return submit.start(target, RunRequest(source=source, parameters=read), name="one")

    return make


@pytest.fixture
def kfp(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return KubeflowServer(server.url, timeout_seconds=(2.0, 2.0))


@pytest.fixture
def command(server, tmp_path, monkeypatch):
    """Runs `evergreen submit` with further arguments, and returns its exit code."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*words: str, package=GOLDEN) -> int:
        return main(["submit", "--package", str(package), "--host", server.url, *words])

    return run


def version_names(server) -> list[str]:
    return [version["display_name"] for version in server.versions]


def test_run_is_created_in_experiment_with_its_parameters(server, send):
    parameters = {
        "settings": "gate.min_auc=0.7 training.passes=2",
        "parent": "none",
        "window_end": "",
    }
    run_id = send(parameters=parameters)
    (run,), (experiment,) = server.runs, server.experiments
    assert run_id == run["run_id"]
    assert experiment["display_name"] == EXPERIMENT
    assert run["experiment_id"] == experiment["experiment_id"]
    assert run["body"]["runtime_config"]["parameters"] == parameters
    spec, platform = documents(GOLDEN.read_text())
    assert run["body"]["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}


def test_first_upload_makes_pipeline_and_later_ones_only_versions(server, send):
    send(upload_version="3f2a9c1")
    send(upload_version="9c13f2a")
    (pipeline,) = server.pipelines
    assert pipeline["display_name"] == PIPELINE_NAME
    assert version_names(server) == [PIPELINE_NAME, "3f2a9c1", "9c13f2a"]
    assert {version["pipeline_id"] for version in server.versions} == {"p1"}
    assert set(server.uploads) == {GOLDEN.read_bytes()}
    references = [run["body"]["pipeline_version_reference"] for run in server.runs]
    assert references == [
        {"pipeline_id": "p1", "pipeline_version_id": version} for version in ("v2", "v3")
    ]


def test_existing_version_of_same_content_is_used_and_not_sent_again(server, kfp, caplog):
    caplog.set_level("INFO")
    first = submit.upload(kfp, GOLDEN, "3f2a9c1")
    assert submit.upload(kfp, GOLDEN, "3f2a9c1") == first
    assert version_names(server) == [PIPELINE_NAME, "3f2a9c1"]
    assert "version 3f2a9c1 exists already and is used" in caplog.text


def test_version_name_of_another_file_is_refused_and_starts_no_run(server, send, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(GOLDEN.read_text().replace("defaultValue: current", "defaultValue: none"))
    send(upload_version="same")
    with raises(PermanentError, "version same", "other content"):
        send(other, upload_version="same")
    assert len(server.runs) == 1
    assert version_names(server) == [PIPELINE_NAME, "same"]


def test_upload_is_named_by_revision_of_its_images(server, command, tmp_path, capsys):
    package = tmp_path / "retraining.yaml"
    assert (
        main(
            [
                "compile",
                "--output",
                str(package),
                "--tag",
                "3f2a9c1",
                "--registry",
                "localhost:5000/p",
            ]
        )
        == 0
    )
    assert "store /evergreen/store" in capsys.readouterr().out
    assert command("--upload", "--no-run", package=package) == 0
    assert server.versions[-1]["display_name"] == "3f2a9c1"
    assert capsys.readouterr().out.strip() == server.versions[-1]["pipeline_version_id"]
    assert server.runs == server.experiments == []


def test_version_shows_folders_and_servers_of_its_runs_in_kubeflow(server, command):
    assert command("--upload-version", "v1", "--no-run") == 0
    digest = hashlib.sha256(GOLDEN.read_bytes()).hexdigest()
    assert server.versions[-1]["description"] == (
        f"sha256:{digest} lake /evergreen/lake, store /evergreen/store, work /evergreen/work, "
        "served by onnxruntime on cpu"
    )
    assert command("--upload-version", "v1", "--no-run") == 0, (
        "an upload of the same content must succeed"
    )


def test_upload_of_images_without_revision_needs_name(server, command, capsys):
    assert command("--upload") == 2
    assert "have tag dev, expected one revision" in capsys.readouterr().err
    assert server.requests == []


def test_experiment_is_that_of_monitor_so_that_it_sees_runs_of_persons(server, command):
    from monitoring.retraining.triggers import KubeflowSettings

    assert command() == 0
    assert [each["display_name"] for each in server.experiments] == [
        KubeflowSettings.kubeflow_experiment
    ]
    assert server.runs[0]["body"]["service_account"] == SERVICE_ACCOUNT


def test_schedule_runs_one_version_at_a_time_and_catches_up_only_last_run(server, command, capsys):
    assert (
        command(
            "--upload-version",
            "3f2a9c1",
            "--recurring",
            "0 30 3 * * *",
            "--set",
            "training.passes=2",
        )
        == 0
    )
    (schedule,) = server.schedules
    assert capsys.readouterr().out.strip() == schedule["recurring_run_id"]
    assert schedule["trigger"] == {"cron_schedule": {"cron": "0 30 3 * * *"}}
    assert (schedule["max_concurrency"], schedule["no_catchup"], schedule["mode"]) == (
        1,
        True,
        "ENABLE",
    )
    assert schedule["pipeline_version_reference"] == {
        "pipeline_id": "p1",
        "pipeline_version_id": "v2",
    }
    parameters = {"settings": "training.passes=2", "trigger_reason": "schedule 0 30 3 * * *"}
    assert schedule["runtime_config"]["parameters"] == parameters
    assert server.runs == []


def test_schedule_replaces_one_of_same_name_and_no_other(server, command):
    assert command("--recurring", "0 0 3 * * *", "--upload-version", "first") == 0
    server.create_schedule({**server.schedules[0], "display_name": "someone else's"})
    assert command("--recurring", " 0 0  4 * * *", "--upload-version", "first") == 0
    assert {s["recurring_run_id"]: s["display_name"] for s in server.schedules} == {
        "s2": "someone else's",
        "s3": PIPELINE_NAME,
    }


def test_schedule_that_new_one_could_not_replace_is_still_there(server, command):
    assert command("--recurring", "0 0 3 * * *") == 0
    assert command("--recurring", "0 0 x;y * * *") == 3
    assert [schedule["recurring_run_id"] for schedule in server.schedules] == ["s1"]


@pytest.mark.parametrize("cron", ["0 3 * * *", "@daily", "0 0 3 * * * 2026"])
def test_schedule_without_six_fields_is_refused_before_anything_is_sent(
    server, command, cron, capsys
):
    # With five fields, the KFP server would run the pipeline every hour.
    assert command("--recurring", cron) == 2
    assert "expected 6: second, minute, hour, day, month, weekday" in capsys.readouterr().err
    assert server.requests == []


def test_upload_without_work_is_refused(server, command, capsys):
    assert command("--no-run") == 2
    assert "the command would do nothing" in capsys.readouterr().err
    assert server.requests == []


def run_through(server, kfp, states, *, seconds=60.0):
    """Wait for a run whose state changes at each poll to the next of `states`."""
    run_id = submit.start(kfp, RunRequest(source=GOLDEN, parameters={}), name="one")
    left = list(states)

    def next_state(_seconds: float) -> None:
        server.runs[0]["state"] = left.pop(0)

    next_state(0.0)
    ended = wait(kfp, run_id, seconds=seconds, poll_seconds=0.0, sleep=next_state)
    assert left == ["never looked at"]
    return ended


def test_waiting_ends_when_run_succeeds(server, kfp):
    states = ["PENDING", "RUNNING", "PAUSED", "RUNNING", "SUCCEEDED", "never looked at"]
    assert run_through(server, kfp, states).state == "SUCCEEDED"


@pytest.mark.parametrize("state", ["FAILED", "CANCELED", "SKIPPED"])
def test_waiting_ends_when_run_ends_otherwise(server, kfp, state):
    run = run_through(server, kfp, ["RUNNING", "CANCELING", state, "never looked at"])
    assert (run.run_id, run.state) == (server.runs[0]["run_id"], state)


def test_token_is_read_again_at_each_request(server, command, tmp_path, capsys):
    token = tmp_path / "a token"
    server.token = "first"
    token.write_text("first")
    assert command("--token-file", str(token)) == 0
    server.token = "second"
    assert command("--token-file", str(token)) == 3
    assert "answered 401" in capsys.readouterr().err
    token.write_text("second")
    assert command("--token-file", str(token)) == 0


def test_multi_user_installation_gets_its_namespace(server, send):
    with raises(PermanentError, "shouldn't contain a namespace"):
        send(namespace="team-a")
    assert server.requests == [("GET", "/apis/v2beta1/experiments")]


def test_server_that_never_answers_is_abandoned_in_time(server, send):
    server.silence.set()
    begun = time.monotonic()
    with raises(TemporaryError, f"KFP at {server.url}", "does not answer"):
        send(upload_version="v", timeout_seconds=(0.2, 0.2))
    assert time.monotonic() - begun < 60.0  # kfp's client would wait forever


def test_run_whose_answer_is_lost_is_found_and_not_started_twice(server, send):
    server.add_run("one", "RUNNING", "e1")
    server.lost.append(("POST", "/runs"))
    assert send() == server.runs[-1]["run_id"]
    assert len(server.runs) == 2, "the second run of this name is older"


def test_run_created_after_submit_gave_up_is_announced_without_files(server, send):
    server.num_late = 1
    with raises(TemporaryError, "may still create", "'one'"):
        send()
    second = send()
    (late,) = server.commit_late()
    names = {store_name("one", "", run_id) for run_id in (second, late["run_id"])}
    assert len(names) == len(server.named("one")) == 2


@pytest.mark.parametrize(("status", "kind"), [(503, TemporaryError), (400, PermanentError)])
def test_servers_refusal_is_quoted(server, send, status, kind):
    server.failure = status
    with raises(kind, f"answered {status}", "as the test says"):
        send()


def leave_end(store, run: str, state: str, step: str, reason: str) -> None:
    """Write the notes and the outcome that a run's steps and its exit handler write."""
    with step_note(store, run, step):
        pass
    ended_at = datetime.now(timezone.utc).isoformat()
    fields = {"state": state, "step": step, "reason": reason, "version": None, "ended_at": ended_at}
    write_outcome(store, RunOutcome(run=run, trigger_id="", **fields))


def waiting_as(server, ends):
    """Return a replacement for `wait` that first calls `ends` with the newest run."""

    def wait_for(kfp, run_id, **_):
        ends(server.runs[-1])
        return wait(kfp, run_id, seconds=0.0)

    return wait_for


@pytest.fixture
def mounted(tmp_path):
    """A compiled pipeline whose registry is on this machine."""
    package = tmp_path / "mounted.yaml"
    package.write_text(with_locations(GOLDEN, {"store": str(tmp_path)}))
    return package


def test_run_with_wait_reports_its_results(server, command, mounted, tmp_path, monkeypatch, capsys):
    def ends(run):
        leave_end(
            tmp_path,
            store_name(run["display_name"], "", run["run_id"]),
            "refused",
            "evaluation",
            "auc fell",
        )
        server.end(run, "SUCCEEDED")

    monkeypatch.setattr("cli.pipeline.wait", waiting_as(server, ends))
    assert command("--wait", package=mounted) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "refused at evaluation: auc fell"
    assert re.fullmatch(r"manual \d{4}-\d\d-\d\d \d\d:\d\d by \S+", server.runs[0]["display_name"])
    assert re.fullmatch(
        r"no reason given; requested by \S+@\S+; recommender current", server.runs[0]["description"]
    )
    monkeypatch.setattr(
        "cli.pipeline.wait", waiting_as(server, lambda run: server.end(run, "SUCCEEDED"))
    )
    assert command("--wait") == 0
    assert "`evergreen runs --store /evergreen/store` shows run manual " in capsys.readouterr().out


def test_failed_run_that_is_waited_for_names_step_reason_and_page(
    server, command, mounted, tmp_path, monkeypatch, capsys
):
    def ends(run):
        leave_end(
            tmp_path,
            store_name(run["display_name"], "", run["run_id"]),
            "failed",
            "deployment",
            "disk is full",
        )
        tasks = {
            "condition_3": "FAILED",
            "deployment": "FAILED",
            "executor": "FAILED",
            "training": "SUCCEEDED",
        }
        server.end(run, "FAILED", **tasks)

    monkeypatch.setattr("cli.pipeline.wait", waiting_as(server, ends))
    assert command("--wait", package=mounted) == 3
    run_id = server.runs[0]["run_id"]
    output = capsys.readouterr().err
    assert (
        f"run {run_id} ended FAILED: deployment failed; deployment: disk is full; see "
        f"{server.url}/#/runs" in output
    )
    assert output.rstrip().endswith(f"/details/{run_id}")


def test_run_with_failed_root_driver_reports_that_no_step_ran(server, command, monkeypatch, capsys):
    """The server accepts a service account that does not exist, and gives no message."""

    def ends(run):
        server.end(run, "FAILED", root_driver="FAILED", **{"evergreen_retraining_x7k2p": "FAILED"})

    monkeypatch.setattr("cli.pipeline.wait", waiting_as(server, ends))
    assert command("--wait", "--service-account", "nobody") == 3
    expected = (
        "ended FAILED: no step ran; root-driver failed; expected service account nobody to exist"
    )
    assert expected in capsys.readouterr().err


def test_listing_names_failed_runs_that_left_no_file_in_registry(server, command, tmp_path, capsys):
    """Kubeflow starts no exit handler after a failed root driver or for a lost account."""
    assert command("--upload-version", "v", "--recurring", "0 0 3 * * *") == 0
    lost, with_files = server.fire("s1"), server.fire("s1")
    server.end(lost, "FAILED", root_driver="FAILED")
    server.end(with_files, "FAILED", extraction="FAILED", executor="FAILED")
    leave_end(
        tmp_path,
        store_name("", with_files["display_name"], with_files["run_id"]),
        "failed",
        "extraction",
        "disk is full",
    )
    capsys.readouterr()
    assert main(["runs", "--store", str(tmp_path), "--host", server.url]) == 0
    failed, last = capsys.readouterr().out.splitlines()[-2:]
    assert failed == f"{with_files['display_name']} failed at extraction: disk is full"
    assert last.startswith(
        f"{lost['display_name']} failed and wrote nothing to the model registry: run "
        f"{lost['run_id']} ended FAILED: no step ran"
    )
    assert last.endswith(f"see {server.url}/#/runs/details/{lost['run_id']}")
    assert main(["runs", "--store", str(tmp_path), "--host", server.url, "--json"]) == 2


@pytest.mark.parametrize("source", ["uploaded", "compiled"])
def test_run_of_schedule_has_kubeflows_name_in_store(server, command, tmp_path, source):
    """Kubeflow fills in a schedule's template before it creates and names a run.

    The UI creates a schedule from an uploaded pipeline.
    """
    assert (
        command(
            *(["--upload-version", "v"] if source == "uploaded" else []),
            "--recurring",
            "0 0 3 * * *",
        )
        == 0
    )
    run = server.fire("s1")
    constants = server.constants(run)
    for step in ENVIRONMENT_OF_STEP:
        given = constants[step.replace("_", "-")]
        name = store_name(given["run"], given["run_resource"], given["run_id"])
        assert kubeflow_name(name) == (run["display_name"], run["run_id"][:8]), step
    given = constants["run-outcome"]
    fields = {
        "store": tmp_path.as_uri(),
        "trigger_id": "",
        "trigger_reason": "",
        "status": SimpleNamespace(state="FAILED"),
    }
    run_outcome.python_func(**{**given, **fields})
    assert [kubeflow_name(each.run)[0] for each in read_outcomes(tmp_path)] == [run["display_name"]]


@pytest.mark.parametrize(
    "name", ["weekly", "", "a/b", "../..", "~", "a~3011424b", "50 %2F *[x]?", "週次" * 120, "\n"]
)
def test_two_runs_of_one_name_keep_their_files_apart(tmp_path, name):
    ids = ["3011424b-cce0-40c0-bea8-f11f49badc9c", "fd2f3b12-cbc4-4269-8a36-7ea68e992f9e"]
    runs = [store_name(name, "workflow-x7k2p", run_id) for run_id in ids]
    for run, state in zip(runs, ("failed", "released")):
        leave_end(tmp_path, run, state, "extraction", "")
    assert [each.state for each in read_outcomes(tmp_path)] == ["failed", "released"]
    shown = {line.name for line in read_runs(tmp_path)}
    assert len(shown) == 1
    assert (name or "workflow-x7k2p").startswith(shown.pop())
    assert {path.parent for path in (tmp_path / "runs").iterdir()} == {tmp_path / "runs"}


def test_listing_shows_which_run_left_out_files(tmp_path, capsys):
    for run, num in (("a", 0), ("b", 2)):
        with step_note(tmp_path, run, "extraction") as note:
            note.facts = {"quarantined_files": num}
    print_runs(tmp_path)
    warning = "left out 2 unreadable files, which its validation report names"
    assert [line for line in capsys.readouterr().out.splitlines() if "left out" in line] == [
        f"b {warning}"
    ]


def test_listing_shows_kubeflows_name_and_begin_of_its_id(tmp_path, capsys):
    leave_end(
        tmp_path,
        store_name("weekly 3/4", "x", "3011424b-cce0-40c0-bea8-f11f49badc9c"),
        "failed",
        "training",
        "no space",
    )
    print_runs(tmp_path)
    head, line, reason = capsys.readouterr().out.splitlines()
    assert reason == "weekly 3/4 failed at training: no space"
    assert head.split()[:4] == ["started", "run", "id", "state"]
    assert re.search(r"  weekly 3/4  3011424b  failed  training  ", line)
