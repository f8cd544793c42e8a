"""The training step's KFP signature."""

from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Metrics, Model, Output


@dsl.component(base_image="evergreen-training", install_kfp_package=False)
def training(
    run: str,
    store: str,
    work: str,
    backend: str,
    network: str,
    learning_rate: float,
    batch_size: int,
    passes: int,
    embedding_dim: int,
    num_cross_layers: int,
    tower: str,
    dropout: float,
    projection_dim: int,
    seed: int,
    precision: str,
    checkpoint_minutes: float,
    solver: str,
    training_set: Input[Dataset],
    validation_report: Input[Artifact],
    model: Output[Model],
    metrics: Output[Metrics],
) -> None:
    """Fits the network, from scratch or on from a parent, and puts the model into the store.

    Args:
        run: Name of the run; a retried task of the same run (preempted ones exit with 75) goes on from its last save.
        store: Folder of the model store.
        work: Folder for intermediate files.
        backend: Trainer: pytorch or hugectr (needs an image with HugeCTR and a GPU).
        network: dcn (Deep & Cross Network), deepfm or dlrm; the parent's, where one is continued.
        learning_rate: Adam's; a first model's at its begin; rounds try shares of it.
        batch_size: Rows per optimizer step.
        passes: Passes over the rows; more than one overfits.
        embedding_dim: Width of a category's vector.
        num_cross_layers: Number of cross layers (dcn).
        tower: Widths of the tower's hidden layers, joined by commas.
        dropout: Share of tower activations zeroed in training.
        projection_dim: Rank of the cross layers' matrices (dcn: DCN v2); 0 = DCN v1.
        seed: Decides initial weights, the order of rows and dropout.
        precision: Of matrix products: float32, tf32 or bfloat16.
        checkpoint_minutes: Time between saves within the fit: what a kill loses at most.
        solver: HugeCTR's own settings, as a JSON object; empty = its defaults.
        training_set: Encoded rows (manifest).
        validation_report: Statistics and schema to keep beside the model (manifest).
        model: The trained model (manifest).
        metrics: AUC and log loss on rows just before they were learned; rows, steps, rows per second.
    """
    from components.runtime.flags import run_flags
    from components.training.__main__ import main

    flags = run_flags(
        run=run, store=store, work=work, backend=backend, network=network, learning_rate=learning_rate,
        batch_size=batch_size, passes=passes, embedding_dim=embedding_dim, num_cross_layers=num_cross_layers,
        tower=tower, dropout=dropout, projection_dim=projection_dim, seed=seed, precision=precision, solver=solver,
        checkpoint_minutes=checkpoint_minutes, training_set=training_set.path,
        validation_report=validation_report.path, output=model.path)  # fmt: skip
    if code := main(flags, log_metric=metrics.log_metric):
        raise SystemExit(code)
