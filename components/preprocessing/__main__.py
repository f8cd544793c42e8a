"""Preprocessing as a plain command."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

from components.contracts.manifests import RawDataset
from components.preprocessing.settings import PreprocessingSettings
from components.runtime.errors import ContractError
from components.runtime.exit_codes import exits_with_code
from components.storage.uris import local_path
from components.store.runs import noted


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


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the step; see `runtime.exit_codes` for its exit codes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    _encode_dataset(build_parser().parse_args(argv))
    return 0


def _encode_dataset(arguments: argparse.Namespace) -> None:
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
        # NVTabular warns of every optional library that is absent (TensorFlow, a GPU); nobody can act on it.
        warnings.simplefilter("ignore")
        from components.preprocessing.parent import find_parent
        from components.preprocessing.preprocess import preprocess, run_facts

        raw = _read_manifest(Path(arguments.raw_dataset))
        parent = find_parent(store, arguments.parent)
        training_set = preprocess(raw, parent=parent, final=final, settings=settings)
        training_set.write(arguments.output)
        note.facts = dict(run_facts(training_set, parent))


def _read_manifest(path: Path) -> RawDataset:
    try:
        return RawDataset.read(path)
    except OSError as error:
        raise ContractError(f"raw dataset manifest {path} cannot be read: {error.strerror}") from error


if __name__ == "__main__":
    raise SystemExit(main())
