"""The retraining pipeline: which step follows which, and nothing else.

Extraction -> validation -> (unless blocked) preprocessing -> training -> evaluation -> (if accepted) deployment, all
inside an exit handler that records how the run ended. Images, resources and retries are `pipelines.placement`'s; what
a step does is its component's.
"""

from collections.abc import Callable
from typing import Any

from kfp import dsl

from components.deployment.component import deployment
from components.evaluation.component import evaluation
from components.extraction.component import extraction
from components.preprocessing.component import preprocessing
from components.run_outcome.component import run_outcome
from components.runtime.kubeflow import PIPELINE_NAME
from components.training.component import training
from components.validation.component import validation
from pipelines.placement import Placement, place, train_job_spec


def retraining_pipeline(placement: Placement) -> Callable[..., Any]:
    """The pipeline, placed for one cluster; gates are plain bools because only those are evaluated everywhere.

    (kfp 2.17 skips an If on a NamedTuple field without an Else silently: kubeflow/pipelines pull request 13313.)
    """
    root = placement.mount_path

    @dsl.pipeline(name=PIPELINE_NAME, display_name="Evergreen retraining")
    def retraining(
        lake: str = placement.default_lake,
        store: str = f"{root}/store",
        work: str = f"{root}/work",
        repository: str = placement.default_repository,
        triton_urls: str = placement.triton_urls,
        server: str = placement.server,
        device: str = placement.device,
        trigger_id: str = "",
        trigger_reason: str = "",
        window_start: str = "",
        window_end: str = "",
        parent: str = "current",
        champion: str = "current",
        recommender: str = "current",
        settings: str = "",
        served: str = placement.served,
    ) -> None:
        """Retrains the click model on the newest logs and releases it if it is no worse than the live one.

        Args:
            lake: Click logs, a folder or gs://bucket/prefix: day=YYYY-MM-DD partitions of Parquet.
            store: Folder of the model store: models, releases, promotion journal, notes of runs.
            work: Folder for the runs' intermediate files.
            repository: Triton's model repository, a folder or gs://bucket/prefix.
            triton_urls: Triton servers to load the new version, each host:grpc_port or dns:///name:grpc_port (every
                address of a headless Service), comma-separated; empty = only publish it.
            server: Which Triton serves it, onnxruntime (NGC images) or python (the server bundled for laptops).
            device: What onnxruntime runs on, cpu or gpu (a MIG slice is a GPU).
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
            served: Archive of served rows that training rows are compared with, folder or gs://bucket/prefix; empty =
                not compared.
        """
        # Kubeflow replaces a constant that is one of these, and none inside a longer text. The first is empty in a
        # schedule's run.
        run = {
            "run": dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
            "run_resource": dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER,
            "run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        }
        record = run_outcome(**run, store=store, trigger_id=trigger_id, trigger_reason=trigger_reason)
        # Kubeflow's page shows 16 letters of these names.
        with dsl.ExitHandler(place(record, "run_outcome", placement), name="retraining"):
            extracted = extraction(
                **run,
                store=store,
                work=work,
                lake=lake,
                window_start=window_start,
                window_end=window_end,
                parent=parent,
                champion=champion,
                recommender=recommender,
                settings=settings,
                dask_scheduler=placement.extraction_dask_scheduler,
            )
            place(extracted, "extraction", placement)
            validated = validation(
                **run,
                store=store,
                work=work,
                champion=champion,
                served=served,
                beam_options=placement.beam_options,
                raw_dataset=extracted.outputs["raw_dataset"],
            )
            place(validated, "validation", placement)
            raw_dataset = validated.outputs["valid_dataset"]
            with dsl.If(validated.outputs["Output"] == True, name="data passed"):  # noqa: E712
                preprocessed = preprocessing(
                    **run,
                    store=store,
                    work=work,
                    dask_scheduler=placement.preprocessing_dask_scheduler,
                    raw_dataset=raw_dataset,
                )
                place(preprocessed, "preprocessing", placement)
                training_set = preprocessed.outputs["training_set"]
                trained = training(
                    **run,
                    store=store,
                    work=work,
                    backend=placement.backend,
                    num_gpus=placement.training_gpus,
                    processes=placement.training_processes,
                    train_job=train_job_spec(placement),
                    training_set=training_set,
                    validation_report=validated.outputs["report"],
                )
                place(trained, "training", placement)
                model = trained.outputs["model"]
                judged = evaluation(
                    **run,
                    store=store,
                    work=work,
                    champion=champion,
                    raw_dataset=raw_dataset,
                    training_set=training_set,
                    validation_report=validated.outputs["report"],
                    model=model,
                )
                place(judged, "evaluation", placement)
                with dsl.If(judged.outputs["Output"] == True, name="gate passed"):  # noqa: E712
                    released = deployment(
                        **run,
                        store=store,
                        repository=repository,
                        triton_urls=triton_urls,
                        server=server,
                        device=device,
                        trigger_id=trigger_id,
                        raw_dataset=raw_dataset,
                        model=model,
                        verdict=judged.outputs["verdict"],
                    )
                    place(released, "deployment", placement)

    pipeline: Callable[..., Any] = retraining
    return pipeline
