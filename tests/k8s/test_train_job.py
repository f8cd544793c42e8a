"""Tests of training as a TrainJob: placement, the step, and the step's rights."""

import ast
import json
import ssl
from argparse import Namespace
from functools import partial

import pytest
import yaml
from kubernetes.config import incluster_config

from components.training import __main__ as step
from components.training import train_job
from components.training.train_job import TrainJobs, build_job, train_elsewhere
from evergreen.registry.runs import StepNote, read_notes, step_note
from evergreen.runtime.errors import ContractError, PermanentError, Preempted, TemporaryError
from evergreen.runtime.exit_codes import ExitCode
from pipelines.placement import (
    TRAINING_RUNTIME,
    Nodes,
    Placement,
    Toleration,
    Variables,
    train_job_spec,
)
from tests.k8s.crds import validate_crd
from tests.support.certificates import Authority
from tests.support.errors import raises
from tests.support.rendering import K8S, find, render_variant
from tests.support.train_job_api import NAMESPACE, TrainJobApi

RUN = "evergreen-retraining-x7k2p"
NODES = Nodes(selector={"gpu": "a100"}, tolerations=(Toleration(key="nvidia.com/gpu"),))
PLACEMENT = Placement(
    trainer="kubeflow",
    gpu_nodes=NODES,
    secrets=(Variables(name="storage", keys={"key": "STORAGE_KEY"}),),
    image_pull_secrets=("registry",),
    run_as_user=10001,
    labels={"cost-centre": "ads"},
)
SMALLEST = Placement(trainer="kubeflow", accelerator="")


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setenv("EVERGREEN_POD_NAME", "the-step")
    monkeypatch.setenv("EVERGREEN_POD_UID", "uid-1")
    double = TrainJobApi(validate_crd)
    yield double
    double.close()


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "training_set").write_text("the training_set")
    return Namespace(
        run=RUN,
        store=str(tmp_path / "store"),
        work=str(tmp_path / "work"),
        backend="pytorch",
        num_gpus=1,
        train_job=train_job_spec(PLACEMENT),
        training_set=tmp_path / "training_set",
        output=tmp_path / "model",
    )


def follow(api, flags, *events):
    """Run the step on the double, and return the note that the step wrote.

    When the step sleeps, the next function of `events` is called.
    """
    waiting = iter(events)
    jobs, note = (
        TrainJobs(api.configuration(), NAMESPACE),
        StepNote(step="training", started_at="of the step"),
    )
    train_elsewhere(flags, note, jobs, sleep=lambda _: next(waiting)(), clock=lambda: api.now)
    assert next(waiting, None) is None
    return note


@pytest.fixture
def do(api, flags, tmp_path):
    """Builds functions for `follow`, each of which changes the job or its pods."""

    class Do:
        def start(self, *lines, pod="worker-a", **more):
            return lambda: (api.start_pod(RUN, pod, **more), api.write(pod, *lines))

        def write(self, *lines, pod="worker-a"):
            return lambda: api.write(pod, *lines)

        def end(self, *how):
            return lambda: api.end(RUN, *how)

        def note(self, state, reason="", **facts):
            with step_note(tmp_path / "store", RUN, "training") as note:
                note.facts = facts
                note.state, note.reason = state, reason

        def succeed(self):
            (tmp_path / "work" / RUN / "train-job/output.json").write_text("the model")
            self.note("done", auc=0.7)
            api.end(RUN, "Complete")

    return Do()


def test_job_is_created_followed_and_its_model_taken_over(api, flags, do, capsys, tmp_path):
    seen = {}

    def look():
        seen.update(json.loads(json.dumps(api.jobs[RUN])))
        assert (
            tmp_path / "work" / RUN / "train-job/training_set.json"
        ).read_text() == "the training_set"

    note = follow(
        api,
        flags,
        look,
        do.start(phase="Pending"),
        do.start("one", "two"),
        do.write("three"),
        do.write(),
        do.succeed,
    )
    assert (tmp_path / "model").read_text() == "the model"
    assert note.facts == {"auc": 0.7}
    assert [line for line in capsys.readouterr().err.splitlines() if line] == [
        "one",
        "two",
        "three",
    ]
    assert api.jobs == {}
    assert seen["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "the-step", "uid": "uid-1"}
    ]
    arguments = seen["spec"]["trainer"]["args"]
    assert seen["spec"]["trainer"]["command"] == ["torchrun", "-m", "components.training"]
    workers = step.build_parser().parse_args(arguments)
    assert (workers.run, workers.store, workers.work, workers.train_job) == (
        RUN,
        flags.store,
        flags.work,
        "",
    )
    assert workers.training_set == tmp_path / "work" / RUN / "train-job/training_set.json"


def test_log_lines_arrive_once_however_long_server_does_not_answer(api, flags, do, capsys):
    def later(seconds, *lines, failures=()):
        def pass_time():
            api.now += seconds
            api.write("worker-a", *lines)
            api.failures.extend(failures)

        return pass_time

    follow(
        api,
        flags,
        do.start("one"),
        later(10.0, "two"),
        later(5.0, "three", failures=[503]),
        later(3600.0, "caf\xe9"),
        later(10.0),
        do.succeed,
    )
    printed = [line for line in capsys.readouterr().err.splitlines() if line]
    assert printed == ["one", "two", "three", "caf\N{REPLACEMENT CHARACTER}"]


def test_logs_of_lost_workers_continue_in_replacement_pods(api, flags, do, capsys):
    others = do.start("of another rank", pod="worker-z", index="1")
    follow(api, flags, do.start("one"), others, do.start("again", pod="worker-b"), do.succeed)
    assert capsys.readouterr().err.split("\n")[:2] == ["one", "again"]


@pytest.mark.parametrize(
    ("state", "reason", "error"),
    [
        ("failed", "ContractError: passes is 0", ContractError),
        ("failed", "OSError: disk full", PermanentError),
        ("preempted", "SIGTERM came", Preempted),
        (None, "", PermanentError),
    ],
)
def test_job_that_failed_ends_step_as_its_workers_ended(api, flags, do, state, reason, error):
    def fail():
        if state:
            do.note(state, reason)
        api.end(RUN, "Failed", "MaxRestartsReached", "worker 0 failed")

    with raises(error, "MaxRestartsReached", "worker 0", reason):
        follow(api, flags, do.start(), fail)
    assert RUN in api.jobs


def test_retried_step_follows_its_own_job(api, flags, do, monkeypatch):
    def killed():
        raise KeyError("as by SIGKILL")

    with pytest.raises(KeyError):
        follow(api, flags, do.start(), killed)
    monkeypatch.setenv("EVERGREEN_POD_UID", "uid-2")
    owners = []
    follow(
        api, flags, lambda: owners.extend(api.jobs[RUN]["metadata"]["ownerReferences"]), do.succeed
    )
    assert api.made == 1
    assert [each["uid"] for each in owners] == ["uid-2"]


@pytest.mark.parametrize("change", ["failed", "requests another number of GPUs"])
def test_job_of_earlier_try_that_cannot_continue_is_replaced_when_gone(api, flags, do, change):
    with pytest.raises(PermanentError):
        follow(api, flags, do.end("Failed", "DeadlineExceeded", ""))
    if change != "failed":
        api.jobs[RUN]["status"], flags.num_gpus = {}, 2
    api.lingers = True
    follow(
        api,
        flags,
        lambda: None,
        lambda: api.jobs.pop(RUN),
        lambda: setattr(api, "lingers", False),
        do.succeed,
    )
    assert api.made == 2


def test_job_of_another_program_is_left_alone(api, flags):
    api.jobs[RUN] = {"metadata": {"name": RUN}}
    with raises(ContractError, f"TrainJob {RUN}", "not created by this step"):
        follow(api, flags)
    assert api.jobs[RUN] == {"metadata": {"name": RUN}}


def test_deleted_job_is_temporary_error(api, flags, do):
    with raises(TemporaryError, "deleted", "continues from the last save"):
        follow(api, flags, do.start(), lambda: api.jobs.clear())


@pytest.mark.parametrize(
    "stop", [Preempted("SIGTERM came"), KeyboardInterrupt()], ids=["preempted", "Ctrl-C"]
)
def test_ended_step_deletes_its_job(api, flags, do, stop):
    def end():
        raise stop

    with pytest.raises(type(stop)):
        follow(api, flags, do.start(), end)
    assert api.jobs == {}


def test_failing_control_plane_is_waited_for_and_refusal_is_reported(api, flags, do, caplog):
    trouble = [503, 401, 429]
    follow(api, flags, lambda: api.failures.extend(trouble), *[lambda: None] * 3, do.succeed)
    assert [record.levelname for record in caplog.records].count("WARNING") == 3
    api.failures.append(403)
    with raises(PermanentError, "403 Forbidden", "create_namespaced_custom_object"):
        follow(api, flags)
    api.close()
    with raises(TemporaryError, "does not answer", "create_namespaced_custom_object"):
        follow(api, flags)


def test_command_ends_with_its_job_and_records_its_numbers(api, flags, do, monkeypatch, tmp_path):
    monkeypatch.setattr(TrainJobs, "of_this_pod", lambda: TrainJobs(api.configuration(), NAMESPACE))
    waits = iter([do.start(), do.succeed])
    monkeypatch.setattr(
        train_job, "train_elsewhere", partial(train_elsewhere, sleep=lambda _: next(waits)())
    )
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in vars(flags).items()]
    assert step.main(arguments) == ExitCode.DONE
    (note,) = read_notes(tmp_path / "store", RUN)
    assert (note.state, note.facts) == ("done", {"auc": 0.7})


def test_server_that_accepts_and_never_answers_is_temporary_error(api):
    api.silence.set()
    with raises(TemporaryError, "does not answer", "list_namespaced_pod"):
        TrainJobs(api.configuration(), NAMESPACE, timeout_seconds=(2.0, 0.2)).pods(RUN)


def test_step_outside_of_pod_is_refused(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with raises(ContractError, "run in a pod"):
        TrainJobs.of_this_pod()


def test_pod_specifies_address_token_authority_and_namespace(api, monkeypatch, tmp_path):
    authority = Authority()
    for name, content in zip(
        ("key", "certificate"), authority.certificate("localhost", address="127.0.0.1")
    ):
        (tmp_path / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
    for name, text in (
        ("token", "the token"),
        ("ca.crt", authority.pem.decode()),
        ("namespace", NAMESPACE),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(train_job, "_NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.server.server_port))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    jobs = TrainJobs.of_this_pod()
    assert (jobs.namespace, jobs.find(RUN)) == (NAMESPACE, None)
    (tmp_path / "ca.crt").write_bytes(Authority().pem)
    with raises(TemporaryError, "certificate verify failed"):
        TrainJobs.of_this_pod().find(RUN)


def test_rights_are_exactly_those_that_step_needs(api, flags, do, tmp_path):
    follow(api, flags, do.start(), do.succeed)
    TrainJobs(api.configuration(), NAMESPACE).own(RUN, [])
    granted = set()
    manifests = list(
        yaml.safe_load_all((K8S / "components/kubeflow-trainer/rights.yaml").read_text())
    )
    for rule in find(manifests, "Role", "evergreen-train-jobs")["rules"]:
        granted |= {(verb, resource) for verb in rule["verbs"] for resource in rule["resources"]}
    assert api.permissions == granted


@pytest.mark.parametrize("placement", [PLACEMENT, SMALLEST], ids=["all of it", "smallest"])
def test_job_spec_is_valid_and_has_placement_of_step(placement):
    spec = json.loads(train_job_spec(placement))
    validate_crd(build_job(RUN, spec))
    assert spec["runtimeRef"]["name"] == TRAINING_RUNTIME
    limits = spec["trainer"]["resourcesPerNode"]["limits"]
    assert (limits.get("nvidia.com/gpu"), limits["cpu"]) == (
        "1" if placement.accelerator else None,
        "8",
    )
    (patched,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"][
        "replicatedJobs"
    ]
    pod = patched["template"]["spec"]["template"]["spec"]
    nodes = NODES if placement.accelerator else Nodes()
    assert pod["nodeSelector"] == nodes.selector
    assert [each["key"] for each in pod["tolerations"]] == [each.key for each in nodes.tolerations]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": placement.volume}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("'numNodes'", "'nodes'", "nodes"),
        ("'numProcPerNode': 1", "'numProcPerNode': 'auto'", "auto"),
        ("'trainingRuntimeSpec'", "'podSpecOverrides'", "podSpecOverrides"),
        ("'claimName'", "'claim'", "claim"),
        ("'ownerReferences'", "'owners'", "owners"),
    ],
)
def test_field_that_trainer_does_not_know_is_refused(old, new, words):
    job = build_job(RUN, json.loads(train_job_spec(PLACEMENT)))
    changed = ast.literal_eval(repr(job).replace(old, new))
    assert changed != job
    with pytest.raises(AssertionError, match=words):
        validate_crd(changed)


def test_component_adds_runtime_and_permissions_in_pipeline_namespace(tmp_path):
    manifests = yaml.safe_load_all(render_variant("cpu+kubeflow-trainer", tmp_path))
    mine = [
        each
        for each in manifests
        if each["metadata"]["name"] in (TRAINING_RUNTIME, "evergreen-train-jobs")
    ]
    assert {each["metadata"]["namespace"] for each in mine} == {NAMESPACE}
    assert sorted(each["kind"] for each in mine) == ["Role", "RoleBinding", "TrainingRuntime"]
    validate_crd(next(each for each in mine if each["kind"] == "TrainingRuntime"))
