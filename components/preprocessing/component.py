"""KFP signature of the preprocessing step."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Output


@dsl.component(base_image="evergreen-preprocessing", install_kfp_package=False)
def preprocessing(
    run: str,
    run_resource: str,
    run_id: str,
    store: str,
    work: str,
    dask_scheduler: str,
    raw_dataset: Input[Dataset],
    training_set: Output[Dataset],
) -> None:
    """Encode the raw rows and extend the parent's vocabularies without moving an id.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of the run's workflow. The name of the workflow identifies a scheduled
            run, because the runs of a schedule share their name.
        run_id: Kubeflow's id of the run. Empty on this machine.
        store: Folder URI of the model registry.
        work: Folder URI for large intermediate data. The step writes below
            <work>/<run>/preprocessing.
        dask_scheduler: Address of a running Dask scheduler. Empty to use this machine.
        raw_dataset: Manifest of the raw rows.
        training_set: Manifest of the encoded rows.
    """
    from components.preprocessing.__main__ import main
    from evergreen.registry.runs import store_name
    from evergreen.runtime.flags import run_flags

    flags = run_flags(
        run=store_name(run, run_resource, run_id),
        store=store,
        work=work,
        dask_scheduler=dask_scheduler,
        raw_dataset=raw_dataset.path,
        output=training_set.path,
    )
    if code := main(flags):
        raise SystemExit(code)
