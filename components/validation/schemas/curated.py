"""The schemas that people accepted: versions below the model store, and the journal of who accepted which and why.

Layout: `<store>/schemas/<n>.pbtxt`, numbered from 1, and `<store>/schemas/journal.jsonl`. A version counts from its
line in the journal on: a file without one was left by an accept that was killed, and the next accept writes it anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from components.runtime.durable import append_line, write_whole
from components.runtime.errors import ContractError
from components.validation.schemas.compare import LOOSER, OTHER, compare
from components.validation.schemas.files import expect_sound, read_schema

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class Accepted:
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
    base_sha256: str | None
    loosened: list[str]
    """Rules that it loosens, each `FEATURE.rule`, by the word of who accepted it."""


def folder_of(store: Path) -> Path:
    """Where the versions lie."""
    return store / "schemas"


def version_path(store: Path, version: int) -> Path:
    """The file of one version."""
    return folder_of(store) / f"{version}.pbtxt"


def read_journal(store: Path) -> list[Accepted]:
    """Every accepted version, oldest first.

    Raises:
        ContractError: a line is none; names the file and the line.
    """
    path = folder_of(store) / JOURNAL
    if not path.exists():
        return []
    # A last line without its newline is a torn append: nothing was accepted.
    *lines, _ = path.read_bytes().split(b"\n")
    return [_accepted(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]


def _accepted(line: bytes, source: str) -> Accepted:
    try:
        return Accepted(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise ContractError(f"{source} is not an accepted schema: {error}") from error


def newest(store: Path) -> Accepted | None:
    """The version in force; None where nobody accepted one.

    Raises:
        ContractError: its file is not the one that was accepted.
    """
    lines = read_journal(store)
    if not lines:
        return None
    path = version_path(store, lines[-1].version)
    try:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ContractError(f"schema {path} cannot be read: {error.strerror}") from error
    if sha256 != lines[-1].sha256:
        raise ContractError(f"schema {path} has SHA-256 {sha256}, expected {lines[-1].sha256}: it was changed in place")
    return lines[-1]


def schema_in_force(store: Path, of_champion: Path | None) -> Path | None:
    """The file by which a round judges: the newest accepted one, else the champion's; None = neither is there."""
    accepted = newest(store)
    return version_path(store, accepted.version) if accepted else of_champion


def accept(
    store: Path,
    source: Path,
    *,
    of_champion: tuple[str, Path] | None,
    who: str,
    reason: str,
    run: str | None = None,
    loosen: Sequence[str] = (),
) -> Accepted:
    """Makes the schema in `source` the store's newest version: all of it, or nothing.

    Args:
        store: The model store.
        source: Text protobuf.
        of_champion: Id and schema of the live model, the base where nobody accepted a version yet.
        who: Who accepts.
        reason: Why.
        run: The run that proposed it.
        loosen: Rules that it may loosen, each `FEATURE.rule`.

    Raises:
        ContractError: it is no sound schema; says nothing new; loosens a rule that `loosen` does not name; or `loosen`
            names a rule that it does not loosen.
    """
    schema = read_schema(source)
    expect_sound(schema, f"schema {source}")
    if not reason.strip():
        raise ContractError("reason is empty, expected why this schema is accepted")
    with _alone(store):
        before = newest(store)
        base, path = (f"version {before.version}", version_path(store, before.version)) if before else ("none", None)
        if path is None and of_champion is not None:
            base, path = f"model {of_champion[0]}", of_champion[1]
        loosened = _check_loosened(path, schema, loosen)
        content = source.read_bytes()
        line = Accepted(
            version=before.version + 1 if before else 1,
            time=datetime.now(timezone.utc).isoformat(),
            who=who,
            reason=reason,
            source=str(source),
            run=run,
            sha256=hashlib.sha256(content).hexdigest(),
            base=base,
            base_sha256=hashlib.sha256(path.read_bytes()).hexdigest() if path else None,
            loosened=loosened,
        )
        write_whole(version_path(store, line.version), content)
        append_line(folder_of(store) / JOURNAL, json.dumps(asdict(line)))
    return line


def _check_loosened(base: Path | None, schema: Any, loosen: Sequence[str]) -> list[str]:
    differences = compare(read_schema(base), schema) if base else []
    if base and not differences:
        raise ContractError(f"the schema says what {base} says: there is nothing to accept")
    loosened = [each for each in differences if each.kind in (LOOSER, OTHER)]
    if silent := [each for each in loosened if each.name not in loosen]:
        told = "; ".join(f"{each.name} ({each.kind}: {each.old} -> {each.new})" for each in silent)
        flags = " ".join(f"--loosen {each.name}" for each in silent)
        raise ContractError(f"the schema would loosen rules without a word: {told}. Where that is meant: {flags}")
    if wrong := sorted(set(loosen) - {each.name for each in loosened}):
        raise ContractError(f"--loosen names {', '.join(wrong)}, which the schema does not loosen")
    return [each.name for each in loosened]


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """One accept at a time: of two that read the same base, the second must see what the first made of it."""
    folder_of(store).mkdir(parents=True, exist_ok=True)
    with open(folder_of(store) / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
