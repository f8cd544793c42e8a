"""The preprocessing step as a plain command."""

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import replace

from evergreen.contracts.manifests import RawDataset
from evergreen.registry.runs import step_note
from evergreen.runtime.durable import own_umask
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.references import keep
from evergreen.storage.uris import local_path


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the step's flags."""
    parser = CommandParser(prog="python -m components.preprocessing", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="folder URI of the registry")
    parser.add_argument(
        "--work",
        required=True,
        help="folder URI for large intermediate data (the step writes <work>/<run>/preprocessing)",
    )
    parser.add_argument("--raw-dataset", required=True, help="path of the RawDataset manifest")
    parser.add_argument("--output", required=True, help="path of the TrainingSet manifest to write")
    parser.add_argument(
        "--dask-scheduler",
        default="",
        help="address of a running Dask scheduler (default: processes of this machine share the "
        "work)",
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the step and return an exit code of `evergreen.runtime.exit_codes`."""
    own_umask()
    log_as_text("%(asctime)s %(name)s %(message)s")
    _encode_dataset(build_parser().parse_args(argv))
    return 0


def _encode_dataset(arguments: argparse.Namespace) -> None:
    store = local_path(arguments.store)
    final = local_path(arguments.work) / arguments.run / "preprocessing"
    with step_note(store, arguments.run, "preprocessing") as note, warnings.catch_warnings():
        # NVTabular warns about every optional library that is absent, such as TensorFlow. The
        # warnings are of no use to the user.
        warnings.simplefilter("ignore")
        from components.preprocessing.parent import find_parent
        from components.preprocessing.preprocess import preprocess

        raw = RawDataset.read(arguments.raw_dataset)
        parent = find_parent(store, raw.parent_model_id)
        training_set, note.facts = preprocess(
            raw, parent=parent, final=final, dask_scheduler=arguments.dask_scheduler
        )
        reference = keep(raw, final / "raw_dataset.json")
        training_set = replace(
            training_set, raw_dataset=reference, validation_report=raw.validation_report
        )
        training_set.write(arguments.output)


if __name__ == "__main__":
    raise SystemExit(main())
