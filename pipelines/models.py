"""Prints the promotion journal: who is live, what was live when, who made it so, why, and what it learned from."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from components.runtime.errors import ContractError
from components.store.models import stored_model
from components.store.promotion_journal import LIVE_ACTIONS, Promotion, current, live_at, moment_of, read_entries

HASH_DIGITS = 12


def print_models(store: Path, *, as_json: bool = False) -> None:
    """One line per entry of the journal, newest last; the line that made the live version live is marked.

    Below a line that made a version live: what its model learned from in its own round, where the store has the model.
    """
    entries, live = read_entries(store), current(store)
    if as_json:
        documents = [
            {**asdict(each), "live": each == live, "learned": _learned_from(store, each.model_id)} for each in entries
        ]
        print(json.dumps(documents, indent=2))
        return
    if not entries:
        print(f"nothing was ever live in {store}")
    for entry in entries:
        print(f"{'*' if entry == live else ' '} {_journal_line(entry)}")
        if entry.action in LIVE_ACTIONS and (learned := _learned_from(store, entry.model_id)):
            print(f"      {_learned_line(learned)}")


def _journal_line(entry: Promotion) -> str:
    share = f" ({entry.share:g} of the traffic)" if entry.share is not None else ""
    return (
        f"{entry.time}  {entry.action:<12}  version {entry.version:<4} {entry.model_id}{share}  {_hashes(entry)}  "
        f"{entry.who or 'unknown'}: {entry.reason}"
    )


def _learned_from(store: Path, model_id: str) -> dict[str, Any] | None:
    """Of the model's manifest what says from which rows and columns it learned; None where it is gone."""
    try:
        model = stored_model(store, model_id)
    except ContractError:
        return None
    return {name: getattr(model, name) for name in ("num_train_rows", "negative_rate", "excluded_columns", "days")}


def _learned_line(learned: dict[str, Any]) -> str:
    days = [each["day"] for each in learned["days"] if not each.get("replay")]
    replayed = {each["day"] for each in learned["days"] if each.get("replay")}
    parts = [f"learned {learned['num_train_rows']:,} rows" + (f" of {days[0]} to {days[-1]}" if days else "")]
    if learned["negative_rate"] != 1:
        parts.append(f"{learned['negative_rate']:g} of those without a click")
    if replayed:
        parts.append(f"rows replayed of {len(replayed)} earlier days")
    if learned["excluded_columns"]:
        parts.append(f"not from {' '.join(learned['excluded_columns'])}")
    return ", ".join(parts)


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
