"""`evergreen export`: brings MLflow, Kubeflow's Model Registry or both up to date with a model store.

What is there already is left, so a call that failed or never came is made good by the next. A registry that is away
costs one line and exit code 3; the other one is still brought up to date.
"""

import argparse
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from components.registries.exported import Exported, read_store
from components.runtime.errors import ContractError, TemporaryError
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.runtime.flags import CommandParser
from components.storage.uris import typed_folder


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = CommandParser(prog="evergreen export", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--store", required=True, help="model store, folder or its URI")
    parser.add_argument("--mlflow", help="tracking URI of MLflow, such as http://mlflow:5000")
    parser.add_argument("--model-registry", help="address of Kubeflow's, such as http://model-registry:8080")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="go on, so many seconds after each export's end")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None, *, wait: Callable[[float], bool] | None = None) -> int:
    """Exports once, or until SIGTERM or Ctrl-C; `wait(seconds)` answers whether the command is to end."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if not (arguments.mlflow or arguments.model_registry):
        raise ContractError("neither --mlflow nor --model-registry is given, expected at least one")
    if arguments.every is not None and arguments.every <= 0:
        raise ContractError(f"--every is {arguments.every:g} s, expected more than 0")
    store = typed_folder(arguments.store, "--store")
    exporters = list(_exporters(arguments.mlflow, arguments.model_registry))
    if arguments.every is not None and wait is None:
        wait = (stop := threading.Event()).wait
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda *_: stop.set())
    while True:
        exported, code = read_store(store), ExitCode.DONE
        for export in exporters:
            try:
                if exported is not None:
                    export(exported)
            except (TemporaryError, OSError) as error:
                logging.getLogger("evergreen.export").error("%s", error)
                code = ExitCode.FAILED
        if wait is None or wait(arguments.every):
            return code


def _exporters(mlflow: str | None, model_registry: str | None) -> Iterator[Callable[[Exported], None]]:
    """Those that are asked for; each client takes seconds to import."""
    if mlflow:
        # Otherwise it tells its makers of its use, tries a server that is away for four minutes, and prints addresses.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from components.registries import mlflow_server

        yield functools.partial(mlflow_server.export, mlflow, {})
    if model_registry:
        from components.registries import kubeflow

        yield functools.partial(kubeflow.export, model_registry)


if __name__ == "__main__":
    raise SystemExit(main())
