"""The training step as a plain command: TrainingSet and ValidationReport manifests in, Model manifest out."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.contracts.dcn import DcnConfig
from components.contracts.errors import ContractError, PermanentError
from components.contracts.manifests import TrainingSet, ValidationReport
from components.contracts.run_notes import noted
from components.contracts.uris import local_path
from components.dcn import share_cores
from components.training.config import TrainingSettings, parse_tower

if TYPE_CHECKING:
    from components.training.trainer import FitResult


def build_parser() -> argparse.ArgumentParser:
    """The step's flags."""
    network, fit = DcnConfig(), TrainingSettings()
    parser = argparse.ArgumentParser(
        prog="python -m components.training",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--run", required=True, help="name of the run; a second try continues the first from its last epoch")
    add("--store", required=True, help="folder of the model store")
    add("--work", required=True, help="folder for intermediate files")
    add("--parent", default="current", help="model to continue: current, none, or a model id")
    add("--backend", default="pytorch", help="trainer; hugectr is not in this version")
    add("--learning-rate", type=float, default=fit.learning_rate, help="Adam's, for all parameters")
    add("--batch-size", type=int, default=fit.batch_size, help="rows per optimizer step")
    add("--max-epochs", type=int, default=fit.max_epochs, help="most passes over the fitted rows")
    add("--embedding-dim", type=int, default=network.embedding_dim, help="width of a category's vector")
    add("--num-cross-layers", type=int, default=network.num_cross_layers, help="number of cross layers")
    add("--tower", default=",".join(map(str, network.tower)), help="widths of the tower's hidden layers")
    add("--dropout", type=float, default=network.dropout, help="share of tower activations zeroed in training")
    add("--seed", type=int, default=fit.seed, help="decides initial weights, the order of rows and dropout")
    add("--training-set", required=True, type=Path, help="TrainingSet manifest")
    add("--validation-report", required=True, type=Path, help="ValidationReport manifest")
    add("--output", required=True, type=Path, help="where the Model manifest is written")
    return parser


def run_flags(**values: object) -> list[str]:
    """The command line that gives the step these values.

    >>> run_flags(run="r 1", batch_size=2048)
    ['--run=r 1', '--batch-size=2048']
    """
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def main(argv: Sequence[str] | None = None, *, log_metric: Callable[[str, float], None] | None = None) -> int:
    """Runs the step; 0 = done, 2 = misuse or bad input, with one line on stderr.

    Args:
        argv: Flags; None = the process's.
        log_metric: Takes each number that KFP shows; only finite ones, others kill a KFP run.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    flags = build_parser().parse_args(argv)
    try:
        _run(flags, log_metric or (lambda name, value: None))
    except (ContractError, PermanentError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(flags: argparse.Namespace, log_metric: Callable[[str, float], None]) -> None:
    share_cores()
    from components.training.step import TrainingRun, forget_checkpoint, train

    store, work = local_path(flags.store), local_path(flags.work)
    with noted(store, flags.run, "training") as note:
        asked = TrainingRun(
            run=flags.run,
            store=store,
            work=work,
            parent=flags.parent,
            backend=flags.backend,
            config=DcnConfig(
                embedding_dim=flags.embedding_dim,
                num_cross_layers=flags.num_cross_layers,
                tower=parse_tower(flags.tower),
                dropout=flags.dropout,
            ),
            settings=TrainingSettings(
                learning_rate=flags.learning_rate,
                batch_size=flags.batch_size,
                max_epochs=flags.max_epochs,
                seed=flags.seed,
            ),
        )
        training_set = TrainingSet.read(flags.training_set)
        model, result = train(asked, training_set, ValidationReport.read(flags.validation_report))
        model.write(flags.output)
        forget_checkpoint(work, flags.run)
        note.facts = {
            "model": model.model_id,
            "parent": model.parent_model_id,
            **_numbers(model.num_train_rows, result),
        }
        for name, value in _numbers(model.num_train_rows, result).items():
            if math.isfinite(value):
                log_metric(name, value)


def _numbers(num_train_rows: int, result: FitResult) -> dict[str, float]:
    """Those that exist."""
    numbers = {
        **{f"stopping_{name}": value for name, value in result.early_stopping.items()},
        "train_rows": num_train_rows,
        "optimizer_step": result.optimizer_step,
        "rows_per_second": result.rows_per_second,
    }
    return {name: value for name, value in numbers.items() if value is not None}


if __name__ == "__main__":
    raise SystemExit(main())
