"""The retraining pipeline: which step follows which, and nothing else.

Extraction -> validation -> (unless blocked) preprocessing -> training -> evaluation -> (if accepted) deployment, all
inside an exit handler that records how the run ended. A step takes what the step before it hands on; what is older it
finds by the references in that manifest. Images, folders, servers, resources and retries are `pipelines.placement`'s;
what a step does is its component's.
"""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.deployment.component import deployment
from components.evaluation.component import evaluation
from components.extraction.component import extraction
from components.preprocessing.component import preprocessing
from components.run_outcome.component import run_outcome
from components.training.component import training
from components.validation.component import validation
from evergreen.runtime.kubeflow import PIPELINE_NAME
from pipelines.placement import Placement, place, train_job_spec


def retraining_pipeline(placement: Placement) -> Callable[..., Any]:
    """Return the pipeline, placed for one cluster.

    Conditions are on plain bools: kfp 2.17 silently skips an If on a NamedTuple field without an Else
    (kubeflow/pipelines pull request 13313). Each condition costs a pod. The one before deployment stays, because a
    deployment that ran to say that it released nothing would be green in Kubeflow's page.
    """
    places = placement.places
    # Kubeflow replaces a constant that is one of these, and none inside a longer text. The first is empty in a
    # schedule's run.
    noted = {
        "run": dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
        "run_resource": dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER,
        "run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        "store": places["store"],
    }
    common = {**noted, "work": places["work"]}

    def step(component: Any, **arguments: Any) -> dsl.PipelineTask:
        return place(component(**arguments), component.name.replace("-", "_"), placement)

    @dsl.pipeline(name=PIPELINE_NAME, display_name="Evergreen retraining")
    def retraining(
        trigger_id: str = "",
        trigger_reason: str = "",
        window_start: str = "",
        window_end: str = "",
        parent: str = "current",
        champion: str = "current",
        recommender: str = "current",
        settings: str = "",
    ) -> None:
        """Retrains the click model on the newest logs and releases it if it is no worse than the live one.

        Args:
            trigger_id: Who asked for the run; the monitor's request id. Empty for a run started by hand.
            trigger_reason: Why the run was asked for.
            window_start: First event time to learn from, ISO 8601 UTC; empty = after the last row that the parent
                learned, or the first row.
            window_end: End of the window, exclusive; empty = the newest row.
            parent: Model to continue: current (the live one, if any), none (from scratch), or a model id.
            champion: Model to beat: current, none, or a released model's id.
            recommender: Description to work by, of those that people accepted in the store: current (the newest), its
                number or its digest.
            settings: Changes of this run to it, such as training.seed=7 model.tower=[64,32]; the model keeps them.
        """
        record = step(run_outcome, **noted, trigger_id=trigger_id, trigger_reason=trigger_reason)
        # Kubeflow's page shows 16 letters of these names.
        with dsl.ExitHandler(record, name="retraining"):
            extracted = step(
                extraction,
                **common,
                lake=places["lake"],
                window_start=window_start,
                window_end=window_end,
                parent=parent,
                champion=champion,
                recommender=recommender,
                settings=settings,
                dask_scheduler=placement.extraction_dask_scheduler,
            )
            validated = step(
                validation,
                **common,
                champion=champion,
                served=places["served"],
                beam_options=placement.beam_options,
                raw_dataset=extracted.output,
            )
            with dsl.If(validated.outputs["Output"] == True, name="data passed"):  # noqa: E712
                preprocessed = step(
                    preprocessing,
                    **common,
                    dask_scheduler=placement.preprocessing_dask_scheduler,
                    raw_dataset=validated.outputs["valid_dataset"],
                )
                trained = step(
                    training,
                    **common,
                    backend=placement.backend,
                    num_gpus=placement.training_gpus,
                    processes=placement.training_processes,
                    train_job=train_job_spec(placement),
                    training_set=preprocessed.output,
                )
                judged = step(evaluation, **common, champion=champion, model=trained.output)
                with dsl.If(judged.outputs["Output"] == True, name="gate passed"):  # noqa: E712
                    release_to = {name: places[name] for name in ("repository", "triton_urls", "server", "device")}
                    step(deployment, **noted, **release_to, trigger_id=trigger_id, verdict=judged.outputs["verdict"])

    pipeline: Callable[..., Any] = retraining
    return pipeline
