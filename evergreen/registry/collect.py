"""`evergreen admin collect` lists the old files of an installation, and removes them with `--yes`.

The command removes the work folders of ended runs and the leftovers of killed writes. The command
also removes the weights, vocabularies, statistics and graphs of models that no rollback needs.
Manifests, verdicts, cards, reports, notes and the journal are small and are never removed. The live
model, a canary, the newest versions that were live, and the work folders of runs without an outcome
are never removed either, however old the files are.

Each folder is renamed before its files are removed. A killed command therefore leaves either intact
folders or leftovers, and the next call removes the leftovers. During the command, no active run may
name an old model as its parent or champion. A removed model cannot be promoted or continued, and a
removed version cannot be the target of a rollback. A command that needs a removed file reports that
the file is absent.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from evergreen.contracts.manifests import Model, Release
from evergreen.registry import promotion_journal
from evergreen.registry.models import graph_folder, model_folder, release_path
from evergreen.registry.promotion_journal import moment_of
from evergreen.registry.runs import read_outcomes
from evergreen.runtime.durable import UNFINISHED
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.runtime.plain_text import show
from evergreen.runtime.terminal import progress
from evergreen.storage.uris import typed_folder

_KEEP_DAYS, _KEEP_VERSIONS, _MAX_DAYS = 30.0, 10, 36_500
_LEFTOVER = ".collected"
"""Suffix of a folder that is being removed."""


@dataclass(frozen=True, kw_only=True)
class Removable:
    """File or folder that the command can remove."""

    path: Path
    what: str
    """Description of the kind and the age of the file or folder, for people."""
    num_bytes: int

    def remove(self) -> None:
        """Remove the file or folder.

        If the process is killed, a renamed file or folder remains. The next collection removes the
        remainder.
        """
        if not self.path.exists():
            return  # an enclosing folder was already removed
        leftover = self.path
        if not leftover.name.endswith(_LEFTOVER):
            leftover = self.path.with_name(self.path.name + _LEFTOVER)
            self.path.rename(leftover)
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def find(
    store: Path, work: Path | None, *, before: datetime, keep_versions: int
) -> list[Removable]:
    """Return the files and folders that can be removed.

    Args:
        store: Folder of the model registry.
        work: Folder of the runs' intermediate files. None = do not search for intermediate files.
        before: Time limit. Files that are newer, or that belong to a newer run, are not returned.
        keep_versions: Number of versions to keep: the live version, and the newest versions that
            were live before.

    Raises:
        ContractError: the journal or a manifest is corrupt.
    """
    found = _left_behind(store, "**/*", before)
    if work is not None:
        found += [*_left_behind(work, "*", before), *_work_of_runs(store, work, before)]
    lines = promotion_journal.read_journal(store)
    newest = list(dict.fromkeys(line.version for line in reversed(lines)))[:keep_versions]
    wanted: set[int | None] = set(newest)
    if lines:
        # Keep the version before the newest change, and the version that a rollback would restore.
        wanted |= {
            lines[-1].previous_version,
            Release.read(release_path(store, lines[-1].version)).previous_version,
        }
    kept = {line.version: line.model_id for line in lines if line.version in wanted}
    if (canary := promotion_journal.canary_at_work(store)) is not None:
        kept[canary.version] = canary.model_id
    for path in sorted((store / "models").glob(f"*/{Model.MANIFEST}")):
        model = Model.read(path)
        if model.model_id not in kept.values() and moment_of(model.created_at) < before:
            parts = {name: model_folder(store, model.model_id) / name for name in Model.PARTS}
            found += [
                _removable(
                    folder, f"{name} of model {model.model_id}, made {model.created_at[:10]}"
                )
                for name, folder in parts.items()
                if folder.exists()
            ]
    for path in sorted((store / "releases").glob("*.json")):
        release = Release.read(path)
        graph = graph_folder(store, release.version)
        if (
            release.version not in kept
            and moment_of(release.published_at) < before
            and graph.exists()
        ):
            text = f"graph of version {release.version}, published {release.published_at[:10]}"
            found.append(_removable(graph, text))
    return found


def _work_of_runs(store: Path, work: Path, before: datetime) -> list[Removable]:
    ended = {outcome.run: outcome.ended_at for outcome in read_outcomes(store)}
    folders = {path.name: path for path in work.iterdir() if path.is_dir()}
    return [
        _removable(folders[run], f"work of run {run}, ended {at[:10]}")
        for run, at in ended.items()
        if run in folders and moment_of(at) < before
    ]


def _left_behind(folder: Path, pattern: str, before: datetime) -> list[Removable]:
    """Return the files and folders of garbage collections and writes that were killed.

    An unfinished write is not returned if one of its files is newer than `before`, because the
    write may still be active.
    """
    found = []
    for path in sorted(folder.glob(pattern)):
        if path.name.endswith(_LEFTOVER):
            found.append(_removable(path, f"left by a collection that was killed: {path}"))
        elif UNFINISHED.fullmatch(path.name) and not path.is_symlink():
            newest = max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
            if newest < before.timestamp():
                found.append(_removable(path, f"left by a write that was killed: {path}"))
    return found


def _removable(path: Path, what: str) -> Removable:
    files = [each for each in (path, *path.rglob("*")) if each.is_file()]
    return Removable(path=path, what=what, num_bytes=sum(each.stat().st_size for each in files))


def build_parser() -> argparse.ArgumentParser:
    """Build the command's parser."""
    parser = CommandParser(
        prog="evergreen admin collect", description=(__doc__ or "").partition("\n\n")[2]
    )
    add_store_flag(parser)
    parser.add_argument(
        "--work", help="folder of the runs' intermediate files; by default it is not searched"
    )
    parser.add_argument(
        "--days", type=float, default=_KEEP_DAYS, help="younger files are not removed"
    )
    parser.add_argument(
        "--keep-versions",
        type=int,
        default=_KEEP_VERSIONS,
        help="newest versions that were live, which stay for a rollback",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="remove the files; without this flag they are only listed",
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None, *, now: datetime | None = None) -> int:
    """Run the command and return its exit code (`evergreen.runtime.exit_codes`)."""
    arguments = build_parser().parse_args(argv)
    # The negated condition also rejects NaN.
    if not 1 <= arguments.days <= _MAX_DAYS or arguments.keep_versions < 2:
        given = f"--days {arguments.days:g} and --keep-versions {arguments.keep_versions}"
        raise ContractError(
            f"{given} are given, expected 1 to {_MAX_DAYS:,} days, and at least 2 versions for a "
            "rollback"
        )
    store = typed_folder(arguments.store, "--store")
    work = typed_folder(arguments.work, "--work") if arguments.work else None
    before = (now or datetime.now(timezone.utc)) - timedelta(days=arguments.days)
    found = find(store, work, before=before, keep_versions=arguments.keep_versions)
    for each in found:
        show(f"{each.num_bytes / 2**20:10.1f} MiB  {each.what}")
    total = f"{sum(each.num_bytes for each in found) / 2**20:.1f} MiB in {len(found)} folders"
    if arguments.yes:
        with progress("removing", total=len(found)) as advance:
            for each in found:
                each.remove()
                advance()
        print(f"removed {total}")
    else:
        print(f"{total} can be removed; --yes removes them" if found else "nothing to remove")
    return ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
