"""Prints the promotion journal: who is live, what was live when, who made it so, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from components.runtime.errors import ContractError
from components.store.promotion_journal import Promotion, current, live_at, moment_of, read_entries

HASH_DIGITS = 12


def print_models(store: Path, *, as_json: bool = False) -> None:
    """One line per entry of the journal, newest last; the line that made the live version live is marked."""
    entries, live = read_entries(store), current(store)
    if as_json:
        print(json.dumps([{**asdict(each), "live": each == live} for each in entries], indent=2))
        return
    if not entries:
        print(f"nothing was ever live in {store}")
    for entry in entries:
        print(f"{'*' if entry == live else ' '} {_journal_line(entry)}")


def _journal_line(entry: Promotion) -> str:
    share = f" ({entry.share:g} of the traffic)" if entry.share is not None else ""
    return (
        f"{entry.time}  {entry.action:<12}  version {entry.version:<4} {entry.model_id}{share}  {_hashes(entry)}  "
        f"{entry.who or 'unknown'}: {entry.reason}"
    )


def _hashes(entry: Promotion) -> str:
    """Short hashes; `-` in lines older than hashes."""
    return " ".join(f"{name} {value[:HASH_DIGITS]}" for name, value in sorted(entry.sha256.items())) or "-"


def print_live_at(store: Path, time: str, *, as_json: bool = False) -> None:
    """What was live at `time`.

    Args:
        store: The model store.
        time: ISO 8601, UTC where it has no zone; or `now`.
        as_json: Print the journal's entry, with `until` (None = live still), as JSON.

    Raises:
        ContractError: `time` is no time, or nothing was live then.
    """
    moment = _moment(time)
    found = live_at(store, moment)
    if found is None:
        raise ContractError(f"nothing was live at {moment.isoformat()} in {store}")
    entry, after = found
    if as_json:
        print(json.dumps({**asdict(entry), "until": after.time if after else None}, indent=2))
        return
    print(f"version {entry.version}, model {entry.model_id}")
    print(f"since {entry.time} ({entry.action} by {entry.who or 'unknown'}: {entry.reason})")
    until = f"until {after.time} ({after.action} of version {after.version}: {after.reason})" if after else "live still"
    print(until)
    print(
        "hashes: " + (", ".join(f"{name} {value}" for name, value in sorted(entry.sha256.items())) or "not kept then")
    )


def _moment(text: str) -> datetime:
    try:
        return datetime.now(timezone.utc) if text == "now" else moment_of(text)
    except ValueError as error:
        raise ContractError(f"time is {text!r}, expected ISO 8601 such as 2026-01-31T12:00:00Z") from error
