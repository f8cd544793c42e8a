"""The training step as a plain command.

The step reads a TrainingSet manifest and writes a Model manifest.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.training.hugectr.guard import is_guarded, run_guarded
from components.training.hugectr.nodes import communicator, follow, run_together
from components.training.preemption import stop_on_sigterm
from components.training.torchrec import launch
from evergreen.config.model import network_config
from evergreen.config.training import TrainingSettings
from evergreen.contracts.manifests import TrainingSet, ValidationReport
from evergreen.networks import share_cores
from evergreen.registry.runs import step_note
from evergreen.runtime.durable import own_umask
from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.references import keep, read_reference
from evergreen.storage.uris import local_path

if TYPE_CHECKING:
    from components.training.fit import FitResult


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the step's flags. The settings come with the training set."""
    parser = CommandParser(
        prog="python -m components.training",
        description=__doc__,
        epilog="Exit codes: 0 done; 2 wrong flag or input; 3 failed (for example, the loss is "
        "not finite, the disk is full or a worker was killed); 75 preempted by SIGTERM (saved, "
        "the same command continues).",
    )
    add = parser.add_argument
    add(
        "--run",
        required=True,
        default=argparse.SUPPRESS,
        help="name of the run (a second try continues from the last save)",
    )
    add(
        "--store",
        required=True,
        default=argparse.SUPPRESS,
        help="registry, an absolute path or file:// URI",
    )
    add(
        "--work",
        required=True,
        default=argparse.SUPPRESS,
        help="intermediate files, an absolute path or file:// URI",
    )
    add(
        "--backend",
        default="pytorch",
        help="pytorch, hugectr (only for dcn) or torchrec (several processes)",
    )
    add(
        "--num-gpus",
        type=int,
        default=1,
        help="GPUs that share a batch (more than one only for hugectr)",
    )
    add(
        "--train-job",
        default="",
        help="JSON spec of a TrainJob for the step's workers (empty: this process)",
    )
    add(
        "--processes",
        type=int,
        default=1,
        help="worker processes, each on its own GPU if there are GPUs (only torchrec)",
    )
    add(
        "--training-set",
        required=True,
        default=argparse.SUPPRESS,
        type=Path,
        help="TrainingSet manifest",
    )
    add(
        "--output",
        required=True,
        default=argparse.SUPPRESS,
        type=Path,
        help="path of the Model manifest to write",
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the step and return an `exit_codes.ExitCode`.

    SIGTERM preempts the step: the fit is saved, and the same command continues it.
    """
    own_umask()
    log_as_text("%(asctime)s %(name)s %(message)s")
    flags = build_parser().parse_args(argv)
    share_cores()
    store, work = local_path(flags.store), local_path(flags.work)
    if flags.train_job:
        # The Kubernetes client takes 0.2 s to import.
        from components.training.train_job import TrainJobs, train_elsewhere

        with stop_on_sigterm(), step_note(store, flags.run, "training") as note:
            train_elsewhere(flags, note, TrainJobs.of_this_pod())
        return ExitCode.DONE
    if flags.processes < 1 or (flags.processes > 1 and flags.backend != "torchrec"):
        raise ContractError(
            f"processes is {flags.processes} with backend {flags.backend}, "
            "expected 1, or more than 1 with backend torchrec"
        )
    if flags.backend == "torchrec" and not launch.is_worker():
        return launch.run_workers(sys.argv[1:] if argv is None else argv, flags.processes)
    if flags.backend == "torchrec" and not launch.is_leader():
        importlib.import_module("components.training.torchrec.engine").follow()
        return ExitCode.DONE
    if flags.backend == "hugectr" and (nodes := communicator()):
        return run_together(
            nodes, lambda: follow(nodes) if nodes.Get_rank() else _train(flags, store, work)
        )
    if flags.backend == "hugectr" and not is_guarded():
        return _guarded(sys.argv[1:] if argv is None else argv, store, flags.run)
    return _train(flags, store, work)


def _guarded(arguments: Sequence[str], store: Path, run: str) -> int:
    """Run the step in a child process. If the child dies without a record, record its death."""
    try:
        return run_guarded(arguments)
    except TemporaryError:
        with step_note(store, run, "training"):
            raise


def _train(flags: argparse.Namespace, store: Path, work: Path) -> int:
    """Train and publish the model in this process."""
    # `stop_on_sigterm` is outside `step_note`, because inside, `step_note` would record SIGTERM as
    # an end without a save.
    with stop_on_sigterm() as stop, step_note(store, flags.run, "training") as note:
        import torch

        from components.training.step import TrainingRun, remove_checkpoint, train

        training_set = TrainingSet.read(flags.training_set)
        report = read_reference(
            training_set.validation_report, ValidationReport, source=str(flags.training_set)
        )
        request = TrainingRun(
            run=flags.run,
            store=store,
            work=work,
            backend=flags.backend,
            num_gpus=flags.num_gpus,
            config=network_config(training_set.recommender),
            settings=training_set.recommender.section("training", TrainingSettings),
        )
        model, result = train(request, training_set, report, stop=stop)
        reference = keep(training_set, work / flags.run / "training" / "training_set.json")
        replace(model, training_set=reference).write(flags.output)
        remove_checkpoint(work, flags.run)
        numbers = _numbers(model.num_train_rows, result)
        # Reproducing the weights bit for bit needs the same number of threads.
        threads = torch.get_num_threads()
        note.facts = {
            "model": model.model_id,
            "parent": model.parent_model_id,
            "threads": threads,
            **numbers,
        }
    return ExitCode.DONE


def _numbers(num_train_rows: int, result: "FitResult") -> dict[str, float]:
    """Return the numbers of the run's note, without undefined numbers."""
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
