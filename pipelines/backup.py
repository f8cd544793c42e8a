"""`evergreen backup` copies an installation while it runs, `evergreen restore` brings the copy back.

Programs write so that the next one goes on from whatever a copy catches: files are whole or absent, journals are only
appended to, and SQLite copies its databases online. The order counts: what the monitor has given to the lake must not
be missing from both. Buckets and brokers have snapshots of their own, and are left to them.
"""

import argparse
import json
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from components.runtime.durable import whole_directory, write_whole
from components.runtime.errors import ContractError, TemporaryError
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.runtime.flags import CommandParser
from components.storage.uris import typed_folder
from components.store.promotion_journal import JOURNAL_FILE

FOLDERS = ("state", "archive", "store", "repository", "lake")
"""In the order in which they are copied."""
PLACES = "places.json"
"""File of a backup: where each part belongs. Manifests name each other by their paths."""
LOG = "log.db"


def backup(output: Path, places: Mapping[str, Path], *, log: Path | None) -> None:
    """Copies the folders of `places`, by their names in `FOLDERS`, and an SQLite log to the new folder `output`.

    Raises:
        ContractError: `output` exists, or a database cannot be read.
        TemporaryError: a version was released, or a file removed, under the copy's hands: to be begun again.
    """
    if output.exists():
        raise ContractError(f"--output {output} exists, expected a new folder")
    journal = places["store"] / JOURNAL_FILE
    before = journal.read_bytes() if journal.exists() else b""
    with whole_directory(output) as folder:
        if log is not None:
            _copy_database(log, folder / LOG)
        for path in places["state"].glob("*.db"):
            _copy_database(path, folder / "state" / path.name)
        try:
            for name in [each for each in FOLDERS if each in places]:
                is_live = shutil.ignore_patterns("*.db", "*.db-*") if name == "state" else None
                shutil.copytree(places[name], folder / name, symlinks=True, ignore=is_live, dirs_exist_ok=True)
        except (shutil.Error, FileNotFoundError) as error:
            raise TemporaryError(f"a file was removed while it was copied, begin again: {error}") from error
        if journal.exists() and journal.read_bytes() != before:
            raise TemporaryError(f"{journal} grew while it was copied: store and repository may differ, begin again")
        originals = {**places, **({"log": log} if log else {})}
        paths = {name: str(path.absolute()) for name, path in originals.items()}
        write_whole(folder / PLACES, json.dumps(paths, indent=2) + "\n")


def restore(folder: Path) -> dict[str, Path]:
    """Copies each part of the backup in `folder` to where it was; answers where that is, by the part's name.

    Raises:
        ContractError: it is no backup, or something lies already where a part belongs.
    """
    path = folder / PLACES
    if not path.is_file():
        raise ContractError(f"{path} is absent, expected a folder that `evergreen backup` wrote")
    places = {name: Path(place) for name, place in json.loads(path.read_text()).items()}
    for name, place in places.items():
        if place.is_file() or (place.is_dir() and any(place.iterdir())):
            raise ContractError(f"{name} belongs to {place}, which holds files, expected none or an empty folder")
    for name, place in places.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        if name == "log":
            shutil.copy2(folder / LOG, place)
        else:
            shutil.copytree(folder / name, place, symlinks=True, dirs_exist_ok=True)
    return places


def _copy_database(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    try:
        reading = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
        with closing(reading) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
    except sqlite3.Error as error:
        raise ContractError(f"{source} cannot be copied: {error}, expected an SQLite database") from error


def build_parser() -> argparse.ArgumentParser:
    """The flags of both commands."""
    parser = CommandParser(prog="evergreen", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("backup", help="copy an installation while it runs")
    make.add_argument("--output", type=Path, required=True, help="folder to make, on another disk")
    for name, what in {
        "state": "the monitor's folder",
        "store": "model store",
        "archive": "the monitor's archive",
        "repository": "Triton's model repository",
        "lake": "click logs",
    }.items():
        needed = name in ("state", "store")
        make.add_argument(f"--{name}", required=needed, help=what + ("" if needed else "; default: left out"))
    make.add_argument("--log", type=Path, help="file of a log sqlite:///FILE; default: left out")
    back = commands.add_parser("restore", help="bring a backup back, with all programs stopped")
    back.add_argument("backup", type=Path, help="folder that backup made")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the commands; see `runtime.exit_codes` for its exit codes."""
    arguments = build_parser().parse_args(argv)
    if arguments.command == "restore":
        for name, place in restore(arguments.backup).items():
            print(f"{name}: {place}")
        return ExitCode.DONE
    given = {name: getattr(arguments, name) for name in FOLDERS}
    places = {name: typed_folder(text, f"--{name}") for name, text in given.items() if text is not None}
    backup(arguments.output, places, log=arguments.log)
    print(f"backup: {arguments.output.absolute()}")
    return ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
