"""`evergreen models sync` brings MLflow, Kubeflow's Model Registry or both up to date.

The source is an Evergreen model registry. Existing entries do not change. The next call also
exports the entries that a failed or skipped call did not export. If one registry is unreachable,
the command still updates the other one, logs one line and ends with exit code 3.
"""

import argparse
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from cli.registries.exported import Exported, read_exported
from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.uris import typed_folder


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen models sync", description=(__doc__ or "").partition("\n\n")[2]
    )
    add_store_flag(parser)
    parser.add_argument("--mlflow", help="tracking URI of MLflow, such as http://mlflow:5000")
    parser.add_argument(
        "--model-registry",
        help="address of Kubeflow's Model Registry, such as http://model-registry:8080",
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Export once, and return the exit code."""
    arguments = build_parser().parse_args(argv)
    log_as_text("%(asctime)s %(name)s %(message)s")
    if not (arguments.mlflow or arguments.model_registry):
        raise ContractError("neither --mlflow nor --model-registry is given, expected at least one")
    exported, code = read_exported(typed_folder(arguments.store, "--store")), ExitCode.DONE
    if exported is None:
        return code
    for export in _exporters(arguments.mlflow, arguments.model_registry):
        try:
            export(exported)
        except (TemporaryError, OSError) as error:
            logging.getLogger("evergreen.export").error("%s", error)
            code = ExitCode.FAILED
    return code


def _exporters(
    mlflow: str | None, model_registry: str | None
) -> Iterator[Callable[[Exported], None]]:
    """Yield the exporter of each requested registry.

    Exporters are imported late, because each client takes seconds to import.
    """
    if mlflow:
        # The client must not report usage, retry an unreachable server for four minutes, or print
        # addresses.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from cli.registries import mlflow_server

        yield partial(mlflow_server.export, mlflow)
    if model_registry:
        from cli.registries import kubeflow

        yield partial(kubeflow.export, model_registry)


if __name__ == "__main__":
    raise SystemExit(main())
