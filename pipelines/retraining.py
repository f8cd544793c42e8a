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
from pipelines.placement import Placement, place


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
        rollout: str = "auto",
        instances: int = 2,
        response_cache: bool = False,
        trigger_id: str = "",
        trigger_reason: str = "",
        window_start: str = "",
        window_end: str = "",
        parent: str = "current",
        champion: str = "current",
        holdout_fraction: float = 0.1,
        max_malformed_fraction: float = 0.01,
        replay_share: float = 0.0,
        replay_days: int = 7,
        window_days: float = 0.0,
        full_days: float = 0.0,
        late_days: int = 1,
        columns: str = "",
        negative_rate: float = 1.0,
        attribution_hours: float = 0.0,
        rules: str = "",
        served: str = "",
        beam_options: str = "",
        frequency_threshold: int = 5,
        category_ttl_days: float = 0.0,
        dask_scheduler: str = "",
        backend: str = placement.backend,
        network: str = "dcn",
        learning_rate: float = 0.003,
        batch_size: int = 2048,
        passes: int = 1,
        embedding_dim: int = 16,
        num_cross_layers: int = 3,
        tower: str = "128,64",
        dropout: float = 0.0,
        projection_dim: int = 0,
        seed: int = 42,
        precision: str = "float32",
        checkpoint_minutes: float = 5.0,
        solver: str = placement.solver,
        min_auc: float = 0.6,
        max_auc_loss: float = 0.002,
        max_slice_loss: float = 0.02,
        max_calibration_factor: float = 1.5,
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
            rollout: auto (full after a pass, canary where the gate could not tell), full (all traffic at once), canary
                (a small share first, grown while it does no worse) or shadow (scored beside the live model and logged,
                not served). full needs a pass; the others also take a model of which the gate could not tell.
            instances: Copies of the model that work side by side in each server.
            response_cache: Whether servers that have a response cache may answer from it.
            trigger_id: Who asked for the run; the monitor's request id. Empty for a run started by hand.
            trigger_reason: Why the run was asked for.
            window_start: First event time to learn from, ISO 8601 UTC; empty = after the last row that the parent
                learned, or the first row.
            window_end: End of the window, exclusive; empty = the newest row.
            parent: Model to continue: current (the live one, if any), none (from scratch), or a model id.
            champion: Model to beat: current, none, or a released model's id.
            holdout_fraction: Share of the newest rows kept for the gate; fewer where parent or champion learned some.
            max_malformed_fraction: Share of malformed rows that stops the run.
            replay_share: Share of rows from days before the window among those learned, against forgetting; 0 = the
                window alone.
            replay_days: Newest days with rows before the window, from which old rows are drawn: those to replay, and
                (whatever the share) some to measure what is remembered; 0 = none is read.
            window_days: Days that the window has, counted back from its end; 0 = `window_start` says.
            full_days: The same for a run from scratch, where neither of the two says; 0 = from the first row.
            late_days: Days before the last row that the parent learned of which rows are learned, too, that came to the
                lake later, where neither `window_start` nor `window_days` says; 0 = none.
            columns: Features to learn from, comma-separated; empty = all 39. Must equal the parent's.
            negative_rate: Share of the training rows without a click that is kept; scores are corrected for it.
            attribution_hours: Hours after a row in which its click may still come; younger rows wait for a later round.
            rules: Validation rules over the defaults: a JSON object, or the URI (folder or gs://) of one; empty = none.
            served: Archive of served rows that training rows are compared with, folder or gs://bucket/prefix; empty =
                not compared.
            beam_options: Beam pipeline options for statistics of very large windows, such as --runner=DataflowRunner;
                empty = the step's own process.
            frequency_threshold: Sightings in windows so far that a category needs to get an id of its own.
            category_ttl_days: Days unseen after which a category loses its id; 0 = never.
            dask_scheduler: Address of a running Dask scheduler for preprocessing; empty = the step's pod.
            backend: Trainer, pytorch or hugectr (needs its image and a GPU).
            network: Network, dcn (Deep & Cross), deepfm or dlrm (both pytorch only); must equal the parent's.
            learning_rate: Adam's; a first model's at its begin; rounds try shares of it.
            batch_size: Rows per optimizer step.
            passes: Passes over the window; more than one overfits.
            embedding_dim: Width of a category's vector; must equal the parent's.
            num_cross_layers: Cross layers (dcn); must equal the parent's.
            tower: Widths of the deep tower's layers, comma-separated; must equal the parent's.
            dropout: Share of tower activations dropped in training.
            projection_dim: Rank of the cross layers' matrices (dcn: DCN v2); 0 = one vector per layer (v1). Must equal
                the parent's.
            seed: Seed of initial weights and of the order of rows.
            precision: Arithmetic of the dense layers, float32, tf32 or bfloat16.
            checkpoint_minutes: Minutes between saves of the fit; a preempted task loses at most that much.
            solver: Settings of the hugectr trainer over its defaults, as a JSON object; empty = none.
            min_auc: AUC that a model needs to be released at all.
            max_auc_loss: AUC by which the candidate may trail the champion (non-inferiority margin).
            max_slice_loss: Part by which its log loss may exceed the champion's in any slice of the rows.
            max_calibration_factor: Factor by which expected clicks may exceed, or fall short of, observed ones.
        """
        run = dsl.PIPELINE_JOB_NAME_PLACEHOLDER
        record = run_outcome(run=run, store=store, trigger_id=trigger_id, trigger_reason=trigger_reason)
        with dsl.ExitHandler(place(record, "run_outcome", placement), name="record the outcome"):
            extracted = extraction(
                run=run,
                store=store,
                work=work,
                lake=lake,
                window_start=window_start,
                window_end=window_end,
                parent=parent,
                champion=champion,
                holdout_fraction=holdout_fraction,
                max_malformed_fraction=max_malformed_fraction,
                replay_share=replay_share,
                replay_days=replay_days,
                window_days=window_days,
                full_days=full_days,
                late_days=late_days,
                columns=columns,
                negative_rate=negative_rate,
                attribution_hours=attribution_hours,
            )
            place(extracted, "extraction", placement)
            validated = validation(
                run=run,
                store=store,
                work=work,
                champion=champion,
                rules=rules,
                served=served,
                beam_options=beam_options,
                raw_dataset=extracted.outputs["raw_dataset"],
            )
            place(validated, "validation", placement)
            raw_dataset = validated.outputs["valid_dataset"]
            with dsl.If(validated.outputs["Output"] == True, name="data is fit to learn from"):  # noqa: E712
                preprocessed = preprocessing(
                    run=run,
                    store=store,
                    work=work,
                    frequency_threshold=frequency_threshold,
                    category_ttl_days=category_ttl_days,
                    dask_scheduler=dask_scheduler,
                    raw_dataset=raw_dataset,
                )
                place(preprocessed, "preprocessing", placement)
                training_set = preprocessed.outputs["training_set"]
                trained = training(
                    run=run,
                    store=store,
                    work=work,
                    backend=backend,
                    network=network,
                    learning_rate=learning_rate,
                    batch_size=batch_size,
                    passes=passes,
                    embedding_dim=embedding_dim,
                    num_cross_layers=num_cross_layers,
                    tower=tower,
                    dropout=dropout,
                    projection_dim=projection_dim,
                    seed=seed,
                    precision=precision,
                    checkpoint_minutes=checkpoint_minutes,
                    solver=solver,
                    training_set=training_set,
                    validation_report=validated.outputs["report"],
                )
                place(trained, "training", placement)
                model = trained.outputs["model"]
                judged = evaluation(
                    run=run,
                    store=store,
                    work=work,
                    champion=champion,
                    min_auc=min_auc,
                    max_auc_loss=max_auc_loss,
                    max_slice_loss=max_slice_loss,
                    max_calibration_factor=max_calibration_factor,
                    rollout=rollout,
                    raw_dataset=raw_dataset,
                    training_set=training_set,
                    model=model,
                )
                place(judged, "evaluation", placement)
                with dsl.If(judged.outputs["Output"] == True, name="candidate is accepted"):  # noqa: E712
                    released = deployment(
                        run=run,
                        store=store,
                        repository=repository,
                        triton_urls=triton_urls,
                        server=server,
                        device=device,
                        rollout=rollout,
                        instances=instances,
                        response_cache=response_cache,
                        trigger_id=trigger_id,
                        raw_dataset=raw_dataset,
                        model=model,
                        verdict=judged.outputs["verdict"],
                    )
                    place(released, "deployment", placement)

    pipeline: Callable[..., Any] = retraining
    return pipeline
