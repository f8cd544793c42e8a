"""The promotion journal: which model was live when, and why. One JSON line per change, only ever appended.

Joins deployment, which writes it, to the next run (its champion), to `evergreen models` and to people on call.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from components.contracts.durable import append_line
from components.contracts.errors import ContractError

JOURNAL_FILE = "journal.jsonl"
RELEASE = "release"
ROLLBACK = "rollback"


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """One change of what is live."""

    time: str
    action: str
    """`release` or `rollback`."""
    version: int
    """The version that is live from now on."""
    previous_version: int | None
    model_id: str
    model_uri: str
    release_uri: str
    """The version's `Release` manifest."""
    trigger_id: str | None
    reason: str


def read_journal(store: Path) -> list[Promotion]:
    """All promotions of a model store, oldest first; empty where there is no journal.

    A last line without its newline is a torn append and does not count.

    Raises:
        ContractError: a whole line is not a promotion; names the file and line.
    """
    path = store / JOURNAL_FILE
    if not path.exists():
        return []
    promotions = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            promotions.append(Promotion(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ContractError(f"{path} line {number} is not a promotion: {error}") from error
    return promotions


def append_promotion(store: Path, promotion: Promotion) -> None:
    """Appends one promotion and flushes it to disk."""
    append_line(store / JOURNAL_FILE, json.dumps(asdict(promotion)))


def current(store: Path) -> Promotion | None:
    """The promotion that made the live version live; None where nothing is."""
    promotions = read_journal(store)
    return promotions[-1] if promotions else None
