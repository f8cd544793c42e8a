"""The promotion journal: which model was live when, who made it so, and why. JSON lines, only ever appended.

Joins deployment, which writes it, to the next run (its champion), to `evergreen models` and to people on call.

It is written ahead: before any server is notified of a version, an `intent` line names it and its hashes, so that no
answer ever comes from a version that the journal does not know. What changes who is live is a later line of its own; an
intent that is the last line is a deployment at work or one that was killed, which the next one takes back first.

Whether a version bakes (`contracts.baking`) follows from the journal. The monitor has no right to change what is
served, so it leaves what it found of such a version here, one file a version, for deployment's controller.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path

from evergreen.contracts.baking import Findings
from evergreen.runtime.durable import append_record, read_records, write_whole
from evergreen.runtime.errors import ContractError

JOURNAL_FILE = "journal.jsonl"
INTENT = "intent"
"""Servers are about to be notified of `version`."""
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
BAKED = "baked"
"""`version` is live, and nothing bad was found for as long as it was watched after its release (`contracts.baking`)."""

LIVE_ACTIONS = (RELEASE, ROLLBACK, PROMOTE)
"""After these `version` is the live one."""
ACTIONS = (INTENT, *LIVE_ACTIONS, WITHDRAWN, CANARY, CANARY_ENDED, BAKED)


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
    """The person or pipeline run that did it."""
    decision: str | None = None
    """The verdict on the model; None where none was needed."""
    parent_model_id: str | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    """The version's hashes as in its `Release`."""
    share: float | None = None
    """Share of the traffic, for `canary` and the intent before its first one."""
    blocked_model_id: str | None = None
    """For a `rollback` that nobody asked for: the model that was taken back, which is not released again unless a
    person overrides it."""
    config: str | None = None
    """Text of Triton's configuration before an `intent`, which is restored where it is interrupted; None = there was
    none, or another line follows."""

    def baked(self, time: str, who: str, reason: str) -> "Promotion":
        """The line that ends the baking of the version that this one made live."""
        return replace(self, action=BAKED, time=time, who=who, reason=reason, share=None, config=None)


def read_entries(store: Path) -> list[Promotion]:
    """Every line of a model store's journal, oldest first; empty where there is no journal.

    A last line without its newline is a torn append and does not count.

    Raises:
        ContractError: a complete line is not a promotion, or differs from its checksum; names the file and line. Or
            the file cannot be read.
    """
    path = store / JOURNAL_FILE
    try:
        # Opened, because a network share tells the present size only of a file that was.
        with open(path, "rb") as file:
            known = os.fstat(file.fileno())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
    return list(_parsed_lines(path, (known.st_ino, known.st_size, known.st_mtime_ns)))


@lru_cache(maxsize=4)
def _parsed_lines(path: Path, _identity: tuple[int, int, int]) -> tuple[Promotion, ...]:
    """The lines of a journal of this inode, size and time; a year's take a second, and servers read them often."""
    entries = read_records(path, Promotion, name="a promotion")
    for number, entry in enumerate(entries, start=1):
        try:
            moment_of(entry.time)
        except (ValueError, TypeError, AttributeError) as error:
            raise ContractError(f"{path} line {number} is not a promotion: {error}") from error
        if type(entry.version) is not int or entry.action not in ACTIONS:
            raise ContractError(
                f"{path} line {number} is {entry.action!r} of version {entry.version!r}, "
                f"expected one of {', '.join(ACTIONS)} of a number"
            )
    # A configuration is restored after the last line alone; a year's are most of the file.
    return (*(replace(entry, config=None) if entry.config else entry for entry in entries[:-1]), *entries[-1:])


def read_standing(store: Path) -> list[Promotion]:
    """The lines that changed what answers, and those about baking, oldest first; errors as `read_entries`.

    A line whose writing failed half-way is taken back by the `withdrawn` line that follows it.
    """
    lines: list[Promotion] = []
    before: Promotion | None = None
    for entry in read_entries(store):
        if entry.action not in (INTENT, WITHDRAWN):
            lines.append(entry)
        elif entry.action == WITHDRAWN and lines and before is lines[-1] and before.version == entry.version:
            lines.pop()
        before = entry
    return lines


def read_journal(store: Path) -> list[Promotion]:
    """The lines of `read_standing` that changed which version is live."""
    return [entry for entry in read_standing(store) if entry.action in LIVE_ACTIONS]


def append_promotion(store: Path, promotion: Promotion) -> Promotion:
    """Appends one promotion and flushes it to disk; answers it as written.

    Where its time lies before that of the last line (the clock was set back), it gets the last line's.
    """
    entries = read_entries(store)
    if entries and moment_of(promotion.time) < moment_of(entries[-1].time):
        promotion = replace(promotion, time=entries[-1].time)
    append_record(store / JOURNAL_FILE, promotion)
    return promotion


def current(store: Path) -> Promotion | None:
    """The promotion that made the live version live; None where nothing is."""
    promotions = read_journal(store)
    return promotions[-1] if promotions else None


def blocked_models(store: Path) -> dict[str, Promotion]:
    """The models that were taken back by themselves, each with the line that did it; a promotion unblocks it."""
    found: dict[str, Promotion] = {}
    for entry in read_journal(store):
        if entry.blocked_model_id is not None:
            found[entry.blocked_model_id] = entry
        elif entry.action == PROMOTE:
            found.pop(entry.model_id, None)
    return found


def interrupted(store: Path) -> Promotion | None:
    """The intent that no later line answers: of a deployment at work, or of one that was killed; None = none."""
    entries = read_entries(store)
    return entries[-1] if entries and entries[-1].action == INTENT else None


def canary_at_work(store: Path) -> Promotion | None:
    """The line of the canary that is at work, with its share; None where there is none.

    A canary ends by its own line or by any that changes which version is live. One whose line was being written when
    its start failed is taken back by the `withdrawn` line right after it.
    """
    found: Promotion | None = None
    before: Promotion | None = None
    for entry in read_entries(store):
        if entry.action == CANARY:
            found = entry
        elif entry.action in (CANARY_ENDED, *LIVE_ACTIONS) or (
            entry.action == WITHDRAWN and before is not None and before is found and before.version == entry.version
        ):
            found = None
        before = entry
    return found


def live_at(store: Path, moment: datetime) -> tuple[Promotion, Promotion | None] | None:
    """What was live at `moment` (with a time zone), and the promotion that ended it (None = live still).

    None where nothing was live yet.
    """
    promotions = read_journal(store)
    for entry, after in zip(reversed(promotions), [None, *reversed(promotions)]):
        if moment_of(entry.time) <= moment:
            return entry, after
    return None


def moment_of(text: str) -> datetime:
    """The time that ISO 8601 `text` means; UTC where it has no zone.

    Raises:
        ValueError: it is no time.
    """
    # Python 3.10 does not know that Z is UTC.
    moment = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def findings_path(store: Path, version: int) -> Path:
    """Where the monitor leaves what it found of a version."""
    return store / "baking" / f"{version}.json"


def write_findings(store: Path, findings: Findings) -> None:
    """Replaces what was known of the version.

    Raises:
        OSError: the store cannot be written.
    """
    path = findings_path(store, findings.version)
    # The release controller, which may be another user, reads them; the monitor's umask is for its state.
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        path.parent.chmod(0o755)
    write_whole(path, json.dumps(asdict(findings), indent=2, allow_nan=False) + "\n")
    path.chmod(0o644)


def read_findings(store: Path, version: int) -> Findings | None:
    """What the monitor found of a version; None where it has not said anything.

    Raises:
        ContractError: the file is no findings of this version.
    """
    path = findings_path(store, version)
    try:
        found = Findings(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, ContractError) as error:
        raise ContractError(f"{path} cannot be read: {error}, expected the monitor's findings") from error
    if found.version != version:
        raise ContractError(f"{path} is about version {found.version}, expected {version}")
    return found


def baking(store: Path) -> Promotion | None:
    """The line that made the version live that bakes now; None where none does.

    A version bakes from its release or promotion on, until the journal says that it is `baked` or another version is
    live. The first version has nothing before it to go back to, and a version that was gone back to is known already.
    """
    live = current(store)
    if live is None or live.action not in (RELEASE, PROMOTE) or live.previous_version is None:
        return None
    baked = {each.version for each in read_entries(store) if each.action == BAKED}
    return None if live.version in baked else live


def seconds_since(line: Promotion, now: datetime) -> float:
    """Seconds from the journal's line to `now`, which has a time zone; negative where the clock was set back."""
    return (now - moment_of(line.time)).total_seconds()
