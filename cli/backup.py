"""`evergreen admin backup` copies a running installation, and `restore` brings the copy back.

A copy may be taken at any moment, because every program can resume from what it finds. Files are
complete or absent, journals only grow, and SQLite copies its databases online. The state is copied
before the lake. If the lake were copied first, rows that the monitor moves during the backup could
be missing from both copies. Buckets and brokers have their own snapshots and are not copied.

A backup contains the hash of each file. A restore compares the hash of a file, then writes the file
in one step, and overwrites nothing. If a restore is killed, run the same command again to resume
it. The backup file contains the target folders, so a person confirms them before a restore writes.
"""

import argparse
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from evergreen.contracts.manifests import Manifest
from evergreen.registry.promotion_journal import JOURNAL_FILE
from evergreen.runtime.durable import UNFINISHED, sha256_file, whole_directory, whole_file
from evergreen.runtime.errors import ContractError, Refused, TemporaryError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.terminal import Advance, progress
from evergreen.storage.uris import typed_folder

FOLDERS = ("state", "archive", "store", "repository", "lake")
"""Parts of an installation, in the order in which they are copied."""
CONTENTS = "backup.json"
"""Name of the file in a backup that lists the location of each part and the hash of each file."""
LOG = "log.db"


@dataclass(frozen=True, kw_only=True)
class BackupContents(Manifest):
    """Content of the file `CONTENTS` in a backup.

    Paths are absolute and cannot be changed, because manifests refer to each other by path.

    Raises:
        ContractError: a part or a path has a form that `evergreen admin backup` never writes.
    """

    locations: dict[str, str]
    """Absolute path of each part by its name in `FOLDERS`, and of the log."""
    files: dict[str, str]
    """SHA-256 of each file, by its path relative to the backup."""
    links: dict[str, str]
    """Target of each symbolic link, by its path relative to the backup."""
    folders: list[str]
    """Relative path of every folder, including empty ones."""

    def __post_init__(self) -> None:
        for name, location in self.locations.items():
            if (
                name not in (*FOLDERS, "log")
                or not os.path.isabs(location)
                or os.path.normpath(location) != location
            ):
                raise ContractError(
                    f"location of {name!r} is {location!r}, expected an absolute path of log or of "
                    f"one of {FOLDERS}"
                )
        for path in (*self.files, *self.links, *self.folders):
            parts = PurePosixPath(path).parts
            if any(str(parent) in self.links for parent in PurePosixPath(path).parents):
                raise ContractError(
                    f"a file is named {path!r}, expected a path that leads through no link"
                )
            is_part = path == LOG or (
                bool(parts) and parts[0] in FOLDERS and parts[0] in self.locations
            )
            if not is_part or ".." in parts or str(PurePosixPath(path)) != path:
                raise ContractError(
                    f"a file is named {path!r}, expected a path below one of the parts"
                )

    def target(self, path: str) -> Path:
        """Return where a file, link or folder of the backup belongs."""
        part, _, rest = path.partition("/")
        return Path(self.locations["log"]) if path == LOG else Path(self.locations[part]) / rest


def backup(output: Path, locations: Mapping[str, Path], *, log: Path | None) -> None:
    """Copy folders and an SQLite log to the new folder `output`.

    If an earlier backup to the same folder was killed, its files are removed first.

    Args:
        output: Folder to create.
        locations: Folders to copy, by their names in `FOLDERS`.
        log: Database file of an SQLite log, or None.

    Raises:
        ContractError: `output` exists, or a database cannot be read.
        TemporaryError: a version was released or a file was removed during the copy. Repeat the
            backup in this case.
    """
    if output.exists():
        raise ContractError(f"--output {output} exists, expected a new folder")
    journal = locations["store"] / JOURNAL_FILE
    before = journal.read_bytes() if journal.exists() else b""
    with whole_directory(output, replace=True) as folder:
        if log is not None:
            _copy_database(log, folder / LOG)
        for path in locations["state"].glob("*.db"):
            _copy_database(path, folder / "state" / path.name)
        try:
            for name in [each for each in FOLDERS if each in locations]:
                is_live = shutil.ignore_patterns("*.db", "*.db-*") if name == "state" else None
                with progress(f"copying {name}, files") as advance:
                    shutil.copytree(
                        locations[name],
                        folder / name,
                        symlinks=True,
                        ignore=is_live,
                        copy_function=partial(_copy, advance=advance),
                        dirs_exist_ok=True,
                    )
        except (shutil.Error, FileNotFoundError) as error:
            raise TemporaryError(
                f"a file was removed while it was copied, start the backup again: {error}"
            ) from error
        if journal.exists() and journal.read_bytes() != before:
            raise TemporaryError(
                f"{journal} grew while it was copied, so store and repository may differ: start "
                "the backup again"
            )
        originals = {**locations, **({"log": log} if log else {})}
        _contents_of(folder, originals).write(folder / CONTENTS)


def _copy(source: str, target: str, *, advance: Advance) -> str:
    shutil.copy2(source, target)
    advance()
    return target


def _contents_of(folder: Path, originals: Mapping[str, Path]) -> BackupContents:
    files, links, folders = {}, {}, []
    paths = sorted(folder.rglob("*"))
    with progress("hashing", total=len(paths)) as advance:
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                links[name] = os.readlink(path)
            elif path.is_dir():
                folders.append(name)
            else:
                files[name] = sha256_file(path)
            advance()
    locations = {name: os.path.normpath(path.absolute()) for name, path in originals.items()}
    return BackupContents(locations=locations, files=files, links=links, folders=folders)


def restore(
    folder: Path, *, within: Path | None = None, confirm: Callable[[dict[str, Path]], bool]
) -> dict[str, Path]:
    """Copy each part of the backup in `folder` to its original location.

    If a restore was killed, call the function again to resume the restore.

    Args:
        folder: Folder that `backup` created.
        within: The folder that all parts must belong to. If `within` is None, `confirm` is called
            instead.
        confirm: Receives the path of each part by its name, and returns whether the parts may be
            written to these paths.

    Returns:
        Path of each part, by its name.

    Raises:
        ContractError: the folder is not a backup, or a file of the backup is corrupt or absent. The
            error is also raised if the location of a part is outside `within`, or if it contains
            other files.
        Refused: `confirm` returned False.
    """
    path = folder / CONTENTS
    if not path.is_file():
        raise ContractError(
            f"{path} is absent, expected a folder that `evergreen admin backup` wrote"
        )
    contents = BackupContents.read(path)
    locations = {name: Path(location) for name, location in contents.locations.items()}
    for name, location in locations.items():
        if within is not None and not location.resolve().is_relative_to(within.resolve()):
            raise ContractError(f"{name} belongs to {location}, expected a folder within {within}")
    for name in contents.files:
        if not (folder / name).is_file():
            raise ContractError(f"{folder / name} is absent, expected all files of {path}")
    _expect_nothing_else(contents)
    if within is None and not confirm(locations):
        raise Refused("nothing was restored: nobody confirmed the folders")
    for name in locations.keys() - {"log"}:
        locations[name].mkdir(parents=True, exist_ok=True)
    for name in contents.folders:
        contents.target(name).mkdir(parents=True, exist_ok=True)
    with progress("restoring, files", total=len(contents.files)) as advance:
        for name, sha256 in contents.files.items():
            _restore_file(folder / name, contents.target(name), sha256)
            advance()
    for name, link in contents.links.items():
        if not contents.target(name).is_symlink():
            contents.target(name).symlink_to(link)
    # Start with the deepest folder, because a folder's time changes when something is written into
    # it.
    for name in reversed(contents.folders):
        shutil.copystat(folder / name, contents.target(name))
    return locations


def _expect_nothing_else(contents: BackupContents) -> None:
    """Refuse files that are not from the backup, and remove unfinished files of a killed restore.

    Raises:
        ContractError: a file is not part of the backup, or its content differs.
    """
    expected = {contents.target(name): sha256 for name, sha256 in contents.files.items()}
    links = {contents.target(name): link for name, link in contents.links.items()}
    for name, location in contents.locations.items():
        for path in _files_of(Path(location)):
            if path.is_symlink():
                is_ours = links.get(path) == os.readlink(path)
            elif path in expected:
                is_ours = sha256_file(path) == expected[path]
            elif is_ours := _is_unfinished(path, expected):
                path.unlink()
            if not is_ours:
                raise ContractError(
                    f"{name}: {path} is not a file of this backup, expected an absent or empty "
                    f"{location}"
                )


def _files_of(location: Path) -> Iterator[Path]:
    if location.is_symlink() or location.is_file():
        yield location
        return
    for folder, folders, names in os.walk(location):
        yield from (Path(folder) / name for name in names)
        yield from (path for name in folders if (path := Path(folder) / name).is_symlink())


def _is_unfinished(path: Path, expected: Mapping[Path, Any]) -> bool:
    """Return whether the path is a temporary file that `durable.whole_file` left after a crash."""
    match = UNFINISHED.fullmatch(path.name)
    return match is not None and path.with_name(match[1]) in expected


def _restore_file(source: Path, target: Path, sha256: str) -> None:
    if not target.exists():
        with whole_file(target) as file:
            with open(source, "rb") as content:
                shutil.copyfileobj(content, file, 1 << 20)
            file.flush()
            if (found := sha256_file(Path(file.name))) != sha256:
                raise ContractError(
                    f"{source} has sha256 {found}, expected {sha256}: the backup is corrupt. "
                    "Repair this file and call restore again; the other restored files stay"
                )
            # Set the modification time before the rename to the final name, because extraction
            # recognizes late files by this time.
            shutil.copystat(source, file.name)


def _copy_database(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    try:
        reading = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
        with closing(reading) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
    except sqlite3.Error as error:
        raise ContractError(
            f"{source} cannot be copied: {error}, expected an SQLite database"
        ) from error


def _ask_for_confirmation(locations: dict[str, Path]) -> bool:
    """Ask the person at the terminal for confirmation, and return the answer.

    Raises:
        ContractError: there is no terminal.
    """
    listed = "".join(f"  {name}: {location}\n" for name, location in locations.items())
    if not sys.stdin.isatty():
        raise ContractError(
            f"the backup names folders, expected --within FOLDER or --yes:\n{listed}".rstrip()
        )
    print(f"This backup writes to\n{listed}Go on? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    parser = CommandParser(prog="evergreen admin", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("backup", help="copy an installation while it runs")
    make.add_argument(
        "--output", type=Path, required=True, help="folder to create, on another disk"
    )
    for name, what in {
        "state": "the monitor's state folder",
        "store": "model registry",
        "archive": "the monitor's archive",
        "repository": "Triton's model repository",
        "lake": "click logs",
    }.items():
        needed = name in ("state", "store")
        make.add_argument(
            f"--{name}", required=needed, help=what + ("" if needed else " (default: not copied)")
        )
    make.add_argument(
        "--log", type=Path, help="database file of an SQLite event log (default: not copied)"
    )
    back = commands.add_parser("restore", help="bring a backup back, with all programs stopped")
    back.add_argument("backup", type=Path, help="folder that `evergreen admin backup` created")
    back.add_argument(
        "--within",
        type=Path,
        help="folder that all parts must belong to (default: ask at the terminal)",
    )
    back.add_argument(
        "--yes", action="store_true", help="write to the backup's paths without asking"
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands. `evergreen.runtime.exit_codes` lists their exit codes."""
    arguments = build_parser().parse_args(argv)
    if arguments.command == "restore":
        confirm = (lambda locations: True) if arguments.yes else _ask_for_confirmation
        for name, location in restore(
            arguments.backup, within=arguments.within, confirm=confirm
        ).items():
            print(f"{name}: {location}")
        return ExitCode.DONE
    given = {name: getattr(arguments, name) for name in FOLDERS}
    locations = {
        name: typed_folder(text, f"--{name}") for name, text in given.items() if text is not None
    }
    backup(arguments.output, locations, log=arguments.log)
    print(f"backup: {arguments.output.absolute()}")
    return ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
