"""The retraining pipeline, which only orders its steps.

Extraction -> validation -> (unless blocked) preprocessing -> training -> evaluation -> (if
accepted) deployment. All steps are inside an exit handler that records how the run ended. Each step
receives the manifest of the previous step. Through the references in this manifest, it finds all
earlier manifests. `pipelines.placement` defines images, folders, servers, resources and retries.
The components define what the steps do.
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
from pipelines.placement import Placement, configure_task, train_job_spec


def retraining_pipeline(placement: Placement) -> Callable[..., Any]:
    """Return the pipeline with the placement of one cluster.

    Conditions test plain bools, because kfp 2.17 has an error with fields of NamedTuples. kfp
    silently skips an `If` on such a field if there is no `Else` (kubeflow/pipelines pull request
    13313). Each condition costs an additional pod. Without the condition before deployment,
    Kubeflow's page would show a deployment that releases nothing as successful.
    """
    locations = placement.locations
    # Kubeflow replaces a placeholder only if it is the complete constant, and not if it is part of
    # a longer string. The first placeholder is empty if a schedule starts the run.
    run_arguments = {
        "run": dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
        "run_resource": dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER,
        "run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        "store": locations["store"],
    }
    common = {**run_arguments, "work": locations["work"]}

    def step(component: Any, **arguments: Any) -> dsl.PipelineTask:
        return configure_task(component(**arguments), component.name.replace("-", "_"), placement)

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
        """Retrain the click model on the newest click logs, and release it if the gate accepts it.

        Args:
            trigger_id: Id of the monitor's retrain request. Empty if a person started the run.
            trigger_reason: Reason for the run.
            window_start: First event time to train on, ISO 8601 in UTC. If it is empty, the window
                starts after the last training row of the parent. Without a parent, the window
                starts at the first row.
            window_end: Exclusive end of the window, ISO 8601 in UTC. Empty means that the window
                ends after the newest row.
            parent: Model to continue: current (the live one, if any), none (from scratch), or a
                model id.
            champion: Model to compare with: current, none, or the id of a released model.
            recommender: Accepted recommender of the run: current (the newest), its number or its
                digest.
            settings: Settings of this run that override the recommender's, such as training.seed=7
                model.tower=[64,32]. The settings are stored with the model.
        """
        record = step(
            run_outcome, **run_arguments, trigger_id=trigger_id, trigger_reason=trigger_reason
        )
        # Kubeflow's page shows only the first 16 letters of names such as "retraining".
        with dsl.ExitHandler(record, name="retraining"):
            extracted = step(
                extraction,
                **common,
                lake=locations["lake"],
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
                served=locations["served"],
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
                evaluated = step(evaluation, **common, champion=champion, model=trained.output)
                with dsl.If(evaluated.outputs["Output"] == True, name="gate passed"):  # noqa: E712
                    step(
                        deployment,
                        **run_arguments,
                        server=locations["server"],
                        device=locations["device"],
                        trigger_id=trigger_id,
                        verdict=evaluated.outputs["verdict"],
                    )

    pipeline: Callable[..., Any] = retraining
    return pipeline
