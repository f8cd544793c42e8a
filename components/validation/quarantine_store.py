"""Quarantined rows in the model store, and the journal of what people replayed.

The step's own folder goes with the work folder's retention; the store stays. Layout, below `<store>/quarantine`:
`runs/<run>/` (`quarantine.json` and `rows/*.parquet`: raw columns, `quarantine_rule`, `quarantine_reason`),
`journal.jsonl` (one line per replay) and `taken/<run>.json` (the replays that a run learned from).

Nothing is removed from it but the rows of a user who is forgotten (`pipelines.forget`), which stay counted. The lake is
never changed: a quarantined row stays there as it was.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from components.contracts.manifests import RawDataset
from components.runtime.durable import append_line, read_records, whole_directory, write_whole
from components.runtime.errors import ContractError
from components.store.runs import run_folder

MANIFEST = "quarantine.json"
JOURNAL = "journal.jsonl"


@dataclass(frozen=True, kw_only=True)
class QuarantinedRun:
    """The rows that one run quarantined."""

    run: str
    time: str
    num_rows: int
    num_by_rule: dict[str, int]
    last_learned_time: str
    """Of the run's rows; see `manifests.RawDataset`."""
    digest: str
    """Of the dataset that is left without them."""


class QuarantinedBatch(NamedTuple):
    """The rows that one rule quarantined in one run."""

    run: str
    rule: str


@dataclass(frozen=True, kw_only=True)
class QuarantineReplay:
    """One line of the journal: rows that people took back."""

    time: str
    run: str
    rules: list[str]
    num_rows: int
    who: str
    reason: str


def quarantine_folder(store: Path) -> Path:
    """The folder of all of it."""
    return store / "quarantine"


def rows_folder(store: Path, run: str) -> Path:
    """The folder of the rows that `run` quarantined."""
    return quarantine_folder(store) / "runs" / run_folder(store, run).name / "rows"


def keep_quarantined(store: Path, run: str, rows: Path, *, num_by_rule: dict[str, int], dataset: RawDataset) -> Path:
    """Copies the Parquet files in `rows`, replacing those of an earlier try of the run; returns their folder.

    `dataset` is what is left without them.
    """
    final = rows_folder(store, run)
    kept = QuarantinedRun(
        run=run,
        time=datetime.now(timezone.utc).isoformat(),
        num_rows=sum(num_by_rule.values()),
        num_by_rule=num_by_rule,
        last_learned_time=dataset.last_learned_time,
        digest=dataset.digest,
    )
    with whole_directory(final.parent, replace=True) as folder:
        shutil.copytree(rows, folder / final.name)
        (folder / MANIFEST).write_text(json.dumps(asdict(kept), indent=2) + "\n", encoding="utf-8")
    return final


def forget_quarantined(store: Path, run: str) -> None:
    """Removes what an earlier try of `run` quarantined: this try quarantined nothing."""
    shutil.rmtree(rows_folder(store, run).parent, ignore_errors=True)


def read_quarantined_runs(store: Path) -> list[QuarantinedRun]:
    """What every run quarantined, oldest first.

    Raises:
        ContractError: a manifest cannot be read.
    """
    found = []
    for path in (quarantine_folder(store) / "runs").glob(f"[!.]*/{MANIFEST}"):
        try:
            found.append(QuarantinedRun(**json.loads(path.read_text(encoding="utf-8"))))
        except (ValueError, TypeError) as error:
            raise ContractError(f"{path} cannot be read: {error}") from error
    return sorted(found, key=lambda kept: (kept.time, kept.run))


def read_quarantined_run(store: Path, run: str) -> QuarantinedRun:
    """What `run` quarantined.

    Raises:
        ContractError: it quarantined nothing, or a manifest cannot be read.
    """
    runs = {kept.run: kept for kept in read_quarantined_runs(store)}
    if run_folder(store, run).name not in runs:
        known = ", ".join(runs) or "no run"
        raise ContractError(f"run {run!r} quarantined no row; in {quarantine_folder(store)} are those of: {known}")
    return runs[run]


def read_replayed(store: Path) -> set[QuarantinedBatch]:
    """What people took back.

    Raises:
        ContractError: a line of the journal is damaged; names the file and the line.
    """
    replays = read_records(quarantine_folder(store) / JOURNAL, QuarantineReplay, name="a replay")
    return {QuarantinedBatch(replay.run, rule) for replay in replays for rule in replay.rules}


def replay_rows(store: Path, run: str, rule: str | None, *, who: str, reason: str) -> QuarantineReplay | None:
    """Takes the rows of `run` back, those of one rule or all; None if all of them were taken back before.

    Raises:
        ContractError: the run quarantined nothing, or nothing under that rule.
    """
    kept = read_quarantined_run(store, run)
    if rule is not None and rule not in kept.num_by_rule:
        known = ", ".join(kept.num_by_rule)
        raise ContractError(f"run {run!r} quarantined no row under rule {rule!r}, expected one of {known}")
    wanted = {QuarantinedBatch(run, name) for name in ([rule] if rule is not None else kept.num_by_rule)}
    rules = sorted(batch.rule for batch in wanted - read_replayed(store))
    if not rules:
        return None
    line = QuarantineReplay(
        time=datetime.now(timezone.utc).isoformat(),
        run=run,
        rules=rules,
        num_rows=sum(kept.num_by_rule[name] for name in rules),
        who=who,
        reason=reason,
    )
    append_line(quarantine_folder(store) / JOURNAL, json.dumps(asdict(line)))
    return line


def write_taken(store: Path, run: str, *, digest: str, batches: Sequence[QuarantinedBatch]) -> None:
    """Notes that the rows of the dataset `digest`, which `run` makes, include these, which people took back."""
    content = json.dumps({"digest": digest, "batches": batches}) + "\n"
    write_whole(quarantine_folder(store) / "taken" / f"{run}.json", content)


def read_taken(store: Path) -> Iterator[tuple[str, list[QuarantinedBatch]]]:
    """The digest of every dataset that included rows which people took back, and which."""
    for path in sorted((quarantine_folder(store) / "taken").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        yield document["digest"], [QuarantinedBatch(*batch) for batch in document["batches"]]
