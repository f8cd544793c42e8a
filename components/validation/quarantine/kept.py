"""What is set aside, kept in the model store, and the journal of what people took back.

The step's own folder goes with the work folder's retention; the store stays. Layout, below `<store>/quarantine`:
`runs/<run>/` (`quarantine.json` and `rows/*.parquet`: raw columns, `quarantine_rule`, `quarantine_reason`),
`journal.jsonl` (one line per replay) and `taken/<run>.json` (the replays that a run learnt from).

Nothing is ever removed from it by us. The lake is not touched either: a row set aside lies there as it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from components.contracts.manifests import RawDataset
from components.runtime.durable import append_line, whole_directory, write_whole
from components.runtime.errors import ContractError
from components.store.run_notes import run_folder

MANIFEST = "quarantine.json"
JOURNAL = "journal.jsonl"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows that one run set aside."""

    run: str
    time: str
    source_uri: str
    raw_digest: str
    """Of the rows before any was set aside."""
    num_rows: int
    num_by_rule: dict[str, int]
    last_event_time: str
    """Of the run's window."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One line of the journal: rows that people took back."""

    time: str
    run: str
    rules: list[str]
    num_rows: int
    who: str
    reason: str


def root(store: Path) -> Path:
    """Where all of it lies."""
    return store / "quarantine"


def rows_folder(store: Path, run: str) -> Path:
    """Where the rows that `run` set aside are kept."""
    return root(store) / "runs" / run_folder(store, run).name / "rows"


def keep(store: Path, run: str, rows: Path, raw: RawDataset, num_by_rule: dict[str, int]) -> Path:
    """Keeps a copy of the Parquet files in `rows`, replacing that of an earlier try of the run; gives its folder."""
    final = rows_folder(store, run)
    batch = Batch(
        run=run,
        time=datetime.now(timezone.utc).isoformat(),
        source_uri=raw.source_uri,
        raw_digest=raw.digest,
        num_rows=sum(num_by_rule.values()),
        num_by_rule=num_by_rule,
        last_event_time=raw.last_event_time,
    )
    with whole_directory(final.parent, replace=True) as aside:
        shutil.copytree(rows, aside / final.name)
        document = {"format_version": FORMAT_VERSION, **asdict(batch)}
        (aside / MANIFEST).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return final


def forget(store: Path, run: str) -> None:
    """Removes what an earlier try of `run` kept: this try set nothing aside."""
    folder = rows_folder(store, run).parent
    if folder.exists():
        shutil.rmtree(folder)


def read_batches(store: Path) -> list[Batch]:
    """What every run set aside, oldest first.

    Raises:
        ContractError: a manifest cannot be read.
    """
    paths = sorted((root(store) / "runs").glob(f"[!.]*/{MANIFEST}"))
    return sorted((_read(path) for path in paths), key=lambda batch: (batch.time, batch.run))


def read_batch(store: Path, run: str) -> Batch:
    """What `run` set aside.

    Raises:
        ContractError: it set nothing aside, or the manifest cannot be read.
    """
    path = rows_folder(store, run).parent / MANIFEST
    if not path.exists():
        known = ", ".join(batch.run for batch in read_batches(store)) or "no run"
        raise ContractError(f"run {run!r} set no row aside; in {root(store)} are those of: {known}")
    return _read(path)


def _read(path: Path) -> Batch:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if (version := document.pop("format_version")) != FORMAT_VERSION:
            raise ContractError(f"{path} has format_version {version}, expected {FORMAT_VERSION}")
        return Batch(**document)
    except ContractError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ContractError(f"{path} cannot be read: {error}") from error


def read_journal(store: Path) -> list[Replay]:
    """Every replay, oldest first.

    Raises:
        ContractError: a line is none; names the file and the line.
    """
    path = root(store) / JOURNAL
    if not path.exists():
        return []
    # A last line without its newline is a torn append, which nobody was told of.
    *lines, _ = path.read_bytes().split(b"\n")
    return [_replay(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]


def _replay(line: bytes, source: str) -> Replay:
    try:
        return Replay(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise ContractError(f"{source} is not a replay: {error}") from error


def taken_back(store: Path) -> dict[str, set[str]]:
    """The rules of each run whose rows people took back."""
    rules: dict[str, set[str]] = {}
    for replay in read_journal(store):
        rules.setdefault(replay.run, set()).update(replay.rules)
    return rules


def replay(store: Path, run: str, rule: str | None, *, who: str, reason: str) -> Replay | None:
    """Takes the rows of `run` back, those of one rule or all; None where all of them were taken back before.

    Raises:
        ContractError: the run set nothing aside, or nothing under that rule.
    """
    batch = read_batch(store, run)
    if rule is not None and rule not in batch.num_by_rule:
        under = ", ".join(batch.num_by_rule)
        raise ContractError(f"run {run!r} set no row aside under rule {rule!r}, expected one of {under}")
    wanted = [rule] if rule is not None else sorted(batch.num_by_rule)
    rules = [name for name in wanted if name not in taken_back(store).get(run, set())]
    if not rules:
        return None
    line = Replay(
        time=datetime.now(timezone.utc).isoformat(),
        run=run,
        rules=rules,
        num_rows=sum(batch.num_by_rule[name] for name in rules),
        who=who,
        reason=reason,
    )
    append_line(root(store) / JOURNAL, json.dumps(asdict(line)))
    return line


def write_taken(store: Path, run: str, digest: str, batches: dict[str, list[str]]) -> None:
    """Notes that the rows of the dataset `digest`, which `run` makes, hold the replayed rows of `batches`."""
    write_whole(root(store) / "taken" / f"{run}.json", json.dumps({"digest": digest, "batches": batches}) + "\n")


def read_taken(store: Path) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """The digest of every dataset that held replayed rows, and their runs and rules."""
    for path in sorted((root(store) / "taken").glob("*.json")):
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        yield document["digest"], document["batches"]
