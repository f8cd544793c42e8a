"""`evergreen models list`, `show` and `live-at`: a registry's promotion journal and model cards.

The journal records which version was live at which time, who made the version live, and why.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from evergreen.registry.forgotten import removed_at
from evergreen.registry.model_cards import card_path, read_card
from evergreen.registry.promotion_journal import (
    INTENT,
    JOURNAL_FILE,
    ROLLBACK,
    Promotion,
    current,
    interrupted,
    live_at,
    moment_of,
    read_entries,
)
from evergreen.reports.model_card import card_page
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.runtime.plain_text import show
from evergreen.runtime.terminal import TableColumn, add_listing_flags, local_time, print_table
from evergreen.storage.uris import typed_folder

DEMO_STORE = "build/demo/store"
"""Model registry of the demo, the default of the commands that list models."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the three commands."""
    parser = CommandParser(prog="evergreen models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser(
        "list",
        help="list all releases, rollbacks and promotions, with author, time and reason",
    )
    card = commands.add_parser("show", help="print a model's card, or write it as a page")
    card.add_argument(
        "model", metavar="VERSION|MODEL_ID", help="a released version, or a model of the store"
    )
    card.add_argument("--output", type=Path, help="HTML page to write (default: print JSON)")
    live = commands.add_parser("live-at", help="show which version was live at a time")
    live.add_argument("time", metavar="TIME", help="ISO 8601, in UTC if it has no zone, or `now`")
    for each in (listing, card, live):
        add_store_flag(each, default=DEMO_STORE)
    live.add_argument("--json", action="store_true", help="print JSON")
    add_listing_flags(listing)
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands."""
    arguments = build_parser().parse_args(argv)
    if arguments.command == "show":
        store = typed_folder(arguments.store, "--store")
        show_card(store, arguments.model, output=arguments.output)
        return ExitCode.DONE
    store = registry_folder(arguments.store)
    if arguments.command == "live-at":
        print_live_at(store, arguments.time, as_json=arguments.json)
    else:
        print_models(store, as_json=arguments.json, wide=arguments.wide)
    return ExitCode.DONE


def registry_folder(text: str) -> Path:
    """Return the folder of a model registry that `--store` names. An empty folder is accepted.

    Raises:
        ContractError: the folder has files, but none of a model registry.
    """
    store = typed_folder(text, "--store")
    known = ("models", "runs", "recommender", JOURNAL_FILE)
    if any(store.iterdir()) and not any((store / name).exists() for name in known):
        raise ContractError(
            f"--store {store} contains none of {', '.join(known)}, expected a model registry"
        )
    return store


COLUMNS = (
    TableColumn(name=""),
    TableColumn(name="version", is_number=True),
    TableColumn(name="action"),
    TableColumn(name="time"),
    TableColumn(name="model", is_wide_only=True),
    TableColumn(name="by", is_wide_only=True),
    TableColumn(name="reason", is_flexible=True),
)


def print_models(store: Path, *, as_json: bool = False, wide: bool = False) -> None:
    """Print a table of the journal, newest entry last, and mark the live version.

    The complete reason of the live version follows below the table, because the table may shorten
    it. If a deployment has ended, the table omits the line that announced it. The JSON output has
    all lines, the hashes of the files, and the URI of each model's card. The URI is null if a model
    has no card.
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
    else:
        begun = interrupted(store)
        shown = [each for each in entries if each.action != INTENT or each == begun]
        print_table(COLUMNS, [_cells(each, is_live=each == live) for each in shown], wide=wide)
    if live is not None:
        show(f"version {live.version} is live ({action_text(live)}): {live.reason}")
    if live is not None and (removed := removed_at(store, live.model_id)):
        print(
            f"version {live.version} still contains a user whose rows were removed at {removed}, "
            "until a run from scratch is released (`evergreen run --from-scratch`)"
        )
    if entries:
        folder = shlex.quote(str(store))
        print(
            f"card of a model: evergreen models show VERSION --store {folder} --output card.html",
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


def _cells(entry: Promotion, *, is_live: bool) -> tuple[str | None, ...]:
    return (
        "*" if is_live else " ",
        str(entry.version),
        action_text(entry),
        local_time(entry.time),
        entry.model_id,
        entry.who or "unknown",
        entry.reason,
    )


def action_text(entry: Promotion) -> str:
    """Return the text of a journal entry's action.

    The text contains the share of a canary, and the version that a rollback removed from traffic.
    """
    if entry.share is not None:
        return f"{entry.action} {100 * entry.share:g} %"
    if entry.action == ROLLBACK and entry.previous_version is not None:
        return f"{entry.action} from {entry.previous_version}"
    return entry.action


def print_live_at(store: Path, time: str, *, as_json: bool = False) -> None:
    """Print which version was live at `time`.

    JSON output is the journal's entry with an additional `until`, which is null if the version is
    still live.

    Args:
        store: Folder of the registry.
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
    show(
        f"since {local_time(entry.time)} ({action_text(entry)} by {entry.who or 'unknown'}: "
        f"{entry.reason})"
    )
    until = (
        f"until {local_time(after.time)} ({after.action} of version {after.version}: "
        f"{after.reason})"
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


if __name__ == "__main__":
    raise SystemExit(main())
