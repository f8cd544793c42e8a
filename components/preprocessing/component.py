"""Preprocessing's KFP signature."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Metrics, Output


@dsl.component(base_image="evergreen-preprocessing", install_kfp_package=False)
def preprocessing(
    run: str,
    store: str,
    work: str,
    parent: str,
    frequency_threshold: int,
    raw_dataset: Input[Dataset],
    training_set: Output[Dataset],
    metrics: Output[Metrics],
) -> None:
    """Encodes the raw rows with NVTabular; extends the parent's vocabularies without moving an id.

    Args:
        run: Name of the run.
        store: Folder URI of the model store.
        work: Folder URI for big data; the step writes below <work>/<run>/preprocessing.
        parent: Model whose workflow is extended: current, none or a model's id.
        frequency_threshold: Sightings that a category needs in the training rows to get an id of its own.
        raw_dataset: Manifest of the raw rows.
        training_set: Manifest of the encoded rows.
        metrics: Rows, ids and new categories.
    """
    from components.contracts.manifests import TrainingSet
    from components.preprocessing.__main__ import main

    flags = {"run": run, "store": store, "work": work, "parent": parent, "frequency-threshold": frequency_threshold}
    flags |= {"raw-dataset": raw_dataset.path, "output": training_set.path}
    if code := main([f"--{name}={value}" for name, value in flags.items()]):
        raise SystemExit(code)
    written = TrainingSet.read(training_set.path)
    metrics.log_metric("train_rows", written.num_train_rows)
    metrics.log_metric("holdout_rows", written.num_holdout_rows)
    metrics.log_metric("ids", sum(written.slot_sizes))
    metrics.log_metric("new_categories", sum(written.new_categories))
