"""Preprocessing as a plain command."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from components.contracts.manifests import RawDataset
from components.preprocessing.settings import PreprocessingSettings
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.runtime.interpreter import importing
from components.storage.uris import local_path
from components.store.run_notes import noted


def build_parser() -> argparse.ArgumentParser:
    """The step's flags."""
    defaults = PreprocessingSettings()
    parser = argparse.ArgumentParser(prog="python -m components.preprocessing", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="folder URI of the model store")
    parser.add_argument("--work", required=True, help="folder URI for big data; <work>/<run>/preprocessing is written")
    parser.add_argument("--parent", default="current", help="model to continue: current, none or a model's id")
    parser.add_argument(
        "--frequency-threshold",
        type=int,
        default=defaults.frequency_threshold,
        help="sightings that a category needs, summed over rounds, to get an id (default %(default)s)",
    )
    parser.add_argument(
        "--category-ttl-days",
        type=float,
        default=defaults.category_ttl_days,
        help="days unseen after which a category loses its id; 0 = never (default %(default)s)",
    )
    parser.add_argument(
        "--max-candidates",
        type=int,
        default=defaults.max_candidates,
        help="categories without an id, per column, whose sightings are carried on (default %(default)s)",
    )
    parser.add_argument("--raw-dataset", required=True, help="path of the RawDataset manifest")
    parser.add_argument("--output", required=True, help="path of the TrainingSet manifest to write")
    parser.add_argument(
        "--partition-rows",
        type=int,
        default=defaults.partition_rows,
        help="rows that a process has in memory at a time (default %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=defaults.processes,
        help="processes that share the rows; 0 = one per core (default %(default)s)",
    )
    parser.add_argument(
        "--dask-scheduler",
        default=defaults.dask_scheduler,
        help="address of a running Dask scheduler, or local, which starts one; without it --processes share the work",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the step; 0 = done, 2 = the input is not as agreed, 3 = a process, Dask, a disk or our output failed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    arguments = build_parser().parse_args(argv)
    try:
        return _run(arguments)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (TemporaryError, PermanentError, OSError) as error:
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 3


def _run(arguments: argparse.Namespace) -> int:
    settings = PreprocessingSettings(
        frequency_threshold=arguments.frequency_threshold,
        category_ttl_days=arguments.category_ttl_days,
        max_candidates=arguments.max_candidates,
        partition_rows=arguments.partition_rows,
        processes=arguments.processes,
        dask_scheduler=arguments.dask_scheduler,
    )
    store = local_path(arguments.store)
    final = local_path(arguments.work) / arguments.run / "preprocessing"
    with noted(store, arguments.run, "preprocessing") as note, warnings.catch_warnings():
        # NVTabular warns of every library that it could have used (TensorFlow, a GPU); none of it can be acted upon.
        warnings.simplefilter("ignore")
        from components.preprocessing.lean_imports import lean_imports
        from components.runtime.allocator import keep_freed_memory

        # A partition asks for as much as the one before. The pages of what was given back are a third of the processor
        # time of a million rows (14.3 s of 1 process, 10.3 s with this), for 30 to 80 MB more at the peak.
        keep_freed_memory(1 << 30)
        with importing(), lean_imports():
            from components.preprocessing.facts import facts
            from components.preprocessing.parent import find_parent
            from components.preprocessing.preprocess import preprocess

        raw = _read_raw(Path(arguments.raw_dataset))
        parent = find_parent(store, arguments.parent)
        training_set = preprocess(raw, parent=parent, final=final, settings=settings)
        training_set.write(arguments.output)
        note.facts = dict(facts(training_set, parent))
    return 0


def _read_raw(path: Path) -> RawDataset:
    try:
        return RawDataset.read(path)
    except OSError as error:
        raise ContractError(f"raw dataset manifest {path} cannot be read: {error.strerror}") from error


if __name__ == "__main__":
    raise SystemExit(main())
