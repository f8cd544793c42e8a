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
from components.contracts.manifests import TrainingSet, ValidationReport
from components.dcn import share_cores
from components.runtime.errors import ContractError, PermanentError, Preempted
from components.runtime.exit_codes import ExitCode
from components.storage.uris import local_path
from components.store.run_notes import noted
from components.training.config import PRECISIONS, TrainingSettings, parse_tower
from components.training.preemption import heeding_sigterm

if TYPE_CHECKING:
    from components.training.fit import FitResult
    from components.training.step import TrainingRun


def build_parser() -> argparse.ArgumentParser:
    """The step's flags."""
    network, fit = DcnConfig(), TrainingSettings()
    parser = argparse.ArgumentParser(
        prog="python -m components.training",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Exit codes: 0 done, 2 misuse or bad input, 75 preempted by SIGTERM: saved, the same command goes on.",
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
    add("--parent", default="current", help="model to continue: current, none, or a model id")
    add("--backend", default="pytorch", help="trainer: pytorch or hugectr")
    add("--learning-rate", type=float, default=fit.learning_rate, help="Adam's, for all parameters")
    add("--batch-size", type=int, default=fit.batch_size, help="most rows per optimizer step; fewer in short passes")
    add("--max-epochs", type=int, default=fit.max_epochs, help="most passes over the fitted rows")
    add("--embedding-dim", type=int, default=network.embedding_dim, help="width of a category's vector")
    add("--projection-dim", type=int, default=network.projection_dim, help="rank of the cross layers (DCN v2); 0 = v1")
    add("--num-cross-layers", type=int, default=network.num_cross_layers, help="number of cross layers")
    add("--tower", default=",".join(map(str, network.tower)), help="widths of the tower's hidden layers")
    add("--dropout", type=float, default=network.dropout, help="share of tower activations zeroed in training")
    add("--seed", type=int, default=fit.seed, help="decides initial weights, the order of rows and dropout")
    add("--precision", default=fit.precision, help=f"of matrix products: {', '.join(PRECISIONS)}")
    add("--checkpoint-minutes", type=float, default=fit.checkpoint_minutes, help="time between saves within the fit")
    add("--solver", default="", help="HugeCTR's own settings, a JSON object; empty = ours")
    add("--profile-steps", type=int, default=0, help="pytorch: trace at least as many steps; 0 = none")
    add("--tensorboard", type=Path, help="folder for TensorBoard's event files, beside metrics.jsonl")
    add("--training-set", required=True, default=argparse.SUPPRESS, type=Path, help="TrainingSet manifest")
    add("--validation-report", required=True, default=argparse.SUPPRESS, type=Path, help="ValidationReport manifest")
    add("--output", required=True, default=argparse.SUPPRESS, type=Path, help="where the Model manifest is written")
    return parser


def run_flags(**values: object) -> list[str]:
    """The command line that gives the step these values.

    >>> run_flags(run="r 1", batch_size=2048)
    ['--run=r 1', '--batch-size=2048']
    """
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def main(argv: Sequence[str] | None = None, *, log_metric: Callable[[str, float], None] | None = None) -> int:
    """Runs the step; 0 = done, 2 = misuse or bad input, 75 = preempted, the last two with one line on stderr.

    SIGTERM preempts: the fit is saved, and the same command goes on from there.

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
    except Preempted as error:
        print(f"preempted: {error}", file=sys.stderr)
        return ExitCode.PREEMPTED
    return 0


def _run(flags: argparse.Namespace, log_metric: Callable[[str, float], None]) -> None:
    share_cores()
    store, work = local_path(flags.store), local_path(flags.work)
    # The request goes around the note, which else would take SIGTERM for an end without a save.
    with heeding_sigterm() as stop, noted(store, flags.run, "training") as note:
        from components.training.step import forget_checkpoint, train

        training_set = TrainingSet.read(flags.training_set)
        report = ValidationReport.read(flags.validation_report)
        model, result = train(_asked(flags, store, work), training_set, report, stop=stop)
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


def _asked(flags: argparse.Namespace, store: Path, work: Path) -> TrainingRun:
    from components.training.step import TrainingRun

    return TrainingRun(
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
            projection_dim=flags.projection_dim,
        ),
        settings=TrainingSettings(
            learning_rate=flags.learning_rate,
            batch_size=flags.batch_size,
            max_epochs=flags.max_epochs,
            seed=flags.seed,
            precision=flags.precision,
            checkpoint_minutes=flags.checkpoint_minutes,
        ),
        solver=flags.solver,
        profile_steps=flags.profile_steps,
        tensorboard=flags.tensorboard,
    )


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
