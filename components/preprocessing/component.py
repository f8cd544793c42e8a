"""Preprocessing's KFP signature."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Metrics, Output


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
    metrics: Output[Metrics],
) -> None:
    """Encodes the raw rows; extends the parent's vocabularies without moving an id.

    Args:
        run: Kubeflow's name of the run.
        run_resource: Name of its workflow, which counts where a schedule's run has no other.
        run_id: Kubeflow's id of it; empty on this machine.
        store: Folder URI of the model store.
        work: Folder URI for big data; the step writes below <work>/<run>/preprocessing.
        dask_scheduler: Address of a running Dask scheduler; empty = this machine.
        raw_dataset: Manifest of the raw rows.
        training_set: Manifest of the encoded rows.
        metrics: Rows, ids, and the categories that came and went.
    """
    from components.preprocessing.__main__ import main
    from components.runtime.flags import run_flags
    from components.storage.uris import local_path
    from components.store.runs import read_notes, store_name

    name = store_name(run, run_resource, run_id)
    flags = run_flags(
        run=name, store=store, work=work, dask_scheduler=dask_scheduler, raw_dataset=raw_dataset.path,
        output=training_set.path)  # fmt: skip
    if code := main(flags):
        raise SystemExit(code)
    for note in read_notes(local_path(store), name):
        if note.step == "preprocessing":
            for metric, value in note.facts.items():
                metrics.log_metric(metric, value)
