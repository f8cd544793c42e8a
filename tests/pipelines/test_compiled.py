"""Tests of the compiled pipeline: its interface and the placement of every task."""

import re
from pathlib import Path

import pytest

from evergreen.contracts.manifests import RUN_PARAMETERS
from pipelines.images import image_reference, step_of_image
from pipelines.placement import NEEDS
from tests.support.compiled import STEPS, dashed

GOLDEN = Path(__file__).parent / "golden" / "retraining.yaml"
GPU_STEPS = {"training"}


@pytest.fixture(scope="module")
def compiled(compile_with):
    return compile_with()


def test_compiled_pipeline_is_golden_file(compiled):
    same = compiled.path.read_bytes() == GOLDEN.read_bytes()
    assert same, (
        "the compiled pipeline changed; if this is intended, run `make golden` and read the diff"
    )


def test_every_input_is_described_and_has_default(compiled):
    for name, parameter in compiled.spec["root"]["inputDefinitions"]["parameters"].items():
        assert parameter["description"].strip(), name
        assert parameter["isOptional"], name


@pytest.mark.parametrize("step", STEPS)
def test_every_input_of_step_is_described(compiled, step):
    inputs = compiled.spec["components"][f"comp-{dashed(step)}"]["inputDefinitions"]
    for name, value in {**inputs["parameters"], **inputs.get("artifacts", {})}.items():
        set_by_kfp = value.get("parameterType") == "TASK_FINAL_STATUS"
        assert set_by_kfp or value["description"].strip(), name


@pytest.mark.parametrize("step", STEPS)
def test_task_runs_image_within_limits_is_retried_and_never_cached(compiled, step):
    container, task, needs = compiled.executor(step), compiled.task(step), NEEDS[step]
    assert container["image"] == f"evergreen-{dashed(step)}:dev"
    resources = container["resources"]
    assert (resources["resourceCpuLimit"], resources["resourceMemoryLimit"]) == (
        needs.cpu,
        needs.memory,
    )
    # Training is the longest step and resumes after an interruption, so it has more retries, for
    # preemptible nodes.
    retry = task["retryPolicy"]
    assert (retry["maxRetryCount"], retry["backoffDuration"]) == (
        4 if step == "training" else 2,
        "10s",
    )
    assert retry["backoffFactor"] > 1
    assert compiled.platform(step)["activeDeadlineSeconds"] == str(needs.timeout_seconds)
    assert not task["cachingOptions"].get("enableCache", False)
    assert task["inputs"]["parameters"]["run"] == {
        "runtimeValue": {"constant": "{{$.pipeline_job_name}}"}
    }
    script = " ".join(container["command"])
    assert not re.search(r"\bpip\b|PIP_|install|kfp==", script), "a task must not install packages"


@pytest.mark.parametrize("step", STEPS)
def test_last_retry_may_still_take_as_long_as_first_try(compile_with, step):
    """Argo's time limit starts with the first try.

    After the time limit, Argo ends the running try and starts no other try.
    """
    retry = compile_with(num_retries=5, training_retries=5).task(step)["retryPolicy"]
    limit = int(retry["backoffMaxDuration"].removesuffix("s"))
    waits = sum(10 * retry["backoffFactor"] ** n for n in range(5))
    assert limit >= 6 * NEEDS[step].timeout_seconds + waits


def mounted(compiled, step):
    return sorted(m["mountPath"] for m in compiled.platform(step)["emptyDirMounts"])


@pytest.mark.parametrize("accelerator", ["nvidia.com/gpu", "nvidia.com/mig-1g.5gb"])
def test_only_training_requests_gpu_by_configured_name(compile_with, accelerator):
    compiled = compile_with(accelerator=accelerator)
    for step in STEPS:
        requested = compiled.executor(step)["resources"].get("accelerator")
        if step in GPU_STEPS:
            assert (requested["resourceType"], requested["resourceCount"]) == (accelerator, "1")
            assert compiled.platform(step)["tolerations"]
            assert mounted(compiled, step) == ["/dev/shm", "/evergreen/repository"]
        else:
            assert requested is None
            assert "tolerations" not in compiled.platform(step)
            assert mounted(compiled, step) == ["/evergreen/repository"]


def test_backend_chosen_decides_training_image_and_its_gpus(compile_with):
    compiled = compile_with(backend="hugectr", training_gpus=4)
    image = compiled.executor("training")["image"]
    assert image == "evergreen-training-hugectr:dev"
    assert step_of_image(image) == "training"
    assert compiled.executor("training")["resources"]["accelerator"]["resourceCount"] == "4"
    assert compiled.executor("evaluation")["image"] == "evergreen-evaluation:dev"
    given = compiled.task("training")["inputs"]["parameters"]
    assert given["backend"]["runtimeValue"]["constant"] == "hugectr"
    assert given["num_gpus"]["runtimeValue"]["constant"] == 4.0


def test_run_gets_inputs_of_person_and_of_monitor(compiled):
    parameters = compiled.spec["root"]["inputDefinitions"]["parameters"]
    people = {"window_start", "window_end", "parent", "champion", "recommender", "settings"}
    assert parameters.keys() == people | {"trigger_id", "trigger_reason"} == set(RUN_PARAMETERS)
    assert {each["parameterType"] for each in parameters.values()} == {"STRING"}


def test_each_step_reads_only_output_of_previous_step(compiled):
    steps = [step for step in STEPS if step != "run_outcome"]
    assert compiled.edges == list(zip(steps, steps[1:]))


@pytest.mark.parametrize("step", STEPS)
def test_every_artifact_is_file_of_kubeflows_own_storage_its_page_opens(compiled, step):
    """Kubeflow's page cannot open a path on a network share.

    Manifests and reports are therefore output artifacts in Kubeflow's storage.
    """
    script = " ".join(compiled.executor(step)["command"])
    outputs = (
        compiled.spec["components"][f"comp-{dashed(step)}"]
        .get("outputDefinitions", {})
        .get("artifacts", {})
    )
    assert all(f"{name}.path" in script for name in outputs)
    assert ".uri" not in script


def test_run_in_which_every_step_runs_takes_eighteen_pods(compiled):
    """Each pod costs another round of Argo's scheduling, so an additional pod needs a decision."""
    assert compiled.num_pods == 18


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "form",
    ["{name}", "{name}:dev", "localhost:5000/{name}:dev", "r.dev/p/{name}@sha256:" + "0" * 64],
)
def test_step_of_any_image_format_is_known(step, form):
    assert step_of_image(form.format(name=f"evergreen-{dashed(step)}")) == step
    assert step_of_image(image_reference(step, registry="r.dev/p", tag="t")) == step


@pytest.mark.parametrize(
    "image", ["python:3.11", "evergreen-driver:dev", "r.dev/evergreen/training:dev", ""]
)
def test_unknown_image_is_refused_by_name(image):
    with pytest.raises(ValueError, match=re.escape(f"image {image!r} belongs to no step")):
        step_of_image(image)


def test_exit_handler_wraps_every_other_step_and_gets_its_outcome(compiled):
    assert set(compiled.spec["root"]["dag"]["tasks"]) == {"exit-handler-1", "run-outcome"}
    outcome = compiled.task("run_outcome")
    assert outcome["dependentTasks"] == ["exit-handler-1"]
    assert outcome["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    assert outcome["inputs"]["parameters"]["status"] == {
        "taskFinalStatus": {"producerTask": "exit-handler-1"}
    }


def test_gates_come_before_training_and_before_release_on_plain_bools(compiled):
    assert compiled.owner("extraction") == compiled.owner("validation") == "comp-exit-handler-1"
    assert compiled.owner("condition-2") == "comp-exit-handler-1"
    assert {compiled.owner(dashed(s)) for s in ("preprocessing", "training", "evaluation")} == {
        "comp-condition-2"
    }
    assert compiled.owner("condition-3") == "comp-condition-2"
    assert compiled.owner("deployment") == "comp-condition-3"
    for gate, step in (("condition-2", "validation"), ("condition-3", "evaluation")):
        condition = compiled.tasks[gate][0]["triggerPolicy"]["condition"]
        assert condition == f"inputs.parameter_values['pipelinechannel--{step}-Output'] == true"
        outputs = compiled.spec["components"][f"comp-{step}"]["outputDefinitions"]["parameters"]
        assert {name: p["parameterType"] for name, p in outputs.items()} == {"Output": "BOOLEAN"}
