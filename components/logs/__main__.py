"""`evergreen log`: checks a log, lists its dead letters, publishes them again.

For whoever is on call. Safe beside a running monitor: nothing is pulled or acknowledged (a Pub/Sub stream that is
opened to ask gives back at once what it received). What a log promises is
`logs.event_log`'s.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from components.logs.event_log import DeadLetter, Subscriber
from components.logs.locations import open_subscriber
from components.logs.urls import LogUrl
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError
from components.runtime.exit_codes import ExitCode, exits_with_code

SHOWN_BYTES = 60


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(prog="evergreen log", description="Looks after the record log.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="connect, and report what waits to be read and what is wrong")
    dead_letters = commands.add_parser("dead-letters", help="messages that the monitor could not use")
    actions = dead_letters.add_subparsers(dest="command", required=True)
    listing = actions.add_parser("list", help="list them, oldest first, with the reason why")
    listing.add_argument("--save", type=Path, metavar="DIR", help="also write each message's original bytes to a file")
    replay = actions.add_parser("replay", help="publish them again with their original bytes")
    which = replay.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="every dead letter")
    which.add_argument("--id", action="append", metavar="ID", help="this message (repeatable)")
    for each in (check, listing, replay):
        each.add_argument("url", metavar="URL", help="the log, as the monitor is given it")
        each.add_argument("--json", action="store_true", help="print JSON")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `REFUSED` = the log has a problem, or an id is no dead letter."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _expect_file(arguments.url)
    with closing(open_subscriber(arguments.url)) as log:
        if arguments.command == "check":
            return _check_log(log, arguments.json)
        if arguments.command == "list":
            return _list_dead_letters(log, arguments.save, arguments.json)
        return _replay_dead_letters(log, arguments.id, arguments.json)


def _expect_file(text: str) -> None:
    """A mistyped path must not become a new, empty log."""
    url = LogUrl.parse(text)
    if url.scheme == "sqlite" and not Path(url.path).is_file():
        raise ContractError(f"log is {text!r}, but there is no file {url.path}")


def _check_log(log: Subscriber, as_json: bool) -> int:
    backlog, problem = log.backlog(), log.problem()
    if as_json:
        print(json.dumps({"backlog": backlog, "problem": problem}))
    else:
        waiting = "its backlog is unknown" if backlog is None else f"{backlog} messages wait to be read"
        print(f"problem: {problem}" if problem else f"connected; {waiting}")
    return ExitCode.REFUSED if problem else ExitCode.DONE


def _list_dead_letters(log: Subscriber, save: Path | None, as_json: bool) -> int:
    messages = log.list_dead_letters()
    described = [_describe(message) for message in messages]
    if save is not None:
        for number, message in enumerate(messages):
            described[number]["file"] = str(_save_payload(save, number, message))
    if as_json:
        print(json.dumps(described))
        return ExitCode.DONE
    for each, message in zip(described, messages):
        begin = repr(message.payload[:SHOWN_BYTES])[2:-1] + ("..." if len(message.payload) > SHOWN_BYTES else "")
        print(f"{each['time']}  {message.message_id}  {each['bytes']} bytes: {message.reason}\n    {begin}")
    print(f"{len(messages)} dead letters" + (f", their bytes in {save}" if save and messages else ""))
    return ExitCode.DONE


def _describe(message: DeadLetter) -> dict[str, Any]:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(message.time))
    return {"message_id": message.message_id, "time": moment, "reason": message.reason, "bytes": len(message.payload)}


def _save_payload(folder: Path, number: int, message: DeadLetter) -> Path:
    """Writes the original bytes; the number keeps apart two ids that are one file name."""
    path = folder / f"{number:06d}-{quote(message.message_id, safe='')[:100]}.bin"
    write_whole(path, message.payload)
    return path


def _replay_dead_letters(log: Subscriber, ids: list[str] | None, as_json: bool) -> int:
    count = log.replay_dead_letters(ids)
    missing = 0 if ids is None else len(set(ids)) - count
    if as_json:
        print(json.dumps({"replayed": count, "not_found": missing}))
    else:
        print(f"{count} messages published again" + (f"; {missing} ids are no dead letters" if missing else ""))
    return ExitCode.REFUSED if missing else ExitCode.DONE


if __name__ == "__main__":
    raise SystemExit(main())
