"""Tests of the Kubeflow trigger, with the real kfp client and a test double of the KFP server."""

import pytest

from evergreen.registry.runs import RunOutcome, store_name, write_outcome
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.runtime.kubeflow import ACTIVE_STATES
from monitoring.retraining.triggers import KubeflowSettings, KubeflowTrigger
from tests.support.errors import raises
from tests.support.monitors import retrain_request as request


@pytest.fixture
def connect(kubeflow, tmp_path):
    def make(timeout_seconds=(2.0, 2.0), **changes) -> KubeflowTrigger:
        values = {"kubeflow_host": kubeflow.url, "pipeline_name": "ours"}
        settings = KubeflowSettings(
            **{**values, "pipeline_arguments": '{"settings": "training.seed=7"}', **changes}
        )
        return KubeflowTrigger(settings, store=tmp_path / "store", timeout_seconds=timeout_seconds)

    return make


def test_request_becomes_run_of_its_name_with_its_parameters(kubeflow, connect):
    assert connect().submit(request("drift-1")) == "started"
    (run,) = kubeflow.runs
    assert run["display_name"] == "drift-1"
    parameters = run["body"]["runtime_config"]["parameters"]
    assert parameters == {"settings": "training.seed=7", **request("drift-1").pipeline_arguments()}
    assert [each["display_name"] for each in kubeflow.experiments] == ["evergreen-retraining"]


def test_run_has_readable_name_and_reason(kubeflow, connect):
    trigger = connect(pipeline_arguments='{"recommender": "3"}')
    for name, title in (
        ("drift-20261129T072200Z-v5", "drift 2026-11-29 07:22:00 v5"),
        ("drift-20261129T072200000001Z-v5-full", "drift 2026-11-29 07:22:00.000001 v5-full"),
    ):
        run_request = request(name)
        assert trigger.submit(run_request) == "started"
        assert kubeflow.runs[-1]["display_name"] == title
        assert (
            kubeflow.runs[-1]["description"]
            == f"{run_request.reason}; requested by the monitor as {name}; recommender 3"
        )
        assert trigger.submit(run_request) == "already"
        assert trigger.state(name).state == "running"
        kubeflow.runs[-1]["state"] = "SUCCEEDED"
        assert trigger.state(name).state == "released"


def test_named_pipeline_is_looked_up_each_time_and_runs_newest_version(kubeflow, connect):
    kubeflow.pipelines.append({"pipeline_id": "p0", "display_name": "another"})
    kubeflow.versions.append(
        {"pipeline_id": "p0", "pipeline_version_id": "v0", "display_name": "theirs"}
    )
    trigger = connect()
    assert trigger.submit(request("a")) == "started"
    kubeflow.runs[0]["state"] = "SUCCEEDED"
    kubeflow.versions.append(
        {"pipeline_id": "p", "pipeline_version_id": "v2", "display_name": "new"}
    )
    assert trigger.submit(request("b")) == "started"
    references = [run["body"]["pipeline_version_reference"] for run in kubeflow.runs]
    assert references == [
        {"pipeline_id": "p", "pipeline_version_id": version} for version in ("v1", "v2")
    ]


def test_version_uploaded_in_same_second_runs_and_is_named(kubeflow, connect, caplog):
    caplog.set_level("INFO")
    for number, name, description in (("v2", "3f2a9c1", "sha256:f7"), ("v3", "ours", None)):
        version = {"pipeline_id": "p", "pipeline_version_id": number, "display_name": name}
        kubeflow.versions.append(
            {**version, "created_at": "2026-01-01T00:00:07Z", "description": description}
        )
    assert connect().submit(request("a")) == "started"
    assert kubeflow.runs[0]["body"]["pipeline_version_reference"]["pipeline_version_id"] == "v2"
    assert "of pipeline version 3f2a9c1" in caplog.text


def test_absent_or_duplicate_pipeline_is_permanent_error(kubeflow, connect):
    trigger = connect()
    kubeflow.pipelines.clear()
    with raises(PermanentError, "pipeline ours", "not on the server"):
        trigger.submit(request("a"))
    kubeflow.pipelines = [{"pipeline_id": each, "display_name": "ours"} for each in "pq"]
    with raises(PermanentError, "2 pipelines", "ours"):
        trigger.submit(request("a"))
    assert kubeflow.runs == []


@pytest.mark.parametrize("account", ["evergreen-pipeline", ""])
def test_run_acts_under_service_account_of_settings(kubeflow, connect, account):
    connect(kubeflow_service_account=account).submit(request("a"))
    assert kubeflow.runs[0]["body"].get("service_account", "") == account


@pytest.mark.parametrize(
    ("state", "name", "answer"),
    [
        *((state, "b", "busy") for state in ("RUNNING", "PAUSED")),
        *((state, "a", "already") for state in ("RUNNING", "SUCCEEDED", "SKIPPED")),
        *((state, "a", "started") for state in ("FAILED", "CANCELED")),
    ],
)
def test_only_one_run_is_active_and_name_is_reused_only_for_dead_run(
    kubeflow, connect, state, name, answer
):
    trigger = connect()
    trigger.submit(request("a"))
    kubeflow.runs[0]["state"] = state
    assert trigger.submit(request(name)) == answer
    assert len(kubeflow.runs) == (2 if answer == "started" else 1)
    assert answer != "started" or trigger.state("a").state == "running"


def test_runs_of_other_experiments_do_not_make_it_busy(kubeflow, connect):
    kubeflow.add_run("someone else's", "RUNNING", experiment_id="another")
    assert connect().submit(request("a")) == "started"


def test_run_beyond_first_page_is_seen(kubeflow, connect):
    trigger = connect()
    trigger.submit(request("a"))
    kubeflow.runs[0]["state"] = "FAILED"
    for state in ("FAILED", "FAILED", "CANCELED", "RUNNING"):
        kubeflow.add_run("a", state)
    assert trigger.submit(request("a")) == "already"


@pytest.mark.parametrize(
    ("state", "expected"),
    [("SUCCEEDED", "released"), ("FAILED", "failed"), ("CANCELED", "failed"), ("SKIPPED", "failed")]
    + [(state, "running") for state in ACTIVE_STATES if state != "RUNTIME_STATE_UNSPECIFIED"],
)
def test_run_states_are_translated(kubeflow, connect, state, expected):
    trigger = connect()
    trigger.submit(request("a"))
    kubeflow.runs[0]["state"] = state
    found = trigger.state("a")
    text = f"it is {state}" if state in ("PAUSED", "CANCELING") else ""
    assert (found.state, found.reason) == (expected, text or found.reason)


def test_successful_run_whose_gate_refused_is_reported_from_release(kubeflow, connect, tmp_path):
    trigger = connect()
    trigger.submit(request("a"))
    run = store_name("a", "", kubeflow.runs[0]["run_id"])
    outcome = {
        "run": run,
        "trigger_id": "a",
        "step": "evaluation",
        "reason": "auc fell",
        "version": None,
    }
    write_outcome(tmp_path / "store", RunOutcome(**outcome, state="refused", ended_at="2026-01-01"))
    assert trigger.state("a").state == "running"
    kubeflow.runs[0]["state"] = "SUCCEEDED"
    assert trigger.state("a") == ("refused", "evaluation: auc fell", None)


def test_run_of_earlier_name_has_its_own_outcome(kubeflow, connect, tmp_path):
    trigger = connect()
    for state, kfp_state in (("failed", "FAILED"), ("refused", "SUCCEEDED")):
        trigger.submit(request("a"))
        run = store_name("a", "", kubeflow.runs[-1]["run_id"])
        fields = {
            "run": run,
            "trigger_id": "a",
            "step": "evaluation",
            "reason": state,
            "version": None,
        }
        write_outcome(tmp_path / "store", RunOutcome(**fields, state=state, ended_at="2026-01-01"))
        kubeflow.runs[-1]["state"] = kfp_state
        assert trigger.state("a") == (state, f"evaluation: {state}", None)


def test_release_remains_although_kubeflow_reports_its_run_as_failed(kubeflow, connect, tmp_path):
    trigger = connect()
    trigger.submit(request("a"))
    run = store_name("a", "", kubeflow.runs[0]["run_id"])
    fields = {
        "run": run,
        "trigger_id": "a",
        "step": "deployment",
        "reason": "version 3 is live",
        "version": 3,
    }
    write_outcome(tmp_path / "store", RunOutcome(**fields, state="released", ended_at="2026-01-01"))
    kubeflow.runs[0]["state"] = "FAILED"
    assert trigger.state("a") == ("released", "deployment: version 3 is live", 3)


def test_run_that_person_terminated_is_reported_as_terminated(kubeflow, connect, tmp_path):
    trigger = connect()
    trigger.submit(request("a"))
    run_id = kubeflow.runs[0]["run_id"]
    kubeflow.runs[0]["state"] = "CANCELED"
    assert trigger.state("a") == ("failed", f"run {run_id} was terminated by a person", None)
    fields = {
        "trigger_id": "a",
        "state": "failed",
        "step": "training",
        "reason": "saved at epoch 2",
        "version": None,
    }
    run = store_name("a", "", run_id)
    write_outcome(tmp_path / "store", RunOutcome(run=run, ended_at="2026-01-01", **fields))
    expected = f"run {run_id} was terminated by a person; training: saved at epoch 2"
    assert trigger.state("a") == ("failed", expected, None)


def test_run_without_first_pod_reports_that_no_step_ran(kubeflow, connect):
    trigger = connect()
    trigger.submit(request("a"))
    kubeflow.end(kubeflow.runs[0], "FAILED", root_driver="FAILED", root="FAILED")
    state, reason, _ = trigger.state("a")
    assert state == "failed"
    assert (
        "no step ran; root-driver failed; expected service account pipeline-runner to exist"
        in reason
    )


@pytest.mark.parametrize(
    "body",
    [
        "error fetching manifest: Failed to get a pipeline version with id 0: "
        "ResourceNotFoundError: PipelineVersion 0",
        "Failed to convert a API run detail: Invalid input error: Run name cannot be empty",
    ],
)
def test_refusal_that_server_calls_internal_error_is_not_repeated(kubeflow, connect, body):
    kubeflow.failure, kubeflow.failure_text = 500, body
    with raises(PermanentError, "answered 500"):
        connect().submit(request("a"))


def test_unreadable_outcome_is_permanent_error(kubeflow, connect, tmp_path):
    trigger = connect()
    trigger.submit(request("a"))
    kubeflow.runs[0]["state"] = "SUCCEEDED"
    folder = tmp_path / "store" / "runs" / store_name("a", "", kubeflow.runs[0]["run_id"])
    folder.mkdir(parents=True)
    (folder / "outcome.json").write_text("{torn")
    with raises(PermanentError, f"outcome of run {folder.name}"):
        trigger.state("a")


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, PermanentError), *((each, TemporaryError) for each in (401, 403, 409, 429, 500, 503))],
)
def test_server_error_is_temporary_and_refused_request_is_permanent(
    kubeflow, connect, status, error
):
    kubeflow.failure = status
    with raises(error, "submitting a", "KFP", status):
        connect().submit(request("a"))


@pytest.mark.parametrize("text", ["not json", "[]"])
def test_arguments_that_are_no_object_are_refused(connect, text):
    with raises(ContractError, "pipeline_arguments"):
        connect(pipeline_arguments=text)


def test_experiment_that_vanished_leaves_run_unknown_and_is_not_recreated(kubeflow, connect):
    trigger = connect()
    trigger.submit(request("a"))
    kubeflow.experiments.clear()
    kubeflow.runs.clear()
    assert trigger.state("a") == (
        "unknown",
        "the server has no experiment evergreen-retraining any more",
        None,
    )
    assert kubeflow.experiments == []


@pytest.mark.parametrize(("other", "answer"), [("a", "already"), ("b", "busy")])
def test_first_of_two_runs_created_at_same_time_remains(kubeflow, connect, other, answer):
    """A monitor's process freezes after it searched for active runs.

    The frozen process continues, and creates a run after its successor has created a run.
    """
    stale, leader = connect(), connect()

    def submit_first(body):
        kubeflow.before_create = lambda body: None
        assert leader.submit(request(other)) == "started"

    kubeflow.before_create = submit_first
    assert stale.submit(request("a")) == answer
    assert [(run["display_name"], run["state"]) for run in kubeflow.runs] == [
        (other, "PENDING"),
        ("a", "CANCELING"),
    ]
    kubeflow.runs[1]["state"] = "CANCELED"
    assert leader.state(other).state == "running"
    kubeflow.runs[0]["state"] = "SUCCEEDED"
    assert leader.state(other).state == "released"
