"""Reports of runs and cards of models from the store, which the status page links to; `showing.server` serves them.

A request names a run and a step, or a version, and nothing else: no path of a request reaches the file system. Of a
report only a regular file of that one name is read, below the run's own folder, of at most `MAX_BYTES`. A card's page
is made anew for each request, so it is never behind the promotion journal.
"""

import os
import re
import stat
from pathlib import Path
from urllib.parse import quote, unquote

from components.charts.model_card import card_page
from components.runtime.errors import ContractError
from components.store.model_cards import read_card
from components.store.runs import STEPS, report_path

PREFIX = "/reports/"
CARDS = "/models/"
"""Before the number of the version whose model the card is about."""
MAX_BYTES = 20_000_000


def link_to(run: str, step: str) -> str:
    """The page's link, to the server itself.

    >>> link_to("hourly 1", "validation")
    '/reports/hourly%201/validation'
    """
    return f"{PREFIX}{quote(run, safe='')}/{quote(step, safe='')}"


def read_report(store: Path, path: str) -> bytes | None:
    """The report or card that a request's path names, HTML; None where there is none or it names something else."""
    if re.fullmatch(f"{CARDS}[1-9][0-9]{{0,9}}", path):
        try:
            return card_page(read_card(store, path.removeprefix(CARDS))).encode()
        except (ContractError, OSError):
            return None
    parts = path.removeprefix(PREFIX).split("/")
    if not path.startswith(PREFIX) or len(parts) != 2:
        return None
    run, step = map(unquote, parts)
    if step not in STEPS or "\0" in run:
        return None
    try:
        found = report_path(store, run, step)
        return _read_regular_file(found) if found.parent.resolve() == store.resolve() / "runs" / run else None
    except (ContractError, OSError):
        return None


def _read_regular_file(path: Path) -> bytes | None:
    # Neither a link to another place nor a pipe, which would block the thread.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        known = os.fstat(descriptor)
        return file.read() if stat.S_ISREG(known.st_mode) and known.st_size <= MAX_BYTES else None
