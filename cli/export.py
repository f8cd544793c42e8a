"""`evergreen models export` writes a stored model's weights in another program's form.

With `--hugectr`, the folder gets the graph and the weight files that NVIDIA's converter
`hugectr2onnx` reads. `keys.json` in the folder maps the id columns to the converter's inputs. Only
a DCN v1 whose lists are pooled by sum can be exported, because the converter misreads other models.
"""

from collections.abc import Sequence
from pathlib import Path

from evergreen.config.model import config_from_document
from evergreen.contracts.manifests import Model
from evergreen.registry.models import referenced_model, verified_part
from evergreen.runtime.durable import whole_directory
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.runtime.plain_text import show
from evergreen.storage.uris import typed_folder


def export_for_hugectr(model: Model, folder: Path) -> None:
    """Write the files that NVIDIA's converter reads into the new folder `folder`.

    Raises:
        ContractError: the folder exists, the converter does not compute the model's network, or the
            model's files are corrupt.
    """
    from components.training.hugectr.converter import require_convertible, write_for_converter

    config, features = config_from_document(model.config), model.recommender.features
    require_convertible(config, features.id_positions)
    if folder.exists():
        raise ContractError(f"--hugectr {folder} exists already, expected a new folder")
    weights = verified_part(model, Model.WEIGHTS)
    with whole_directory(folder) as parts:
        write_for_converter(
            weights,
            config,
            model.slot_sizes,
            positions=features.id_positions,
            columns=features.id_names,
            folder=parts,
        )


def build_parser() -> CommandParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen models export", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a released version, or the id of a model in the store"
    )
    add_store_flag(parser)
    parser.add_argument(
        "--hugectr", type=Path, required=True, metavar="DIR", help="new folder for HugeCTR's files"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. `evergreen.runtime.exit_codes` lists its exit codes."""
    arguments = build_parser().parse_args(argv)
    model = referenced_model(typed_folder(arguments.store, "--store"), arguments.model)
    export_for_hugectr(model, arguments.hugectr)
    show(f"model {model.model_id}: {arguments.hugectr.absolute()}")
    return ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
