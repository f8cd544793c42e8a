"""Schema files, and the versions that people accept with the command `evergreen data schema`.

The module needs protobuf but not TFDV. The module runs in the validation environment, or on a
cluster in the validation image (`python -m components.validation.schema_versions`). Every schema
has rules for training and for serving (`TRAINING`, `SERVING`).

Two schemas are compared feature by feature, as text. A new version is accepted only if the person
names every changed feature, so that no rule changes unnoticed.

Accepted versions are stored as `<store>/schemas/<n>.pbtxt`, numbered from 1.
`<store>/schemas/journal.jsonl` records who accepted which version and why. A version is valid once
the journal has a line for the version. A killed command may leave a schema file without a journal
entry. The next accepted version overwrites this file.
"""

import argparse
import difflib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import schema_pb2

from evergreen.contracts.manifests import CURRENT, Model
from evergreen.registry import models as registry
from evergreen.registry.runs import run_folder
from evergreen.runtime.durable import append_record, read_records, sha256_file, write_whole
from evergreen.runtime.errors import ContractError, first_line
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, whoami
from evergreen.runtime.terminal import TableColumn, add_listing_flags, local_time, print_table
from evergreen.storage.uris import local_path, typed_folder

TRAINING, SERVING = "TRAINING", "SERVING"
_JOURNAL = "journal.jsonl"
_SCHEMA_WIDE = "schema"
"""Name for the parts of a schema that belong to no feature: environments and shared value lists."""


def read_schema(path: Path) -> Any:
    """Read the schema in the text file `path`.

    Raises:
        ContractError: The file is absent or not a schema.
    """
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), schema_pb2.Schema())
    except (OSError, ValueError, text_format.ParseError) as error:
        raise ContractError(f"schema {path} cannot be read: {first_line(error)}") from error


def format_schema(schema: Any) -> str:
    """Return the schema, or a part of it, as the text of a file."""
    return str(text_format.MessageToString(schema))


def _expect_usable(schema: Any, source: str) -> None:
    """Check that a schema is usable.

    Raises:
        ContractError: A feature has no name, no type, or appears twice. A bound is NaN, or the
            lower bound is above the upper bound. A share is outside [0, 1]. A feature names a list
            of values that does not exist. `default_environment` lacks the training environment.
    """
    names = [feature.name for feature in schema.feature]
    if twins := sorted({name for name in names if names.count(name) > 1}):
        raise ContractError(f"{source} has {', '.join(twins)} twice, expected each feature once")
    if TRAINING not in schema.default_environment:
        raise ContractError(
            f"{source} has default_environment {list(schema.default_environment)}, without "
            f"{TRAINING}"
        )
    for feature in schema.feature:
        for fault in _faults_of(feature, {named.name for named in schema.string_domain}):
            raise ContractError(f"{source}: feature {feature.name!r} has {fault}")


def _faults_of(feature: Any, lists: set[str]) -> Iterator[str]:
    if not feature.name or not feature.type:
        yield "no name or no type"
    kind = feature.WhichOneof("domain_info")
    if kind in ("int_domain", "float_domain"):
        domain = getattr(feature, kind)
        low = domain.min if domain.HasField("min") else -math.inf
        high = domain.max if domain.HasField("max") else math.inf
        if not low <= high:
            yield f"bounds {low} to {high}, expected the lower one first, and no NaN"
    if kind == "domain" and feature.domain not in lists:
        yield f"domain {feature.domain!r}, which is not in the schema"
    if not 0 <= feature.presence.min_fraction <= 1:
        yield f"min_fraction {feature.presence.min_fraction}, expected 0 to 1"


# -- differences


def compare_schemas(old: Any, new: Any) -> dict[str, str]:
    """Return a unified diff of each changed feature's text, and of `_SCHEMA_WIDE`."""
    before, after = _texts(old), _texts(new)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {
        name: "\n".join(
            difflib.unified_diff(before.get(name, []), after.get(name, []), name, name, lineterm="")
        )
        for name in changed
    }


def _texts(schema: Any) -> dict[str, list[str]]:
    """Return the lines of text for each feature, and for the parts that belong to no feature."""
    texts, rest = defaultdict[str, list[str]](list), schema_pb2.Schema()
    rest.CopyFrom(schema)
    del rest.feature[:]
    for name, part in [
        *((feature.name, feature) for feature in schema.feature),
        (_SCHEMA_WIDE, rest),
    ]:
        texts[name] += format_schema(part).splitlines()
    return texts


# -- accepted versions


@dataclass(frozen=True, kw_only=True)
class AcceptedSchema:
    """Entry of the journal of accepted schemas."""

    version: int
    time: str
    who: str
    reason: str
    source: str
    """The file that was accepted."""
    run: str | None
    """Run that proposed the schema. None if a person wrote the schema file."""
    sha256: str
    """SHA-256 of the schema file."""
    base: str
    """Schema that this version was compared with: `version <n>`, `model <id>`, or `none`."""
    changed: list[str]
    """Features that differ from `base`. The person who accepted the schema named these features."""


def _schemas_folder(store: Path) -> Path:
    """Return the folder of the versions."""
    return store / "schemas"


def version_path(store: Path, version: int) -> Path:
    """Return the file of one version."""
    return _schemas_folder(store) / f"{version}.pbtxt"


def read_accepted(store: Path) -> list[AcceptedSchema]:
    """Return every accepted version, oldest first.

    Raises:
        ContractError: A line of the journal is corrupt. The error names the file and the line.
    """
    return read_records(
        _schemas_folder(store) / _JOURNAL, AcceptedSchema, name="an accepted schema"
    )


def _newest_accepted(store: Path) -> AcceptedSchema | None:
    """Return the newest accepted version, or None if nobody accepted a version.

    Raises:
        ContractError: The version's file is absent, or was changed after it was accepted.
    """
    newest = next(reversed(read_accepted(store)), None)
    if newest is not None:
        path = version_path(store, newest.version)
        if not path.is_file() or sha256_file(path) != newest.sha256:
            raise ContractError(
                f"schema {path} is absent or was changed in place since it was accepted"
            )
    return newest


def schema_in_force(store: Path, of_champion: Path | None) -> Path | None:
    """Return the schema file in force: the newest accepted version, else the champion's."""
    accepted = _newest_accepted(store)
    return version_path(store, accepted.version) if accepted else of_champion


def accept_schema(
    store: Path,
    source: Path,
    *,
    of_champion: tuple[str, Path] | None,
    who: str,
    reason: str,
    run: str | None = None,
    change: Sequence[str] = (),
) -> AcceptedSchema:
    """Make the schema in `source` the registry's newest version, completely or not at all.

    The schema is compared with the newest accepted version. If no version was accepted yet, the
    comparison uses `of_champion`, the id and schema of the live model. `change` names the features
    that may differ.

    Raises:
        ContractError: The schema cannot be used, changes nothing, or changes other features than
            `change` names.
    """
    schema = read_schema(source)
    _expect_usable(schema, f"schema {source}")
    if not reason.strip():
        raise ContractError("reason is empty, expected the reason for this version")
    before = _newest_accepted(store)
    base, path = (
        (f"version {before.version}", version_path(store, before.version))
        if before
        else ("none", None)
    )
    if path is None and of_champion is not None:
        base, path = f"model {of_champion[0]}", of_champion[1]
    line = AcceptedSchema(
        version=before.version + 1 if before else 1,
        time=datetime.now(timezone.utc).isoformat(),
        who=who,
        reason=reason,
        source=str(source),
        run=run,
        sha256=sha256_file(source),
        base=base,
        changed=_check_changed(path, schema, change),
    )
    write_whole(version_path(store, line.version), source.read_bytes())
    append_record(_schemas_folder(store) / _JOURNAL, line)
    return line


def _check_changed(base: Path | None, schema: Any, change: Sequence[str]) -> list[str]:
    changed = list(compare_schemas(read_schema(base), schema)) if base else []
    if base and not changed:
        raise ContractError(f"the schema equals {base}: there is nothing to accept")
    if unnamed := [name for name in changed if name not in change]:
        flags = " ".join(f"--change {name}" for name in unnamed)
        raise ContractError(
            f"the schema changes {', '.join(unnamed)} (`diff` shows how). If that is intended: "
            f"{flags}"
        )
    if wrong := sorted(set(change) - set(changed)):
        raise ContractError(
            f"--change is {', '.join(wrong)}, expected only features that the schema changes: "
            f"{', '.join(changed) or 'none'}"
        )
    return changed


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their flags."""
    parser = CommandParser(
        prog="evergreen data schema", description="Curates the schema of the training rows."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser(
        "show",
        help="print the newest accepted schema, or the live model's schema if none is accepted",
    )
    show.add_argument(
        "which",
        nargs="?",
        default="force",
        help="force (default), live, a version, run:NAME or a file",
    )
    diff = commands.add_parser("diff", help="compare two schemas, feature by feature")
    diff.add_argument(
        "old", help="force, live, a version, run:NAME (what the run proposes, --work) or a file"
    )
    diff.add_argument("new", help="the same")
    accept = commands.add_parser("accept", help="put a proposed or an edited schema in force")
    accept.add_argument("which", help="run:NAME (what the run proposes, --work) or a file")
    accept.add_argument("--reason", required=True, help="why")
    accept.add_argument("--who", default=whoami(), help="who accepts it (%(default)s)")
    accept.add_argument(
        "--change", action="append", default=[], metavar="FEATURE", help="may change (repeatable)"
    )
    log = commands.add_parser(
        "log", help="list the accepted schemas with author, time, reason and changes"
    )
    add_listing_flags(log)
    for each in (show, diff, accept, log):
        each.add_argument("--store", required=True, help="folder or URI of the registry")
    for each in (show, diff, accept):
        each.add_argument("--work", default="", help="folder for big files, for run:NAME")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `diff` returns `REFUSED` if the schemas differ."""
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
    for text in differences.values():
        print(text)
    print(f"differing features: {len(differences)}")
    return ExitCode.REFUSED if differences else ExitCode.DONE


def _accept(store: Path, arguments: argparse.Namespace) -> int:
    which = arguments.which
    line = accept_schema(
        store,
        _find_schema(store, which, arguments.work),
        of_champion=_live_schema(store),
        who=arguments.who,
        reason=arguments.reason,
        run=which.removeprefix("run:") if which.startswith("run:") else None,
        change=arguments.change,
    )
    print(
        f"version {line.version} is in force from the next run on: "
        f"{version_path(store, line.version)}"
    )
    return ExitCode.DONE


def _log(store: Path, arguments: argparse.Namespace) -> int:
    lines = read_accepted(store)
    if arguments.json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    elif not lines:
        print("no schema was accepted yet: each run is checked by the schema of its champion")
    else:
        print_table(LOG, map(_cells, lines), wide=arguments.wide)
    return ExitCode.DONE


LOG = (
    TableColumn(name="version", is_number=True),
    TableColumn(name="accepted"),
    TableColumn(name="by", is_flexible=True),
    TableColumn(name="from", is_flexible=True),
    TableColumn(name="over", is_flexible=True, is_wide_only=True),
    TableColumn(name="changed", is_flexible=True),
    TableColumn(name="reason", is_flexible=True),
)


def _cells(line: AcceptedSchema) -> tuple[str | None, ...]:
    return (
        str(line.version),
        local_time(line.time),
        line.who,
        line.source,
        line.base,
        ", ".join(line.changed),
        line.reason,
    )


def _live_schema(store: Path) -> tuple[str, Path] | None:
    release = registry.champion(store, CURRENT)
    return (release.model_id, local_path(release.model_uri) / Model.SCHEMA) if release else None


def _find_schema(store: Path, which: str, work: str) -> Path:
    """Return the path of the schema file that `which` names."""
    live = _live_schema(store)
    if which == "force" and (path := schema_in_force(store, live[1] if live else None)):
        return path
    if which == "live" and live:
        return live[1]
    if which in ("force", "live"):
        raise ContractError(
            f"there is no schema {which!r} in {store}: no model is live yet, and none was accepted"
        )
    if which.startswith("run:"):
        run = run_folder(store, which.removeprefix("run:")).name
        path = typed_folder(work, "--work") / run / "validation" / "proposed_schema.pbtxt"
        hint = f"run {run} proposes no schema: {path} is absent"
    elif which.isdigit():
        path, hint = (
            version_path(store, int(which)),
            f"version {which} was never accepted in {store}",
        )
    else:
        path, hint = (
            Path(which),
            f"schema {which!r} is not a file, expected a file, force, live, a version or run:NAME",
        )
    if not path.is_file():
        raise ContractError(hint)
    return path


if __name__ == "__main__":
    sys.exit(main())
