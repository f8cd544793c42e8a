"""Quarantined rows in the model store, the journal of what people took back, and `evergreen quarantine`, which does it.

The step's own folder goes with the work folder's retention; the store stays. Layout, below `<store>/quarantine`:
`runs/<run>/` (`quarantine.json` and `rows/*.parquet`: raw columns, `quarantine_rule`, `quarantine_reason`),
`journal.jsonl` (one line per replay) and `taken/<run>.json` (the replays that a run learned from).

Rows that are taken back (`replay`) are learned by the next round beside its window, in spite of the rule, once; see
`quarantine.ReturningRows`. A wrong value is not repaired this way: for that the day is back-filled in the lake.
Nothing is removed but the rows of a user who is forgotten (`pipelines.forget`), which stay counted. The lake is never
changed: a quarantined row stays there as it was.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from components.contracts.manifests import RawDataset
from components.runtime.durable import append_line, read_records, whole_directory, write_whole
from components.runtime.errors import ContractError
from components.runtime.exit_codes import ExitCode, exits_with_code
from components.runtime.flags import CommandParser, whoami
from components.storage.uris import typed_folder
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


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = CommandParser(prog="evergreen quarantine", description="Lists and replays quarantined rows.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="list what each run quarantined, by rule, and what was taken back")
    listing.add_argument("--run", default="", help="this run alone")
    listing.add_argument("--json", action="store_true", help="print JSON")
    replay = commands.add_parser("replay", help="take rows back: the next round learns them in spite of the rule")
    replay.add_argument("--run", required=True, help="the run that quarantined them")
    replay.add_argument("--rule", default=None, help="only those under this rule (default: all)")
    replay.add_argument("--reason", required=True, help="why")
    replay.add_argument("--who", default=whoami(), help="who takes them back (%(default)s)")
    for each in (listing, replay):
        each.add_argument("--store", required=True, help="model store, folder or its URI")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command."""
    arguments = build_parser().parse_args(argv)
    store = typed_folder(arguments.store, "--store")
    if arguments.command == "list":
        _list(store, arguments)
    else:
        _replay(store, arguments)
    return ExitCode.DONE


def _list(store: Path, arguments: argparse.Namespace) -> None:
    run = arguments.run
    runs = [read_quarantined_run(store, run)] if run else read_quarantined_runs(store)
    replayed = read_replayed(store)
    if arguments.json:
        back = {kept.run: sorted(rule for run, rule in replayed if run == kept.run) for kept in runs}
        print(json.dumps([{**asdict(kept), "taken_back": back[kept.run]} for kept in runs]))
        return
    for kept in runs:
        print(f"{kept.run}  {kept.time}  {kept.num_rows} rows  {rows_folder(store, kept.run)}")
        for rule, num_rows in kept.num_by_rule.items():
            print(f"    {rule}: {num_rows} rows" + (", taken back" if (kept.run, rule) in replayed else ""))
    print(f"{sum(kept.num_rows for kept in runs)} rows of {len(runs)} runs are quarantined")


def _replay(store: Path, arguments: argparse.Namespace) -> None:
    if not arguments.reason.strip():
        raise ContractError("reason is empty, expected why the rows are taken back")
    line = replay_rows(store, arguments.run, arguments.rule, who=arguments.who, reason=arguments.reason)
    if line is None:
        print("all of them were taken back before; nothing changed")
    else:
        print(f"{line.num_rows} rows under {', '.join(line.rules)} will be learned by the next round")


if __name__ == "__main__":
    sys.exit(main())
