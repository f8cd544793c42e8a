"""The promotion journal: when each version was live, who made the version live, and why.

The journal is an append-only file of JSON lines. Deployment writes the journal. The next run reads
its champion from the journal.

The journal is a write-ahead log. Before any server is notified of a version, an `intent` line
records the version and its hashes, so every answer comes from a version in the journal. After the
live version has changed, another line records the change. If the last line is an intent, a
deployment is active or was killed. If a deployment was killed, the next deployment first rolls it
back.

The journal also shows whether a version is baking (`evergreen.contracts.baking`). The monitor may
not change what is served. The monitor only writes its findings on each version to a file in the
registry (`findings_path`), and the release controller reads these files.

Requests to the controller and its answers are lines of the same file (`registry.requests`). The
order of all lines is therefore known.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from evergreen.contracts.baking import Findings
from evergreen.contracts.requests import (
    KINDS,
    REQUEST_ACTIONS,
    REQUESTED,
    ServingAnswer,
    ServingRequest,
)
from evergreen.runtime.durable import append_record, read_records, write_whole
from evergreen.runtime.errors import ContractError, UnreadableFile

JOURNAL_FILE = "journal.jsonl"
INTENT = "intent"
"""Servers will load `version` next."""
RELEASE = "release"
ROLLBACK = "rollback"
PROMOTE = "promote"
"""Action of a line: `version` becomes live. Before, the version was a canary, or the gate had
refused its model."""
WITHDRAWN = "withdrawn"
"""Action of a line that cancels the preceding intent, because the intended change failed. The live
version did not change."""
CANARY = "canary"
"""`version` answers a part of the traffic. `share` is the canary's share of the traffic. The live
version answers the rest of the traffic."""
CANARY_ENDED = "canary_ended"
"""`version` no longer answers requests. The live version answers all requests."""
BAKED = "baked"
"""Action of a line: `version` is live and has passed its baking (`evergreen.contracts.baking`)."""

LIVE_ACTIONS = (RELEASE, ROLLBACK, PROMOTE)
"""Actions that make `version` the live version."""
ACTIONS = (INTENT, *LIVE_ACTIONS, WITHDRAWN, CANARY, CANARY_ENDED, BAKED)


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """Line of the promotion journal."""

    time: str
    """ISO 8601 UTC. The time is never before the time of the preceding line, even if the clock was
    set back."""
    action: str
    """One of `ACTIONS`."""
    version: int
    """Number of the version to which the action applies."""
    previous_version: int | None
    """Number of the version that was live before this action."""
    model_id: str
    model_uri: str
    release_uri: str
    """URI of the version's `Release` manifest."""
    trigger_id: str | None
    """Id of the retrain request that led to the action. None if a person started the action."""
    reason: str
    who: str | None = None
    """Person, pipeline run or program that performed the action. The value is `controller` if the
    controller rolls a version back."""
    decision: str | None = None
    """Decision of the gate about the model. None if the action needed no decision."""
    parent_model_id: str | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    """Hashes of the version's files, as in the version's `Release`."""
    share: float | None = None
    """Share of the traffic that the canary gets. None if the line neither has the action `canary`
    nor is the `intent` line before a new canary."""
    blocked_model_id: str | None = None
    """Id of the model that an automatic `rollback` removed from traffic. The model is not released
    again unless a person overrides the block."""
    config: str | None = None
    """Text of Triton's configuration before the change that an `intent` announces. The text is
    restored if the deployment is interrupted. This text is None if there was no configuration, or
    if the journal has a later promotion."""
    request: str | None = None
    """Id of the request that led to the line. None if the controller made the change without a
    request."""
    lease: int | None = None
    """Lease number of the controller. None in lines of older releases."""

    def baked(self, time: str, who: str, reason: str) -> "Promotion":
        """Return a line that ends the baking of this version."""
        return replace(
            self, action=BAKED, time=time, who=who, reason=reason, share=None, config=None
        )


Line = Promotion | ServingRequest | ServingAnswer
"""One line of the journal."""
Entry = TypeVar("Entry", Promotion, ServingRequest, ServingAnswer)


def read_entries(store: Path) -> list[Promotion]:
    """Return every promotion of the journal, oldest first.

    Raises the errors of `read_lines`.
    """
    return [line for line in read_lines(store) if isinstance(line, Promotion)]


def read_lines(store: Path) -> tuple[Line, ...]:
    """Return every line of the journal, oldest first.

    Returns an empty tuple if there is no journal. A last line without its newline is an incomplete
    append and is ignored. A line is also ignored if an earlier line has a newer lease. The
    controller that wrote the line lost its lease between its last check and the append.

    Raises:
        UnreadableFile: the file cannot be read now.
        ContractError: a complete line is neither a promotion nor a request nor an answer, or a line
            differs from its checksum. The message names the file and the line.
    """
    path = store / JOURNAL_FILE
    try:
        # A network share returns the current size only for an open file.
        with open(path, "rb") as file:
            known = os.fstat(file.fileno())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}") from error
    return _parsed_lines(path, (known.st_ino, known.st_size, known.st_mtime_ns))


def _line(**fields: Any) -> Line:
    action = fields.get("action")
    if action == REQUESTED:
        return ServingRequest(**fields)
    return ServingAnswer(**fields) if action in REQUEST_ACTIONS else Promotion(**fields)


@lru_cache(maxsize=4)
def _parsed_lines(path: Path, _identity: tuple[int, int, int]) -> tuple[Line, ...]:
    """Return the lines of a journal file with the given inode, size and modification time.

    The result is cached, because parsing the lines of a year takes a second and servers read them
    often.
    """
    lines = read_records(path, _line, name="a promotion")
    for number, entry in enumerate(lines, start=1):
        try:
            moment_of(entry.time)
            if isinstance(entry, ServingRequest):
                moment_of(entry.deadline)
        except (ValueError, TypeError, AttributeError) as error:
            raise ContractError(f"{path} line {number} is not a promotion: {error}") from error
        if isinstance(entry, ServingRequest):
            _check_request(entry, f"{path} line {number}")
        elif not (entry.lease is None or type(entry.lease) is int):
            raise ContractError(
                f"{path} line {number} has the lease {entry.lease!r}, expected a number"
            )
        _check_ids(entry, f"{path} line {number}")
        if isinstance(entry, Promotion) and (
            type(entry.version) is not int or entry.action not in ACTIONS
        ):
            raise ContractError(
                f"{path} line {number} is not a promotion: action {entry.action!r} and version "
                f"{entry.version!r}, expected one of {', '.join(ACTIONS)}, and a number"
            )
    # Only the configuration in the last promotion is ever restored. Keeping the configurations of
    # older promotions would take most of the memory.
    at = [number for number, line in enumerate(lines) if isinstance(line, Promotion)]
    for number in at[:-1]:
        entry = lines[number]
        if isinstance(entry, Promotion) and entry.config:
            lines[number] = replace(entry, config=None)
    return tuple(_unfenced(lines))


def _check_ids(entry: Line, source: str) -> None:
    """Check the fields by which lines are found. They must be strings or absent."""
    for name in ("request", "run", "model_id"):
        value = getattr(entry, name, None)
        if not isinstance(value, str | None):
            raise ContractError(f"{source} has the {name} {value!r}, expected a string")


def _check_request(request: ServingRequest, source: str) -> None:
    """Check the kind and the id of a request.

    The controller derives its action from the kind, and the name of a folder from the id.
    """
    if request.kind not in KINDS:
        raise ContractError(
            f"{source} is a request of kind {request.kind!r}, expected one of {', '.join(KINDS)}"
        )
    name = request.request
    if type(name) is not str or name in ("", "..") or Path(name).name != name:
        raise ContractError(f"{source} is a request with the id {name!r}, expected a plain name")


def _unfenced(lines: list[Line]) -> Iterator[Line]:
    newest = 0
    for line in lines:
        lease = None if isinstance(line, ServingRequest) else line.lease
        if lease is None or lease >= newest:
            newest = max(newest, lease or 0)
            yield line


def newest_lease(store: Path) -> int:
    """Return the highest lease number in the journal.

    Returns 0 if the journal has no lease.
    """
    leases = [line.lease for line in read_lines(store) if not isinstance(line, ServingRequest)]
    return max((lease for lease in leases if lease is not None), default=0)


def read_effective(store: Path) -> list[Promotion]:
    """Return the lines about canaries, baking and live versions, without withdrawn lines.

    If a deployment failed while it wrote a line, a `withdrawn` line follows and cancels that line.
    Raises the errors of `read_entries`.
    """
    lines: list[Promotion] = []
    before: Promotion | None = None
    for entry in read_entries(store):
        if entry.action not in (INTENT, WITHDRAWN):
            lines.append(entry)
        elif (
            entry.action == WITHDRAWN
            and lines
            and before is lines[-1]
            and before.version == entry.version
        ):
            lines.pop()
        before = entry
    return lines


def read_journal(store: Path) -> list[Promotion]:
    """Return the lines that changed the live version, without withdrawn lines."""
    return [entry for entry in read_effective(store) if entry.action in LIVE_ACTIONS]


def append_promotion(store: Path, promotion: Promotion) -> Promotion:
    """Append one promotion by `append_entry`."""
    return append_entry(store, promotion)


def append_entry(store: Path, entry: Entry) -> Entry:
    """Append one line, flush it to disk, and return the line as written.

    The clock may have been set back. If the clock was set back, the new line gets the time of the
    last line.
    """
    lines = read_lines(store)
    if lines and moment_of(entry.time) < moment_of(lines[-1].time):
        entry = replace(entry, time=lines[-1].time)
    append_record(store / JOURNAL_FILE, entry)
    return entry


def current(store: Path) -> Promotion | None:
    """Return the last line that made a version live, or None if no version is live."""
    promotions = read_journal(store)
    return promotions[-1] if promotions else None


def blocked_models(store: Path) -> dict[str, Promotion]:
    """Return the models that were rolled back automatically, each with the line of its rollback.

    A model is no longer blocked if it was promoted after its rollback.
    """
    found: dict[str, Promotion] = {}
    for entry in read_journal(store):
        if entry.blocked_model_id is not None:
            found[entry.blocked_model_id] = entry
        elif entry.action == PROMOTE:
            found.pop(entry.model_id, None)
    return found


def interrupted(store: Path) -> Promotion | None:
    """Return the last promotion if it is an intent, or None otherwise.

    The last line is an intent if a deployment is active or was killed.
    """
    entries = read_entries(store)
    return entries[-1] if entries and entries[-1].action == INTENT else None


def canary_at_work(store: Path) -> Promotion | None:
    """Return the newest line of the running canary, with its share, or None if there is no canary.

    A canary ends with a `canary_ended` line, or with any line that changes the live version. If the
    start of a canary failed while its line was written, a `withdrawn` line follows and cancels the
    start.
    """
    found: Promotion | None = None
    before: Promotion | None = None
    for entry in read_entries(store):
        if entry.action == CANARY:
            found = entry
        elif entry.action in (CANARY_ENDED, *LIVE_ACTIONS) or (
            entry.action == WITHDRAWN
            and before is not None
            and before is found
            and before.version == entry.version
        ):
            found = None
        before = entry
    return found


def live_at(store: Path, moment: datetime) -> tuple[Promotion, Promotion | None] | None:
    """Return the journal lines of the version that was live at `moment`.

    Args:
        store: Folder of the model registry.
        moment: Time with a time zone.

    Returns:
        The line that made the version live, and the line that replaced the version. The second line
        is None if the version is still live. The result is None if no version was live at `moment`.
    """
    promotions = read_journal(store)
    for entry, after in zip(reversed(promotions), [None, *reversed(promotions)]):
        if moment_of(entry.time) <= moment:
            return entry, after
    return None


def moment_of(text: str) -> datetime:
    """Parse an ISO 8601 time. A time without a zone is UTC.

    Raises:
        ValueError: the text is not a time.
    """
    # Python 3.10 does not parse Z as UTC.
    moment = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def findings_path(store: Path, version: int) -> Path:
    """Return the path of the monitor's findings on a version."""
    return store / "baking" / f"{version}.json"


def write_findings(store: Path, findings: Findings) -> None:
    """Write the monitor's findings on a version, and replace earlier findings.

    Raises:
        OSError: the store cannot be written.
    """
    path = findings_path(store, findings.version)
    # The release controller may run as another user and must be able to read the findings, despite
    # the umask of the monitor.
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        path.parent.chmod(0o755)
    write_whole(path, json.dumps(asdict(findings), indent=2, allow_nan=False) + "\n")
    path.chmod(0o644)


def read_findings(store: Path, version: int) -> Findings | None:
    """Return the monitor's findings on a version, or None before the first findings.

    Raises:
        ContractError: the file does not contain findings on this version.
    """
    path = findings_path(store, version)
    try:
        found = Findings(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, ContractError) as error:
        raise ContractError(
            f"{path} cannot be read: {error}, expected the monitor's findings"
        ) from error
    if found.version != version:
        raise ContractError(f"{path} is about version {found.version}, expected {version}")
    return found


def baking(store: Path) -> Promotion | None:
    """Return the line that made the baking version live, or None if no version is baking.

    Baking starts with the release or promotion of a version. Baking ends when the version is
    `baked`, or when another version goes live. The first version does not bake, because a rollback
    would have no target. If a rollback makes a version live, the version does not bake, because it
    served before.
    """
    live = current(store)
    if live is None or live.action not in (RELEASE, PROMOTE) or live.previous_version is None:
        return None
    baked = {each.version for each in read_entries(store) if each.action == BAKED}
    return None if live.version in baked else live


def seconds_since(line: Promotion, now: datetime) -> float:
    """Return the seconds from the journal's line to `now`, which has a time zone.

    The number is negative if the clock was set back.
    """
    return (now - moment_of(line.time)).total_seconds()
