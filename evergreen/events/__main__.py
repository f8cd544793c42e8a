"""`evergreen monitor log`: check an event log, list its dead letters, and publish them again.

The commands are safe beside a running monitor, because they neither pull nor acknowledge messages.
`evergreen.events.event_log` describes what an event log guarantees.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote

from evergreen.events.event_log import DeadLetter, Subscriber
from evergreen.events.locations import open_subscriber
from evergreen.events.urls import LogUrl, redacted
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError
from evergreen.runtime.exit_codes import ExitCode, exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text, show
from evergreen.runtime.terminal import TableColumn, add_listing_flags, local_time, print_table

_SHOWN_BYTES = 60


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands and their flags."""
    parser = CommandParser(
        prog="evergreen monitor log",
        description="Check the event log, and manage its dead letters.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="connect, and report the backlog and any problem")
    dead_letters = commands.add_parser(
        "dead-letters", help="list or replay messages that the monitor could not use"
    )
    actions = dead_letters.add_subparsers(dest="command", required=True)
    listing = actions.add_parser("list", help="list them, oldest first, with the reason why")
    listing.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="also write each message's original bytes to a file",
    )
    add_listing_flags(listing)
    replay = actions.add_parser(
        "replay", help="publish all of them again with their original bytes"
    )
    for each in (check, listing, replay):
        each.add_argument("url", metavar="URL", help="URL of the log, as in the monitor's settings")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. A log with a problem gives the exit code `REFUSED`."""
    arguments = build_parser().parse_args(argv)
    log_as_text(level=logging.WARNING)
    url = LogUrl.parse(arguments.url)
    # Refuse a path at which no file exists. A mistyped path would otherwise create a new, empty
    # log.
    if url.scheme == "sqlite" and not Path(url.path).is_file():
        raise ContractError(f"log is {redacted(url.text)!r}, but there is no file {url.path}")
    with closing(open_subscriber(arguments.url)) as log:
        if arguments.command == "check":
            return _check_log(log)
        if arguments.command == "list":
            _list_dead_letters(log, arguments)
        else:
            print(f"{log.replay_dead_letters()} messages published again")
    return ExitCode.DONE


def _check_log(log: Subscriber) -> int:
    backlog, problem = log.backlog(), log.problem()
    if problem:
        show(f"problem: {problem}")
        return ExitCode.REFUSED
    waiting = "its backlog is unknown" if backlog is None else f"{backlog} messages wait to be read"
    print(f"connected; {waiting}")
    return ExitCode.DONE


LETTERS = (
    TableColumn(name="time"),
    TableColumn(name="message", is_flexible=True),
    TableColumn(name="bytes", is_number=True),
    TableColumn(name="reason", is_flexible=True),
    TableColumn(name="begins with", is_flexible=True, is_wide_only=True),
)


def _list_dead_letters(log: Subscriber, arguments: argparse.Namespace) -> None:
    messages, save = log.list_dead_letters(), arguments.save
    if save is not None:
        for number, message in enumerate(messages):
            _save_payload(save, number, message)
    if arguments.json:
        print(json.dumps([_document(message) for message in messages], indent=2))
        return
    if messages:
        rows = [
            (
                local_time(message.time),
                message.message_id,
                f"{len(message.payload):,}",
                message.reason,
                _beginning(message),
            )
            for message in messages
        ]
        print_table(LETTERS, rows, wide=arguments.wide)
    print(
        f"{len(messages)} dead letters" + (f", their bytes in {save}" if save and messages else "")
    )


def _document(message: DeadLetter) -> dict[str, object]:
    return {
        "time": datetime.fromtimestamp(message.time, timezone.utc).isoformat(),
        "message_id": message.message_id,
        "bytes": len(message.payload),
        "reason": message.reason,
        "begins_with": _beginning(message),
    }


def _beginning(message: DeadLetter) -> str:
    """Return the first bytes of a message as text, with special characters escaped."""
    return repr(message.payload[:_SHOWN_BYTES])[2:-1] + (
        "..." if len(message.payload) > _SHOWN_BYTES else ""
    )


def _save_payload(folder: Path, number: int, message: DeadLetter) -> None:
    """Write the original bytes to a file.

    If two ids would give the same file name, a number is added to the name.
    """
    write_whole(
        folder / f"{number:06d}-{quote(message.message_id, safe='')[:100]}.bin", message.payload
    )


if __name__ == "__main__":
    raise SystemExit(main())
