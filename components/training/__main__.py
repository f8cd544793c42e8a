"""The training step as a plain command: TrainingSet and ValidationReport manifests in, Model manifest out."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.manifests import TrainingSet, ValidationReport
from components.models import share_cores
from components.models.configs import NETWORKS, DcnConfig, network_config
from components.runtime.exit_codes import exits_with_code
from components.storage.uris import local_path
from components.store.runs import noted
from components.training.config import PRECISIONS, TrainingSettings, parse_tower
from components.training.preemption import stop_on_sigterm

if TYPE_CHECKING:
    from components.training.fit import FitResult
    from components.training.step import TrainingRun


def build_parser() -> argparse.ArgumentParser:
    """The step's flags."""
    network, fit = DcnConfig(num_dense=NUM_DENSE, num_categorical=NUM_CATEGORICAL), TrainingSettings()
    parser = argparse.ArgumentParser(
        prog="python -m components.training",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Exit codes: 0 done; 2 wrong flag or input; 3 failed, as where the loss is not finite or the disk is "
        "full; 75 preempted by SIGTERM: saved, and the same command goes on.",
    )
    add = parser.add_argument
    add(
        "--run",
        required=True,
        default=argparse.SUPPRESS,
        help="name of the run; a second try continues the first from its last save",
    )
    add("--store", required=True, default=argparse.SUPPRESS, help="model store, an absolute path or file:// URI")
    add("--work", required=True, default=argparse.SUPPRESS, help="intermediate files, an absolute path or file:// URI")
    add("--backend", default="pytorch", help="trainer: pytorch or hugectr")
    add("--network", default=network.network, help=f"one of {', '.join(NETWORKS)}; hugectr trains dcn only")
    add(
        "--learning-rate",
        type=float,
        default=fit.learning_rate,
        help="Adam's: a first model's at its begin; rounds try shares of it",
    )
    add("--batch-size", type=int, default=fit.batch_size, help="most rows per optimizer step; fewer in short passes")
    add("--passes", type=int, default=fit.passes, help="passes over the rows; more than one overfits")
    add("--embedding-dim", type=int, default=network.embedding_dim, help="width of a category's vector")
    add("--projection-dim", type=int, default=network.projection_dim, help="dcn: rank of the cross layers (v2); 0 = v1")
    add("--num-cross-layers", type=int, default=network.num_cross_layers, help="dcn: number of cross layers")
    add("--tower", default=",".join(map(str, network.tower)), help="widths of the tower's hidden layers")
    add("--dropout", type=float, default=network.dropout, help="share of tower activations zeroed in training")
    add("--seed", type=int, default=fit.seed, help="decides initial weights, the order of rows and dropout")
    add("--precision", default=fit.precision, help=f"of matrix products: {', '.join(PRECISIONS)}")
    add("--checkpoint-minutes", type=float, default=fit.checkpoint_minutes, help="time between saves within the fit")
    add("--solver", default="", help="HugeCTR's own settings, a JSON object; empty = ours")
    add("--training-set", required=True, default=argparse.SUPPRESS, type=Path, help="TrainingSet manifest")
    add("--validation-report", required=True, default=argparse.SUPPRESS, type=Path, help="ValidationReport manifest")
    add("--output", required=True, default=argparse.SUPPRESS, type=Path, help="where the Model manifest is written")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None, *, log_metric: Callable[[str, float], None] | None = None) -> int:
    """Runs the step; its exit code is an `exit_codes.ExitCode`.

    SIGTERM preempts: the fit is saved, and the same command goes on from there.

    Args:
        argv: Flags; None = the process's.
        log_metric: Takes each number that KFP shows; only finite ones, others kill a KFP run.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    flags = build_parser().parse_args(argv)
    share_cores()
    store, work = local_path(flags.store), local_path(flags.work)
    # The request goes around the note, which otherwise would take SIGTERM for an end without a save.
    with stop_on_sigterm() as stop, noted(store, flags.run, "training") as note:
        from components.training.step import forget_checkpoint, train

        training_set = TrainingSet.read(flags.training_set)
        report = ValidationReport.read(flags.validation_report)
        model, result = train(_training_run(flags, store, work), training_set, report, stop=stop)
        model.write(flags.output)
        forget_checkpoint(work, flags.run)
        numbers = _numbers(model.num_train_rows, result)
        note.facts = {"model": model.model_id, "parent": model.parent_model_id, **numbers}
        for name, value in numbers.items():
            if math.isfinite(value) and log_metric:
                log_metric(name, value)
    return 0


def _training_run(flags: argparse.Namespace, store: Path, work: Path) -> TrainingRun:
    from components.training.step import TrainingRun

    of_network = ("embedding_dim", "num_cross_layers", "dropout", "projection_dim")
    of_fit = ("learning_rate", "batch_size", "passes", "seed", "precision", "checkpoint_minutes")
    return TrainingRun(
        run=flags.run,
        store=store,
        work=work,
        backend=flags.backend,
        config=network_config(
            flags.network,
            {"tower": parse_tower(flags.tower), **{name: getattr(flags, name) for name in of_network}},
            num_dense=NUM_DENSE,
            num_categorical=NUM_CATEGORICAL,
        ),
        settings=TrainingSettings(**{name: getattr(flags, name) for name in of_fit}),
        solver=flags.solver,
    )


def _numbers(num_train_rows: int, result: FitResult) -> dict[str, float]:
    """Those that exist."""
    numbers = {
        **{f"progressive_{name}": value for name, value in result.progressive.items()},
        "train_rows": num_train_rows,
        "optimizer_step": result.optimizer_step,
        "learning_rate": result.learning_rate,
        "rows_per_second": result.rows_per_second,
    }
    return {name: value for name, value in numbers.items() if value is not None}


if __name__ == "__main__":
    raise SystemExit(main())
