"""KFP signature of the training step."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Model, Output


@dsl.component(base_image="evergreen-training", install_kfp_package=False)
def training(
    run: str,
    run_resource: str,
    run_id: str,
    store: str,
    work: str,
    backend: str,
    num_gpus: int,
    processes: int,
    train_job: str,
    training_set: Input[Dataset],
    model: Output[Model],
) -> None:
    """Fit the network from scratch or from a parent, and publish the model to the registry.

    Args:
        run: Kubeflow's name of the run. A retried task continues from its last save. A preempted
            task exits with 75.
        run_resource: Name of the run's workflow. The runs of a schedule share their name, so this
            name identifies a scheduled run.
        run_id: Kubeflow's id of the run. Empty on this machine.
        store: Folder of the model registry.
        work: Folder for intermediate files.
        backend: Training backend that the image provides: pytorch, hugectr (needs a GPU) or
            torchrec (several processes).
        num_gpus: GPUs that share a batch. More than one only for hugectr.
        processes: Worker processes that share a batch, each with its own GPU if there are GPUs.
            More than one only for torchrec.
        train_job: Spec of the TrainJob that runs the step's workers, as JSON. Empty to train in
            this step's own container.
        training_set: Manifest of the encoded rows. The manifest names the validation report. The
            report's statistics and schema are stored with the model.
        model: Manifest of the trained model.
    """
    from components.training.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    name = store_name(run, run_resource, run_id)
    flags = run_flags(
        run=name,
        store=store,
        work=work,
        backend=backend,
        num_gpus=num_gpus,
        processes=processes,
        train_job=train_job,
        training_set=training_set.path,
        output=model.path,
    )
    if code := main(flags):
        raise SystemExit(code)
