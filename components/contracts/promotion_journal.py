"""The promotion journal: which model was live when, who made it so, and why. JSON lines, only ever appended.

Joins deployment, which writes it, to the next run (its champion), to `evergreen models` and to people on call.

It is written ahead: before any server is told of a version, an `intent` line names it and its hashes, so that no answer
ever comes from a version that the journal does not know. What changes who is live is a later line of its own; an
intent that is the last line is a deployment at work or one that was killed, and the next one puts things right first.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from components.contracts.durable import append_line
from components.contracts.errors import ContractError

JOURNAL_FILE = "journal.jsonl"
INTENT = "intent"
"""Servers are about to be told of `version`."""
RELEASE = "release"
ROLLBACK = "rollback"
PROMOTE = "promote"
"""A canary, or a model that the gate had refused, is live from now on."""
WITHDRAWN = "withdrawn"
"""The intent before it came to nothing; what was live is live."""
CANARY = "canary"
"""`version` answers the share `share` of the traffic beside the live one."""
CANARY_ENDED = "canary_ended"
"""`version` answers nothing any more; the live one answers all."""

LIVE_ACTIONS = (RELEASE, ROLLBACK, PROMOTE)
"""After these `version` is the live one."""
ACTIONS = (INTENT, *LIVE_ACTIONS, WITHDRAWN, CANARY, CANARY_ENDED)


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """One line."""

    time: str
    """ISO 8601 UTC; never before the line above it, also where the clock was set back."""
    action: str
    """One of `ACTIONS`."""
    version: int
    """The version that the action is about."""
    previous_version: int | None
    """The version that was live before."""
    model_id: str
    model_uri: str
    release_uri: str
    """The version's `Release` manifest."""
    trigger_id: str | None
    """The retrain request that it answers; None = nobody's but a person's."""
    reason: str
    who: str | None = None
    """The person or pipeline run that asked; None in lines older than this field."""
    decision: str | None = None
    """The verdict on the model; None where none was needed, and in older lines."""
    parent_model_id: str | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    """The version's hashes as in its `Release`; empty in older lines."""
    share: float | None = None
    """Share of the traffic, for `canary`."""


def read_entries(store: Path) -> list[Promotion]:
    """Every line of a model store's journal, oldest first; empty where there is no journal.

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


def read_journal(store: Path) -> list[Promotion]:
    """The lines that changed which version is live, oldest first; errors as `read_entries`."""
    return [entry for entry in read_entries(store) if entry.action in LIVE_ACTIONS]


def append_promotion(store: Path, promotion: Promotion) -> None:
    """Appends one promotion and flushes it to disk."""
    append_line(store / JOURNAL_FILE, json.dumps(asdict(promotion)))


def current(store: Path) -> Promotion | None:
    """The promotion that made the live version live; None where nothing is."""
    promotions = read_journal(store)
    return promotions[-1] if promotions else None
