"""What the monitor found of a version that bakes, and which version does: `contracts.baking` has the terms.

The monitor has no right to change what is served, so it leaves its findings here, one file a version, for deployment's
controller. Whether a version bakes follows from the promotion journal.
"""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from components.contracts.baking import Findings
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError
from components.store import promotion_journal
from components.store.promotion_journal import PROMOTE, RELEASE, Promotion


def findings_path(store: Path, version: int) -> Path:
    """Where the monitor leaves what it found of a version."""
    return store / "baking" / f"{version}.json"


def write_findings(store: Path, findings: Findings) -> None:
    """Replaces what was known of the version.

    Raises:
        OSError: the store cannot be written.
    """
    path = findings_path(store, findings.version)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(findings), indent=2, allow_nan=False) + "\n")


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
    live = promotion_journal.current(store)
    if live is None or live.action not in (RELEASE, PROMOTE) or live.previous_version is None:
        return None
    baked = {each.version for each in promotion_journal.read_entries(store) if each.action == promotion_journal.BAKED}
    return None if live.version in baked else live


def seconds_since(line: Promotion, now: datetime) -> float:
    """Seconds from the journal's line to `now`, which has a time zone; negative where the clock was set back."""
    return (now - promotion_journal.moment_of(line.time)).total_seconds()
