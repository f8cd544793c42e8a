"""`evergreen schema`: shows the schema in force, compares two schemas, accepts a new one.

Runs in the validation environment, or on a cluster in its image (`python -m components.validation.schema_command`).
Comparing and storing is left to `schema_versions`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from components.contracts.manifests import Model
from components.contracts.retrain_request import CURRENT
from components.runtime.errors import ContractError
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.runtime.people import whoami
from components.storage.uris import local_path, typed_folder
from components.store import models as model_store
from components.store.runs import run_folder
from components.validation.schema_versions import (
    NOTE,
    accept_schema,
    compare_schemas,
    read_accepted,
    read_schema,
    schema_in_force,
    version_path,
)


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(prog="evergreen schema", description="Curates the schema of the training rows.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print the schema in force: the newest accepted one, else the live model's")
    show.add_argument("which", nargs="?", default="force", help="force (default), live, a version, run:NAME or a file")
    diff = commands.add_parser("diff", help="compare two schemas; each difference is looser, stricter or a note")
    diff.add_argument("old", help="force, live, a version, run:NAME (what the run proposes, --work) or a file")
    diff.add_argument("new", help="the same")
    accept = commands.add_parser("accept", help="put a proposed or an edited schema in force")
    accept.add_argument("which", help="run:NAME (what the run proposes, --work) or a file")
    accept.add_argument("--reason", required=True, help="why")
    accept.add_argument("--who", default=whoami(), help="who accepts it (%(default)s)")
    accept.add_argument(
        "--loosen", action="append", default=[], metavar="FEATURE.rule", help="a rule that it may loosen (repeatable)"
    )
    log = commands.add_parser("log", help="list the accepted versions: who, when, why, what they loosened")
    for each in (show, diff, accept, log):
        each.add_argument("--store", required=True, help="model store, folder or its URI")
    for each in (show, diff, accept):
        each.add_argument("--work", default="", help="folder for big files, for run:NAME")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `diff` ends with `REFUSED` if the schemas differ in more than notes."""
    arguments = build_parser().parse_args(argv)
    store = typed_folder(arguments.store, "--store")
    command = {"show": _show, "diff": _diff, "accept": _accept, "log": _log}[arguments.command]
    return command(store, arguments)


def _show(store: Path, arguments: argparse.Namespace) -> int:
    path = _find_schema(store, arguments.which, arguments.work)
    print(f"# {path}\n{path.read_text(encoding='utf-8')}", end="")
    return ExitCode.DONE


def _diff(store: Path, arguments: argparse.Namespace) -> int:
    paths = [_find_schema(store, which, arguments.work) for which in (arguments.old, arguments.new)]
    differences = compare_schemas(*map(read_schema, paths))
    for each in differences:
        print(f"{each.kind:<9}{each.name}: {each.old} -> {each.new}")
    print(f"{len(differences)} differences")
    return ExitCode.REFUSED if any(each.kind != NOTE for each in differences) else ExitCode.DONE


def _accept(store: Path, arguments: argparse.Namespace) -> int:
    which = arguments.which
    line = accept_schema(
        store,
        _find_schema(store, which, arguments.work),
        of_champion=_live_schema(store),
        who=arguments.who,
        reason=arguments.reason,
        run=which.removeprefix("run:") if which.startswith("run:") else None,
        loosen=arguments.loosen,
    )
    print(f"version {line.version} is in force from the next round on: {version_path(store, line.version)}")
    return ExitCode.DONE


def _log(store: Path, _arguments: argparse.Namespace) -> int:
    lines = read_accepted(store)
    if not lines:
        print("no schema was accepted yet: rounds are judged by their champion's")
    for line in lines:
        loosened = f"; loosened {', '.join(line.loosened)}" if line.loosened else ""
        print(f"{line.version}  {line.time}  {line.who}  from {line.source} over {line.base}: {line.reason}{loosened}")
    return ExitCode.DONE


def _live_schema(store: Path) -> tuple[str, Path] | None:
    release = model_store.champion(store, CURRENT)
    return (release.model_id, local_path(release.model_uri) / Model.SCHEMA) if release else None


def _find_schema(store: Path, which: str, work: str) -> Path:
    """The file of the schema that a person named."""
    live = _live_schema(store)
    if which == "force" and (path := schema_in_force(store, live[1] if live else None)):
        return path
    if which == "live" and live:
        return live[1]
    if which in ("force", "live"):
        raise ContractError(f"there is no schema {which!r} in {store}: no model is live yet, and none was accepted")
    if which.startswith("run:"):
        run = run_folder(store, which.removeprefix("run:")).name
        path = typed_folder(work, "--work") / run / "validation" / "proposed_schema.pbtxt"
        hint = f"run {run} proposes no schema: {path} is absent"
    elif which.isdigit():
        path, hint = version_path(store, int(which)), f"version {which} was never accepted in {store}"
    else:
        path, hint = Path(which), f"schema {which!r} is no file, expected one, or force, live, a version or run:NAME"
    if not path.is_file():
        raise ContractError(hint)
    return path


if __name__ == "__main__":
    sys.exit(main())
