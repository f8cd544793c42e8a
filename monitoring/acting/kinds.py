"""Which action follows a policy's decision: the settings, and whether a rollback may be made.

In: the policy's name, the promotion journal and the gate's verdicts of the model store. Out: a kind of action, or why
the wanted one cannot be. Doing it is left to `monitoring.acting.correction` and `monitoring.acting.retraining`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from components.contracts.manifests import Release, Verdict
from components.runtime.errors import ContractError
from components.store import models as model_store
from components.store import promotion_journal

RETRAIN, NOTIFY, ROLLBACK, SHADOW = "retrain", "notify", "rollback", "shadow"
KINDS = (RETRAIN, NOTIFY, ROLLBACK, SHADOW)


@dataclass(frozen=True, kw_only=True)
class KindSettings:
    """What is done about each policy's drift."""

    actions: str = ""
    """Action of each policy, such as `threshold=retrain,data_drift=notify`; of `retrain`, `notify`, `rollback` and
    `shadow`. A policy that is not named retrains; so does one whose rollback or shadow is not possible."""
    rollback_command: str = ""
    """Command line of a rollback; `{previous}`, `{version}` and `{reason}` in an argument are filled in, for instance
    `evergreen rollback --store S --to {previous} --reason {reason}`."""
    rollback_within_seconds: float = 86_400.0
    """A version that has served for longer is not rolled back: the world has moved on, so its predecessor is older."""
    shadow_command: str = ""
    """Command line that starts a shadow of the previous version; filled in as `rollback_command`."""
    command_timeout_seconds: float = 600.0
    """A rollback or shadow command that takes longer is killed and counts as failed."""

    def __post_init__(self) -> None:
        """Refuses actions that cannot be done."""
        wanted = set(parse_actions(self.actions).values())
        for kind, command in ((ROLLBACK, self.rollback_command), (SHADOW, self.shadow_command)):
            if kind in wanted and not command.strip():
                raise ContractError(f"{kind}_command is empty, expected a command line, as actions name {kind}")
        for name in ("rollback_within_seconds", "command_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ContractError(f"{name} is {getattr(self, name)}, expected above 0")


def parse_actions(text: str) -> dict[str, str]:
    """The kind of action of each policy.

    Raises:
        ContractError: an item is no `policy=kind`, or names a policy twice.

    >>> parse_actions("threshold=retrain, data_drift=notify")
    {'threshold': 'retrain', 'data_drift': 'notify'}
    """
    actions: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        policy, _, kind = (part.strip() for part in item.partition("="))
        if not policy or kind not in KINDS:
            raise ContractError(f"actions has {item!r}, expected policy=kind with a kind of {', '.join(KINDS)}")
        if policy in actions:
            raise ContractError(f"actions names {policy!r} twice, expected one action for each policy")
        actions[policy] = kind
    return actions


class Predecessor(NamedTuple):
    """The version that the live one replaced."""

    version: int
    auc: float | None
    """Its AUC before the gate; None where the model store holds no verdict on it."""


def live_version(store: Path) -> int | None:
    """The version that the promotion journal says is live; None where nothing is.

    Raises:
        ContractError: the journal cannot be read.
    """
    live = promotion_journal.current(store)
    return None if live is None else live.version


def predecessor(store: Path, version: int) -> Predecessor | None:
    """What `version`, if it is live, replaced; None where nothing is known of it.

    Raises:
        ContractError: the journal or a manifest cannot be read.
    """
    live = promotion_journal.current(store)
    if live is None or live.version != version or live.previous_version is None:
        return None
    previous = Release.read(model_store.release_path(store, live.previous_version))
    path, _ = model_store.verdict_paths(store, previous.model_id)
    auc = Verdict.read(path).candidate.auc if path.exists() else None
    return Predecessor(live.previous_version, auc)


def against_rollback(store: Path, version: int, *, auc: float | None, settings: KindSettings, now: float) -> str | None:
    """Why `version` may not be rolled back now; None where it may.

    It may if it is live by a release or a promotion (never by a rollback: two versions would take turns), has not
    served for long, and its predecessor is known and was better before the gate than this one is now.

    Args:
        store: The model store.
        version: That serves badly.
        auc: Measured of it now; None = the drift is not one of AUC, and the gate's figure is not compared.
        settings: How long is long.
        now: Seconds since the epoch.

    Raises:
        ContractError: the journal or a manifest cannot be read.
    """
    live = promotion_journal.current(store)
    if live is None or live.version != version:
        return f"version {version} is not the live one of the journal"
    if live.action == promotion_journal.ROLLBACK:
        return f"version {version} is live by a rollback already"
    age = now - _moment(live.time).timestamp()
    if age > settings.rollback_within_seconds:
        return f"version {version} has served for {age:.0f} s"
    known = predecessor(store, version)
    if known is None:
        return f"version {version} has no predecessor"
    if known.auc is None:
        return f"no verdict is kept on its predecessor, version {known.version}"
    if auc is not None and known.auc <= auc:
        return f"its predecessor, version {known.version}, had auc {known.auc:.3f} before the gate"
    return None


def _moment(text: str) -> datetime:
    return promotion_journal.moment_of(text).astimezone(timezone.utc)
