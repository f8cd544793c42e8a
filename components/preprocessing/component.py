"""Preprocessing's KFP signature."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Metrics, Output


@dsl.component(base_image="evergreen-preprocessing", install_kfp_package=False)
def preprocessing(
    run: str,
    store: str,
    work: str,
    dask_scheduler: str,
    raw_dataset: Input[Dataset],
    training_set: Output[Dataset],
    metrics: Output[Metrics],
) -> None:
    """Encodes the raw rows; extends the parent's vocabularies without moving an id.

    Args:
        run: Name of the run.
        store: Folder URI of the model store.
        work: Folder URI for big data; the step writes below <work>/<run>/preprocessing.
        dask_scheduler: Address of a running Dask scheduler; empty = this machine.
        raw_dataset: Manifest of the raw rows.
        training_set: Manifest of the encoded rows.
        metrics: Rows, ids, and the categories that came and went.
    """
    flags = {name: value for name, value in locals().items() if name not in ("raw_dataset", "training_set", "metrics")}
    from components.preprocessing.__main__ import main
    from components.runtime.flags import run_flags
    from components.storage.uris import local_path
    from components.store.runs import read_notes

    if code := main(run_flags(**flags, raw_dataset=raw_dataset.path, output=training_set.path)):
        raise SystemExit(code)
    for note in read_notes(local_path(store), run):
        if note.step == "preprocessing":
            for name, value in note.facts.items():
                metrics.log_metric(name, value)
