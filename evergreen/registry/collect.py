"""`evergreen collect`: names what an installation may give up by its age, and removes it with `--yes`.

What goes: work folders of runs that have ended; weights, vocabularies, statistics and graphs of models that nothing
goes back to; what killed writes left. What stays: manifests, verdicts, cards, reports, notes and the journal, which are
small and tell what was. Whatever its age, the live model stays, a canary, the newest versions that were live, and all
of a run without an outcome.

A folder is renamed before its files go, so a command that was killed leaves whole folders and leftovers, which the next
call removes. A run that names an old model as its parent or champion must not be under way. A removed model cannot be
promoted or continued any more, and a removed version cannot be rolled back to; each command then names what is absent.
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
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import show
from evergreen.storage.uris import typed_folder

KEEP_DAYS, KEEP_VERSIONS, MAX_DAYS = 30.0, 10, 36_500
_LEFTOVER = ".collected"
"""End of the name of a folder that is being removed."""


@dataclass(frozen=True, kw_only=True)
class Removable:
    """One folder that may go."""

    path: Path
    what: str
    """For people: what it is and why nothing needs it."""
    num_bytes: int

    def remove(self) -> None:
        """Removes it, whole or to a leftover that the next call finds."""
        if not self.path.exists():
            return  # it was in a folder that went before it
        leftover = self.path
        if not leftover.name.endswith(_LEFTOVER):
            leftover = self.path.with_name(self.path.name + _LEFTOVER)
            self.path.rename(leftover)
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def find(store: Path, work: Path | None, *, before: datetime, keep_versions: int) -> list[Removable]:
    """What may go.

    What ended or was made after `before` stays, and the newest `keep_versions` that were live, the live one among them;
    without `work` the runs' folders are not looked into.

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
        # What the live version replaced, and what a rollback of it goes to.
        wanted |= {lines[-1].previous_version, Release.read(release_path(store, lines[-1].version)).previous_version}
    kept = {line.version: line.model_id for line in lines if line.version in wanted}
    if (canary := promotion_journal.canary_at_work(store)) is not None:
        kept[canary.version] = canary.model_id
    for path in sorted((store / "models").glob(f"*/{Model.MANIFEST}")):
        model = Model.read(path)
        if model.model_id not in kept.values() and moment_of(model.created_at) < before:
            parts = {name: model_folder(store, model.model_id) / name for name in Model.PARTS}
            found += [
                _removable(folder, f"{name} of model {model.model_id}, made {model.created_at[:10]}")
                for name, folder in parts.items()
                if folder.exists()
            ]
    for path in sorted((store / "releases").glob("*.json")):
        release = Release.read(path)
        graph = graph_folder(store, release.version)
        if release.version not in kept and moment_of(release.published_at) < before and graph.exists():
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
    """What killed collections left, and killed writes, unless anything in it is younger: that one may be under way."""
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
    """The command's flags."""
    parser = CommandParser(prog="evergreen collect", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--store", required=True, help="model store, folder or its URI")
    parser.add_argument("--work", help="folder of the runs' intermediate files; default: it is not looked into")
    parser.add_argument("--days", type=float, default=KEEP_DAYS, help="what is younger stays")
    parser.add_argument(
        "--keep-versions",
        type=int,
        default=KEEP_VERSIONS,
        help="newest versions that were live, which stay for a rollback",
    )
    parser.add_argument("--yes", action="store_true", help="remove it; otherwise it is only named")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None, *, now: datetime | None = None) -> int:
    """Runs the command; see `runtime.exit_codes` for its exit codes."""
    arguments = build_parser().parse_args(argv)
    # Not a number compares false with every bound.
    if not 1 <= arguments.days <= MAX_DAYS or arguments.keep_versions < 2:
        given = f"--days {arguments.days:g} and --keep-versions {arguments.keep_versions}"
        raise ContractError(
            f"{given} are given, expected at least 1 day and 2 versions: one to go back to; and at most {MAX_DAYS:,} "
            "days"
        )
    store = typed_folder(arguments.store, "--store")
    work = typed_folder(arguments.work, "--work") if arguments.work else None
    before = (now or datetime.now(timezone.utc)) - timedelta(days=arguments.days)
    found = find(store, work, before=before, keep_versions=arguments.keep_versions)
    for each in found:
        show(f"{each.num_bytes / 2**20:10.1f} MiB  {each.what}")
    total = f"{sum(each.num_bytes for each in found) / 2**20:.1f} MiB in {len(found)} folders"
    if arguments.yes:
        for each in found:
            each.remove()
        print(f"removed {total}")
    else:
        print(f"{total} may go; --yes removes them" if found else "nothing may go")
    return ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
