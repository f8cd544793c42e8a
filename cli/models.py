"""Print the promotion journal and model cards of a registry.

The journal says which version was live at which time, who made it live, and why.
"""

import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from evergreen.registry.forgotten import removed_at
from evergreen.registry.model_cards import card_path, read_card
from evergreen.registry.promotion_journal import (
    Promotion,
    current,
    live_at,
    moment_of,
    read_entries,
)
from evergreen.reports.model_card import card_page
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError
from evergreen.runtime.plain_text import show

HASH_DIGITS = 12


def print_models(store: Path, *, as_json: bool = False) -> None:
    """Print one line per entry of the journal, newest last, and mark the live version.

    JSON also has the URI of each model's card, or null if there is no card.
    """
    entries, live = read_entries(store), current(store)
    if as_json:
        cards = {each.model_id: card_path(store, each.model_id) for each in entries}
        uris = {
            name: path.absolute().as_uri() if path.exists() else None
            for name, path in cards.items()
        }
        lines = [
            {**asdict(each), "live": each == live, "card": uris[each.model_id]} for each in entries
        ]
        print(json.dumps(lines, indent=2))
        return
    if not entries:
        show(f"no version was ever live in {store}")
    for entry in entries:
        show(f"{'*' if entry == live else ' '} {_journal_line(entry)}")
    if live is not None and (removed := removed_at(store, live.model_id)):
        print(
            f"version {live.version} still contains a user whose rows were removed at {removed}, "
            "until a run from "
            "scratch is released (`evergreen run --from-scratch`)"
        )
    if entries:
        folder = shlex.quote(str(store))
        print(
            f"card of a model: evergreen model card VERSION --store {folder} --output card.html",
            file=sys.stderr,
        )


def show_card(store: Path, reference: str, *, output: Path | None) -> None:
    """Write the card's page to `output`, or print the card as JSON if `output` is None.

    Raises:
        ContractError: `read_card` finds no card.
    """
    card = read_card(store, reference)
    if output is None:
        print(card.dumps().decode(), end="")
        return
    write_whole(output, card_page(card))
    show(f"card of model {card.model_id}: {output.absolute().as_uri()}")


def _journal_line(entry: Promotion) -> str:
    share = f" ({entry.share:g} of the traffic)" if entry.share is not None else ""
    return (
        f"{entry.time}  {entry.action:<12}  version {entry.version:<4} {entry.model_id}{share}  "
        f"{_hashes(entry)}  "
        f"{entry.who or 'unknown'}: {entry.reason}"
    )


def _hashes(entry: Promotion) -> str:
    """Return short hashes, or `-` for an entry that was written without hashes."""
    return (
        " ".join(f"{name} {value[:HASH_DIGITS]}" for name, value in sorted(entry.sha256.items()))
        or "-"
    )


def print_live_at(store: Path, time: str, *, as_json: bool = False) -> None:
    """Print which version was live at `time`.

    JSON is the journal's entry with an additional `until`, which is null if the version is still
    live.

    Args:
        store: The model registry.
        time: ISO 8601, in UTC if it has no zone, or `now`.
        as_json: Whether to print JSON.

    Raises:
        ContractError: `time` cannot be parsed, or no version was live then.
    """
    moment = _moment(time)
    found = live_at(store, moment)
    if found is None:
        raise ContractError(f"no version was live at {moment.isoformat()} in {store}")
    entry, after = found
    if as_json:
        print(json.dumps({**asdict(entry), "until": after.time if after else None}, indent=2))
        return
    show(f"version {entry.version}, model {entry.model_id}")
    show(f"since {entry.time} ({entry.action} by {entry.who or 'unknown'}: {entry.reason})")
    until = (
        f"until {after.time} ({after.action} of version {after.version}: {after.reason})"
        if after
        else "still live"
    )
    print(until)
    print(
        "hashes: "
        + (
            ", ".join(f"{name} {value}" for name, value in sorted(entry.sha256.items()))
            or "not recorded"
        )
    )


def _moment(text: str) -> datetime:
    try:
        return datetime.now(timezone.utc) if text == "now" else moment_of(text)
    except ValueError as error:
        raise ContractError(
            f"time is {text!r}, expected ISO 8601 such as 2026-01-31T12:00:00Z"
        ) from error
