"""The training step's KFP signature."""

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
    """Fits the network, from scratch or on from a parent, and puts the model into the store.

    Args:
        run: Kubeflow's name of the run. A retried task of it (preempted ones exit with 75) goes on from its last save.
        run_resource: Name of its workflow, which counts where a schedule's run has no other.
        run_id: Kubeflow's id of it; empty on this machine.
        store: Folder of the model store.
        work: Folder for intermediate files.
        backend: Trainer that the image has, pytorch, hugectr (needs a GPU) or torchrec (several processes).
        num_gpus: GPUs that share a batch; more than one only for hugectr.
        processes: Workers that share a batch, each with a GPU where there are any; more than one only for torchrec.
        train_job: What runs the step's workers, a TrainJob's spec as JSON; empty = this step's own container.
        training_set: TrainingSet manifest of the encoded rows; it names the report whose statistics and schema the
            model keeps.
        model: The trained model (manifest).
    """
    from components.training.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    name = store_name(run, run_resource, run_id)
    flags = run_flags(
        run=name, store=store, work=work, backend=backend, num_gpus=num_gpus, processes=processes, train_job=train_job,
        training_set=training_set.path, output=model.path)  # fmt: skip
    if code := main(flags):
        raise SystemExit(code)
