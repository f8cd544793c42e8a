"""The deployment step as a command line: `python -m components.deployment --help`.

Exit codes: 0 released, 1 refused (the verdict does not accept the model), 2 misuse or inputs that do not belong
together (parity among them), 3 a server or another deployment was in the way (what was live is live).
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from components.contracts import run_notes
from components.contracts.errors import ContractError, PermanentError, TemporaryError

SERVERS = ("python", "onnxruntime")


def build_parser() -> argparse.ArgumentParser:
    """The flags of this step; needs no heavy package."""
    parser = argparse.ArgumentParser(prog="python -m components.deployment", description=__doc__)
    parser.add_argument("--run", required=True, help="name of the pipeline run")
    parser.add_argument("--store", required=True, help="model store, folder URI")
    parser.add_argument("--work", required=True, help="folder URI for big files of runs; this step writes none there")
    parser.add_argument("--repository", required=True, help="Triton's model repository, folder URI")
    parser.add_argument(
        "--triton-urls", default="", help="host:grpc_port of each running Triton, comma-separated; empty = publish only"
    )
    parser.add_argument("--server", choices=SERVERS, default="python", help="what runs the graph in Triton")
    parser.add_argument("--trigger-id", default="", help="retrain request that this run answers; empty = none")
    parser.add_argument("--raw-dataset", required=True, type=Path, help="RawDataset manifest")
    parser.add_argument("--model", required=True, type=Path, help="Model manifest")
    parser.add_argument("--verdict", required=True, type=Path, help="Verdict manifest")
    parser.add_argument("--output", required=True, type=Path, help="where the Release manifest goes")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Releases the model; answers the exit code."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from components.contracts.uris import local_path

    try:
        with run_notes.noted(local_path(arguments.store), arguments.run, "deployment") as note:
            return _deploy(arguments, note)
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (TemporaryError, PermanentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


def _deploy(arguments: argparse.Namespace, note: run_notes.StepNote) -> int:
    from components.contracts.manifests import Model, RawDataset, Verdict
    from components.contracts.uris import local_path
    from components.deployment.release import ReleaseSettings, release
    from components.deployment.switch import parse_urls

    verdict = Verdict.read(arguments.verdict)
    if not verdict.accepted:
        note.state, note.reason = "refused", f"verdict is {verdict.decision}: {verdict.reason}"
        return 1
    settings = ReleaseSettings(
        store=local_path(arguments.store),
        repository=arguments.repository,
        triton_urls=tuple(parse_urls(arguments.triton_urls)),
        server=arguments.server,
        trigger_id=arguments.trigger_id or None,
    )
    done = release(Model.read(arguments.model), verdict, RawDataset.read(arguments.raw_dataset), settings)
    done.write(arguments.output)
    note.reason = f"version {done.version} {'serves' if settings.triton_urls else 'is published'}; {verdict.reason}"
    note.facts = {
        "version": done.version,
        "previous_version": done.previous_version,
        "parity_max_abs_diff": done.parity_max_abs_diff,
        "parity_rows": done.parity_rows,
    }
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
