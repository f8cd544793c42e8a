"""The Kubeflow trigger through the real kfp client against an HTTP double of the KFP API."""

from __future__ import annotations

import pytest

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.runtime.kubeflow import ACTIVE_STATES
from components.store.runs import RunOutcome, write_outcome
from monitoring.acting.kubeflow_trigger import KubeflowSettings, KubeflowTrigger
from tests.support.kfp_server import KfpServer
from tests.support.monitors import retrain_request as request


@pytest.fixture
def server():
    double = KfpServer()
    double.pipelines = [{"pipeline_id": "p", "display_name": "ours"}]
    double.versions = [{"pipeline_id": "p", "pipeline_version_id": "v1", "display_name": "old"}]
    yield double
    double.close()


@pytest.fixture
def connect(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(timeout_seconds=(2.0, 2.0), **changes) -> KubeflowTrigger:
        values = {"kubeflow_host": server.url, "pipeline_name": "ours"}
        settings = KubeflowSettings(**{**values, "pipeline_arguments": '{"store": "/mnt/store"}', **changes})
        return KubeflowTrigger(settings, store=tmp_path / "store", timeout_seconds=timeout_seconds)

    return make


def test_a_request_becomes_a_run_of_its_name_with_its_parameters(server, connect):
    assert connect().submit(request("drift-1")) == "started"
    (run,) = server.runs
    assert run["display_name"] == "drift-1"
    parameters = run["body"]["runtime_config"]["parameters"]
    assert parameters == {"store": "/mnt/store", **request("drift-1").pipeline_arguments()}
    assert [each["display_name"] for each in server.experiments] == ["evergreen-retraining"]


def test_a_pipeline_named_is_found_at_each_request_and_runs_in_its_newest_version(server, connect):
    server.pipelines.append({"pipeline_id": "p0", "display_name": "another"})
    server.versions.append({"pipeline_id": "p0", "pipeline_version_id": "v0", "display_name": "theirs"})
    trigger = connect()
    assert trigger.submit(request("a")) == "started"
    server.runs[0]["state"] = "SUCCEEDED"
    server.versions.append({"pipeline_id": "p", "pipeline_version_id": "v2", "display_name": "new"})
    assert trigger.submit(request("b")) == "started"
    references = [run["body"]["pipeline_version_reference"] for run in server.runs]
    assert references == [{"pipeline_id": "p", "pipeline_version_id": version} for version in ("v1", "v2")]


def test_a_pipeline_that_is_not_there_or_twice_is_a_permanent_error(server, connect):
    trigger = connect()
    server.pipelines.clear()
    with pytest.raises(PermanentError, match="pipeline ours is not on the server"):
        trigger.submit(request("a"))
    server.pipelines = [{"pipeline_id": each, "display_name": "ours"} for each in "pq"]
    with pytest.raises(PermanentError, match="2 pipelines are named ours"):
        trigger.submit(request("a"))
    assert server.runs == []


@pytest.mark.parametrize("account", ["evergreen-pipeline", ""])
def test_a_run_acts_under_the_service_account_of_the_settings(server, connect, account):
    connect(kubeflow_service_account=account).submit(request("a"))
    assert server.runs[0]["body"].get("service_account", "") == account


@pytest.mark.parametrize("state", ["RUNNING", "PAUSED"])
def test_any_active_run_of_the_experiment_is_busy(server, connect, state):
    trigger = connect()
    trigger.submit(request("first"))
    server.runs[0]["state"] = state
    assert trigger.submit(request("second")) == "busy"
    assert len(server.runs) == 1


@pytest.mark.parametrize("state", ["RUNNING", "SUCCEEDED", "SKIPPED"])
def test_a_run_of_the_same_name_is_not_started_again(server, connect, state):
    trigger = connect()
    trigger.submit(request("a"))
    server.runs[0]["state"] = state
    assert trigger.submit(request("a")) == "already"
    assert len(server.runs) == 1


@pytest.mark.parametrize("state", ["FAILED", "CANCELED"])
def test_a_dead_run_of_the_same_name_may_be_repeated(server, connect, state):
    trigger = connect()
    trigger.submit(request("a"))
    server.runs[0]["state"] = state
    assert trigger.submit(request("a")) == "started"
    assert trigger.state("a").state == "running"


def test_runs_of_other_experiments_do_not_make_it_busy(server, connect):
    server.add_run("someone else's", "RUNNING", experiment_id="another")
    assert connect().submit(request("a")) == "started"


def test_a_run_beyond_the_first_page_is_seen(server, connect):
    trigger = connect()
    trigger.submit(request("a"))
    server.runs[0]["state"] = "FAILED"
    for state in ("FAILED", "FAILED", "CANCELED", "RUNNING"):
        server.add_run("a", state)
    assert trigger.submit(request("a")) == "already"


@pytest.mark.parametrize(
    ("state", "expected"),
    [("SUCCEEDED", "released"), ("FAILED", "failed"), ("CANCELED", "failed"), ("SKIPPED", "failed")]
    + [(state, "running") for state in ACTIVE_STATES if state != "RUNTIME_STATE_UNSPECIFIED"],
)
def test_run_states_are_translated(server, connect, state, expected):
    trigger = connect()
    trigger.submit(request("a"))
    server.runs[0]["state"] = state
    assert trigger.state("a").state == expected


def test_a_successful_run_whose_gate_refused_is_reported_from_a_release(server, connect, tmp_path):
    trigger = connect()
    trigger.submit(request("a"))
    outcome = {"run": "r", "trigger_id": "a", "step": "evaluation", "reason": "auc fell", "version": None}
    write_outcome(tmp_path / "store", RunOutcome(**outcome, state="refused", ended_at="2026-01-01"))
    assert trigger.state("a").state == "running"
    server.runs[0]["state"] = "SUCCEEDED"
    assert trigger.state("a") == ("refused", "evaluation: auc fell", None)


def test_an_outcome_that_cannot_be_read_is_an_error_of_ours(server, connect, tmp_path):
    trigger = connect()
    trigger.submit(request("a"))
    server.runs[0]["state"] = "SUCCEEDED"
    (tmp_path / "store" / "runs" / "r").mkdir(parents=True)
    (tmp_path / "store" / "runs" / "r" / "outcome.json").write_text("{torn")
    with pytest.raises(PermanentError, match="reading the outcome of a: "):
        trigger.state("a")


@pytest.mark.parametrize("status", [401, 403, 409, 429, 500, 503])
def test_a_server_in_trouble_is_a_temporary_error(server, connect, status):
    server.failure = status
    with pytest.raises(TemporaryError, match=f"submitting a: KFP at .* answered {status}"):
        connect().submit(request("a"))


def test_a_refused_request_is_a_permanent_error(server, connect):
    server.failure = 400
    with pytest.raises(PermanentError, match="KFP at .* answered 400"):
        connect().submit(request("a"))


@pytest.mark.parametrize("text", ["not json", "[]"])
def test_arguments_that_are_no_object_are_refused(connect, text):
    with pytest.raises(ContractError, match="pipeline_arguments is"):
        connect(pipeline_arguments=text)


def test_a_run_that_was_cancelled_by_hand_counts_as_failed_at_its_end_and_not_before(server, connect):
    trigger = connect()
    trigger.submit(request("a"))
    trigger._server.client.terminate_run(server.runs[0]["run_id"])
    assert trigger.state("a") == ("running", "it is CANCELING", None)
    server.runs[0]["state"] = "CANCELED"
    assert trigger.state("a").state == "failed"


def test_an_experiment_that_vanished_leaves_the_run_unknown_and_is_not_made_anew(server, connect):
    trigger = connect()
    trigger.submit(request("a"))
    server.experiments.clear()
    server.runs.clear()
    assert trigger.state("a") == ("unknown", "the server has no experiment evergreen-retraining any more", None)
    assert server.experiments == []


@pytest.mark.parametrize(("other", "answer"), [("a", "already"), ("b", "busy")])
def test_of_two_runs_created_at_the_same_time_only_the_first_stays(server, connect, other, answer):
    """A replica that was frozen after its checks wakes up and creates its run after its successor's."""
    stale, leader = connect(), connect()

    def the_leader_is_faster(body):
        server.before_create = lambda body: None
        assert leader.submit(request(other)) == "started"

    server.before_create = the_leader_is_faster
    assert stale.submit(request("a")) == answer
    assert [(run["display_name"], run["state"]) for run in server.runs] == [(other, "PENDING"), ("a", "CANCELING")]
    server.runs[1]["state"] = "CANCELED"
    assert leader.state(other).state == "running"
    server.runs[0]["state"] = "SUCCEEDED"
    assert leader.state(other).state == "released"
