"""`evergreen init` and `evergreen data check`, `accept`, `show`, `diff`, `history` and `records`.

These commands draft, check, accept, print, compare and list recommenders. `records` prints the
schema of a recommender's log records. The package `recommender_file` reads, writes and drafts the
file. The model registry stores accepted recommenders.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import CURRENT
from evergreen.contracts.record_format import RecordFormat
from evergreen.recommender_file.form import FILL_IN, compare, format_recommender, read_recommender
from evergreen.registry import recommenders
from evergreen.registry.models import stored_model
from evergreen.registry.promotion_journal import current
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag, whoami
from evergreen.runtime.terminal import TableColumn, add_listing_flags, local_time, print_table
from evergreen.storage.uris import typed_folder

HISTORY = (
    TableColumn(name="version", is_number=True),
    TableColumn(name="accepted"),
    TableColumn(name="by", is_flexible=True),
    TableColumn(name="name", is_flexible=True),
    TableColumn(name="digest"),
    TableColumn(name="reason", is_flexible=True),
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their flags."""
    parser = CommandParser(
        prog="evergreen data",
        description="Draft, check and accept the file that describes a recommender.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser(
        "init", prog="evergreen init", help="draft a file from the first rows of a click log"
    )
    init.add_argument("data", type=Path, help="text with a header, JSON lines, or Parquet")
    init.add_argument("--output", type=Path, default=Path("recommender.yaml"), help="file to write")
    init.add_argument(
        "--name", default="", help="name of the recommender (default: from the name of the data)"
    )
    check = commands.add_parser("check", help="check a file, and print its first fault")
    check.add_argument("file", type=Path, help="YAML, as init drafts it")
    check.add_argument(
        "--data", type=Path, help="file or folder of rows: show what ingest would do with them"
    )
    show = commands.add_parser("show", help="print an accepted recommender as a file")
    show.add_argument(
        "which",
        nargs="?",
        default=CURRENT,
        help="current (default), a version, or 8 digits of a digest",
    )
    diff = commands.add_parser("diff", help="compare two recommenders key by key")
    diff.add_argument("old", help="current, a version, 8 digits of a digest, or a file")
    diff.add_argument("new", help="current, a version, 8 digits of a digest, or a file")
    accept = commands.add_parser("accept", help="accept a file as the recommender of the next runs")
    accept.add_argument("file", type=Path, help="YAML, as init drafts it")
    accept.add_argument("--why", required=True, help="reason")
    accept.add_argument("--who", default=whoami(), help="person who accepts it")
    accept.add_argument(
        "--replace",
        action="store_true",
        help="accept it although the model registry has a recommender with another name, or with "
        "none of these columns",
    )
    history = commands.add_parser(
        "history", help="list the accepted versions with person, time and reason"
    )
    records = commands.add_parser(
        "records", help="print the Protobuf schema of the log records, for other readers"
    )
    records.add_argument("which", help="a file; or current, a version, or 8 digits of a digest")
    add_listing_flags(history)
    for each in (show, diff, accept, history, records):
        add_store_flag(each, required=each is not records)
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    `diff` returns `REFUSED` if the recommenders differ. `check` returns `REFUSED` if `ingest` would
    refuse the rows.
    """
    arguments = build_parser().parse_args(argv)
    commands = {
        "init": _init,
        "check": _check,
        "show": _show,
        "diff": _diff,
        "accept": _accept,
        "history": _history,
        "records": _records,
    }
    return commands[arguments.command](arguments)


def _init(arguments: argparse.Namespace) -> int:
    from evergreen.recommender_file.draft import draft, read_sample, recommender_name

    if arguments.output.exists():
        raise ContractError(f"{arguments.output} exists already, expected a new file (--output)")
    name = arguments.name or recommender_name(arguments.data.name.partition(".")[0])
    text = draft(read_sample(arguments.data), name=name)
    write_whole(arguments.output, text)
    gaps = f", fill in what is marked {FILL_IN}" if f": {FILL_IN}  #" in text else ""
    print(f"{arguments.output} is drafted: read its comments, correct it{gaps}, then")
    print(f"  evergreen data check {arguments.output} --data {arguments.data}")
    return ExitCode.DONE


def _check(arguments: argparse.Namespace) -> int:
    recommender = read_recommender(arguments.file)
    print(f"{arguments.file} is valid: {_described(recommender)}")
    if arguments.data is None:
        return ExitCode.DONE
    # Imported here, because only this command needs DuckDB and Arrow.
    from evergreen.recommender_file.trial import sentences, try_rows

    trial = try_rows(arguments.data, recommender)
    for sentence in sentences(trial):
        print(sentence)
    return ExitCode.REFUSED if trial.is_refused else ExitCode.DONE


def _show(arguments: argparse.Namespace) -> int:
    recommender = recommenders.accepted(_store(arguments), arguments.which)
    print(f"# {recommender.digest}\n{format_recommender(recommender)}", end="")
    return ExitCode.DONE


def _diff(arguments: argparse.Namespace) -> int:
    old, new = (_find(arguments, which) for which in (arguments.old, arguments.new))
    differences = compare(old, new)
    for each in differences:
        print(each)
    print(f"{len(differences)} differences")
    return ExitCode.REFUSED if differences else ExitCode.DONE


def _accept(arguments: argparse.Namespace) -> int:
    recommender, store = read_recommender(arguments.file), _store(arguments)
    before = recommenders.read_accepted(store)
    old = recommenders.read_version(store, before[-1]) if before else None
    version = recommenders.accept(
        store,
        recommender,
        who=arguments.who,
        why=arguments.why,
        now=datetime.now(timezone.utc),
        replaces_other=arguments.replace,
    )
    for each in compare(old, recommender) if old else ():
        print(each)
    print(f"version {version} is used from the next run on: {_described(recommender)}")
    live = current(store)
    if live is not None:
        trained_features = stored_model(
            store, live.model_id, role="live model"
        ).recommender.features
        try:
            recommender.features.expect_continues(trained_features, parent=live.model_id)
        except ContractError as error:
            print(f"the next run cannot continue the live model: {error}")
    return ExitCode.DONE


def _history(arguments: argparse.Namespace) -> int:
    lines = recommenders.read_accepted(_store(arguments))
    if arguments.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    elif not lines:
        print("no recommender was accepted yet")
    else:
        rows = [
            (
                str(line.version),
                local_time(line.time),
                line.who,
                line.name,
                line.digest[:8],
                line.reason,
            )
            for line in lines
        ]
        print_table(HISTORY, rows, wide=arguments.wide)
    return ExitCode.DONE


def _records(arguments: argparse.Namespace) -> int:
    print(RecordFormat(_find(arguments, arguments.which).features).proto(), end="")
    return ExitCode.DONE


def _find(arguments: argparse.Namespace, which: str) -> Recommender:
    path = Path(which)
    return (
        read_recommender(path)
        if path.is_file()
        else recommenders.accepted(_store(arguments), which)
    )


def _store(arguments: argparse.Namespace) -> Path:
    if arguments.store is None:
        raise ContractError(
            "--store is not given, expected the model registry, because no file is named"
        )
    return typed_folder(arguments.store, "--store")


def _described(recommender: Recommender) -> str:
    features, changed = recommender.features, sum(map(len, recommender.settings.values()))
    lists = f" and {len(features.lists)} lists" if features.lists else ""
    return (
        f"{recommender.name}, {len(features.numeric)} numeric and {len(features.categorical)} "
        f"categorical features{lists}, {changed} settings named, digest {recommender.digest[:8]}"
    )


if __name__ == "__main__":
    sys.exit(main())
