"""Schema files: read, checked, compared rule by rule, and the versions that people accepted by `evergreen schema`.

Needs protobuf, not TFDV: runs in the validation environment, or on a cluster in its image
(`python -m components.validation.schema_versions`). Every schema says what holds in training and in serving
(`TRAINING`, `SERVING`).

A difference of two schemas is `stricter` only if that is certain: whatever the old schema refuses, the new one refuses
too. Any other is `looser` and must be accepted by name, except a `note`, by which TFDV does not judge.

Accepted versions are stored as `<store>/schemas/<n>.pbtxt`, numbered from 1, with who accepted which and why in
`<store>/schemas/journal.jsonl`. A version counts from its line in the journal on: a file without one was left by an
accept that was killed, and the next accept overwrites it.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import schema_pb2

from components.contracts.manifests import CURRENT, Model
from components.runtime.durable import append_line, read_records, sha256_file, write_whole
from components.runtime.errors import ContractError, first_line
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.runtime.flags import CommandParser, whoami
from components.storage.uris import local_path, typed_folder
from components.store import models as model_store
from components.store.runs import run_folder

TRAINING, SERVING = "TRAINING", "SERVING"
LOOSER, STRICTER, NOTE = "looser", "stricter", "note"
JOURNAL = "journal.jsonl"

_STRICTER_IF_MORE = {"min_fraction", "min_count", "min_domain_mass", "min", "disallow_nan", "disallow_inf"}
_STRICTER_IF_LESS = {"max", "values"}
"""Rules that become stricter by a larger value, and by a smaller one or a part of a set."""
_FITTING = {("INT", "int_domain"), ("FLOAT", "float_domain"), ("BYTES", "values")}
"""Types and the domains that refuse more values of them; with any other domain TFDV drops other checks."""
_OWN_RULE = {
    *("name", "type", "presence", "in_environment", "not_in_environment", "distribution_constraints", "domain"),
    *("int_domain", "float_domain", "string_domain"),
}
"""Fields of a feature that are compared as rules of their own."""
_REMARK = "annotation"
_Rules = dict[str, Any]
"""Values by the rule's name."""


def read_schema(path: Path) -> Any:
    """The schema in the text file `path`.

    Raises:
        ContractError: the file is absent or not a schema.
    """
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), schema_pb2.Schema())
    except (OSError, ValueError, text_format.ParseError) as error:
        raise ContractError(f"schema {path} cannot be read: {first_line(error)}") from error


def format_schema(schema: Any) -> str:
    """The schema as text, one file's content."""
    return str(text_format.MessageToString(schema))


def expect_sound(schema: Any, source: str) -> None:
    """Refuses a schema that cannot be used to judge rows.

    Raises:
        ContractError: a feature has no name, no type, or is there twice; a bound is NaN or crosses the other one; a
            share is none; a list of values is named and absent; or the environments do not include training.
    """
    names = [feature.name for feature in schema.feature]
    if twins := sorted({name for name in names if names.count(name) > 1}):
        raise ContractError(f"{source} has {', '.join(twins)} twice, expected each feature once")
    if TRAINING not in schema.default_environment:
        raise ContractError(f"{source} has default_environment {list(schema.default_environment)}, without {TRAINING}")
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
    if feature.HasField("distribution_constraints"):
        if kind not in ("string_domain", "domain"):
            yield "distribution_constraints without a list of values"
        if not 0 <= feature.distribution_constraints.min_domain_mass <= 1:
            yield f"min_domain_mass {feature.distribution_constraints.min_domain_mass}, expected 0 to 1"


# -- differences


class SchemaDifference(NamedTuple):
    """One rule of one feature in which two schemas differ."""

    feature: str
    rule: str
    kind: str
    old: str
    new: str

    @property
    def name(self) -> str:
        """What `--loosen` calls it."""
        return f"{self.feature}.{self.rule}"


def compare_schemas(old: Any, new: Any) -> list[SchemaDifference]:
    """Every difference, by feature in the old schema's order, new features last."""
    features_old, features_new = ({f.name: f for f in schema.feature} for schema in (old, new))
    found = list(_differences("schema", _rules_of_schema(old), _rules_of_schema(new)))
    for name in [*features_old, *(name for name in features_new if name not in features_old)]:
        before, after = features_old.get(name), features_new.get(name)
        if before is None:
            found.append(SchemaDifference(name, "column", LOOSER, "unknown, so refused", "known"))
        elif after is None:
            # If it was required, rows without it pass now; rows with it do not.
            found.append(SchemaDifference(name, "column", LOOSER, "known", "unknown, so its rules are gone"))
        else:
            found += _differences(name, _rules_of_feature(before, old), _rules_of_feature(after, new))
    return found


def _differences(feature: str, old: _Rules, new: _Rules) -> Iterator[SchemaDifference]:
    """Of the rules that both have: those of two kinds of domains cannot be compared, but the kind is a rule too."""
    for rule, before in old.items():
        if rule in new and before != (after := new[rule]):
            is_stricter = (
                (rule in _STRICTER_IF_MORE and after > before)
                or (rule in _STRICTER_IF_LESS and after < before)
                or (rule == "domain" and before == "none" and (new["type"], after) in _FITTING)
            )
            kind = NOTE if rule == _REMARK else STRICTER if is_stricter else LOOSER
            texts = (_format_rule(before), _format_rule(after))
            if isinstance(before, frozenset):
                texts = (f"without {_format_rule(after - before)}", f"without {_format_rule(before - after)}")
            yield SchemaDifference(feature, rule, kind, *texts)


def _rules_of_schema(schema: Any) -> _Rules:
    others = [f.name for f in schema.DESCRIPTOR.fields if f.name not in ("feature", "string_domain")]
    return {name: getattr(schema, name) for name in others}


def _rules_of_feature(feature: Any, schema: Any) -> _Rules:
    required_in = {*schema.default_environment, *feature.in_environment} - set(feature.not_in_environment)
    rules = {
        "type": schema_pb2.FeatureType.Name(feature.type),
        "min_fraction": feature.presence.min_fraction,
        "min_count": feature.presence.min_count,
        # Where it is required, rows without it are refused; elsewhere TFDV refuses rows with it.
        "environments": frozenset(required_in),
        "min_domain_mass": feature.distribution_constraints.min_domain_mass,  # 1 if it is not set
    }
    for field in feature.DESCRIPTOR.fields:
        if field.name not in _OWN_RULE:
            value = getattr(feature, field.name)
            is_set = bool(value) if field.label == field.LABEL_REPEATED else feature.HasField(field.name)
            rules[field.name] = (value, is_set)
    return rules | _rules_of_domain(feature, schema)


def _rules_of_domain(feature: Any, schema: Any) -> _Rules:
    """The kind of the feature's domain as the rule `domain`, and the domain's own rules."""
    kind = feature.WhichOneof("domain_info")
    if kind is None:
        return {"domain": "none"}
    domain = getattr(feature, kind)
    if kind in ("domain", "string_domain"):
        if kind == "domain":
            (domain,) = (each for each in schema.string_domain if each.name == domain)
        return {"domain": "values", "values": frozenset(domain.value), "is_categorical": domain.is_categorical}
    if kind not in ("int_domain", "float_domain"):
        return {"domain": kind, kind: domain}
    fields = [field.name for field in domain.DESCRIPTOR.fields if field.name not in ("name", "min", "max")]
    return {
        "domain": kind,
        "min": domain.min if domain.HasField("min") else -math.inf,
        "max": domain.max if domain.HasField("max") else math.inf,
        **{name: getattr(domain, name) for name in fields},
    }


def _format_rule(value: Any) -> str:
    if isinstance(value, frozenset):
        shown = sorted(value)[:5]
        return ", ".join(shown) + (f" and {len(value) - 5} more" if len(value) > 5 else "") if value else "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(str(value[0] if isinstance(value, tuple) else value).split())
    return (text[:60] + "...") if len(text) > 60 else text or "unset"


# -- accepted versions


@dataclass(frozen=True, kw_only=True)
class AcceptedSchema:
    """One line of the journal."""

    version: int
    time: str
    who: str
    reason: str
    source: str
    """The file that was accepted."""
    run: str | None
    """The run that proposed it; None for a file that a person wrote."""
    sha256: str
    """Of the version's bytes."""
    base: str
    """What it was compared with: `version <n>`, `model <id>`, or `none`."""
    loosened: list[str]
    """Rules that it loosens, each `FEATURE.rule`, as named by who accepted it."""


def schemas_folder(store: Path) -> Path:
    """The folder of the versions."""
    return store / "schemas"


def version_path(store: Path, version: int) -> Path:
    """The file of one version."""
    return schemas_folder(store) / f"{version}.pbtxt"


def read_accepted(store: Path) -> list[AcceptedSchema]:
    """Every accepted version, oldest first.

    Raises:
        ContractError: a line of the journal is damaged; names the file and the line.
    """
    return read_records(schemas_folder(store) / JOURNAL, AcceptedSchema, name="an accepted schema")


def newest_accepted(store: Path) -> AcceptedSchema | None:
    """The version in force; None if nobody accepted one.

    Raises:
        ContractError: its file is absent, or not the one that was accepted.
    """
    newest = next(reversed(read_accepted(store)), None)
    if newest is not None:
        path = version_path(store, newest.version)
        if not path.is_file() or sha256_file(path) != newest.sha256:
            raise ContractError(f"schema {path} is absent or was changed in place since it was accepted")
    return newest


def schema_in_force(store: Path, of_champion: Path | None) -> Path | None:
    """The file by which a round judges: the newest accepted one, else the champion's; None if there is neither."""
    accepted = newest_accepted(store)
    return version_path(store, accepted.version) if accepted else of_champion


def accept_schema(
    store: Path,
    source: Path,
    *,
    of_champion: tuple[str, Path] | None,
    who: str,
    reason: str,
    run: str | None = None,
    loosen: Sequence[str] = (),
) -> AcceptedSchema:
    """Makes the schema in `source` the store's newest version: all of it, or nothing.

    `of_champion`, id and schema of the live model, is the base if no version was accepted yet; `loosen` names the rules
    that it may loosen, each `FEATURE.rule`.

    Raises:
        ContractError: it cannot be used; changes nothing; loosens a rule that `loosen` does not name; or `loosen` names
            a rule that it does not loosen.
    """
    schema = read_schema(source)
    expect_sound(schema, f"schema {source}")
    if not reason.strip():
        raise ContractError("reason is empty, expected why this schema is accepted")
    before = newest_accepted(store)
    base, path = (f"version {before.version}", version_path(store, before.version)) if before else ("none", None)
    if path is None and of_champion is not None:
        base, path = f"model {of_champion[0]}", of_champion[1]
    loosened = _check_loosened(path, schema, loosen)
    line = AcceptedSchema(
        version=before.version + 1 if before else 1,
        time=datetime.now(timezone.utc).isoformat(),
        who=who,
        reason=reason,
        source=str(source),
        run=run,
        sha256=sha256_file(source),
        base=base,
        loosened=loosened,
    )
    write_whole(version_path(store, line.version), source.read_bytes())
    append_line(schemas_folder(store) / JOURNAL, json.dumps(asdict(line)))
    return line


def _check_loosened(base: Path | None, schema: Any, loosen: Sequence[str]) -> list[str]:
    differences = compare_schemas(read_schema(base), schema) if base else []
    if base and not differences:
        raise ContractError(f"the schema equals {base}: there is nothing to accept")
    loosened = [each for each in differences if each.kind == LOOSER]
    if unnamed := [each for each in loosened if each.name not in loosen]:
        listed = "; ".join(f"{each.name} ({each.old} -> {each.new})" for each in unnamed)
        flags = " ".join(f"--loosen {each.name}" for each in unnamed)
        raise ContractError(f"the schema would loosen {listed}. If that is intended: {flags}")
    if wrong := sorted(set(loosen) - {each.name for each in loosened}):
        raise ContractError(f"--loosen names {', '.join(wrong)}, which the schema does not loosen")
    return [each.name for each in loosened]


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = CommandParser(prog="evergreen schema", description="Curates the schema of the training rows.")
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
        "--loosen", action="append", default=[], metavar="FEATURE.rule", help="may be loosened (repeatable)"
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
