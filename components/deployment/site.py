"""The place where a deployment works: one store, one repository, its servers.

Whoever changes what is served (`release`, `rollback`, `promote`, the canary) has a site opened first, by `recovery`.
Every change is announced in the journal before any server hears of it, and withdrawn there if it comes to nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from components.contracts.manifests import Release
from components.deployment.discovery import Fleet
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.servers import Patience
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.runtime.people import whoami
from components.store import promotion_journal
from components.store.models import release_path
from components.store.promotion_journal import Promotion, append_promotion

logger = logging.getLogger(__name__)


def no_checkpoint(name: str) -> None:
    """Passes; tests put a crash here, at each place that names itself."""


def utc_now() -> datetime:
    """The time in UTC."""
    return datetime.now(timezone.utc)


@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """Where a deployment works, for whom, and how patiently."""

    store: Path
    """The model store."""
    repository: str
    """URI of Triton's model repository, as this process sees it."""
    triton_urls: tuple[str, ...] = ()
    """Servers, see `discovery`; none = publish only, servers read it when they start."""
    who: str = field(default_factory=whoami)
    """The person or pipeline run that asks, for the journal."""
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], datetime] = utc_now
    """The time, with a time zone."""
    checkpoint: Callable[[str], None] = no_checkpoint
    """Called with the name of each step that a crash may follow."""


@dataclass(kw_only=True)
class Site:
    """An open site, its lock held; see `recovery.opened`."""

    settings: SiteSettings
    repository: ModelRepository
    fleet: Fleet
    recovered: Promotion | None = None
    """The interrupted intent that was withdrawn when the site was opened."""
    is_published: bool = False
    """Whether a new configuration was written: from then on a version may have answered."""
    lost: list[str] = field(default_factory=list)
    """What could not be led back after a failure, one sentence each."""
    needs_recovery: bool = False
    """Whether the configuration could not be restored: the intent stays, and the next deployment goes back."""

    @property
    def store(self) -> Path:
        """The model store."""
        return self.settings.store

    @property
    def patience(self) -> Patience:
        """How long to wait."""
        return self.settings.patience

    @property
    def live(self) -> Promotion | None:
        """The promotion that made the live version live."""
        return promotion_journal.current(self.store)

    def checkpoint(self, name: str) -> None:
        """Names a place that a crash may follow."""
        self.settings.checkpoint(name)

    def now(self) -> str:
        """The time, ISO 8601 UTC."""
        return self.settings.clock().astimezone(timezone.utc).isoformat()

    def entry(
        self,
        action: str,
        release: Release,
        *,
        reason: str,
        trigger_id: str | None = None,
        decision: str | None = None,
        share: float | None = None,
    ) -> Promotion:
        """A journal line about `release`, as of now."""
        live = self.live
        return Promotion(
            time=self.now(),
            action=action,
            version=release.version,
            previous_version=live.version if live else None,
            model_id=release.model_id,
            model_uri=release.model_uri,
            release_uri=release_path(self.store, release.version).absolute().as_uri(),
            trigger_id=trigger_id,
            reason=reason,
            who=self.settings.who,
            decision=decision,
            parent_model_id=release.parent_model_id,
            sha256=dict(release.sha256),
            share=share,
        )

    def append(self, entry: Promotion) -> Promotion:
        """Writes the line; answers it as written.

        Raises:
            TemporaryError: the lock was lost. Another deployment may have withdrawn the intent of this one since, and
                what it wrote must stay the last word.
        """
        self.repository.check_held()
        return append_promotion(self.store, entry)

    def holds_lock(self) -> bool:
        """Whether what lies in the store and the repository is still this deployment's to undo."""
        try:
            self.repository.check_held()
        except (TemporaryError, PermanentError) as error:
            logger.error("nothing more is undone: %s", error)
            return False
        return True


@contextmanager
def announced(site: Site, intent: Promotion) -> Iterator[Promotion]:
    """Writes `intent` to the journal before the body, and withdraws it there if the body fails."""
    intent = site.append(replace(intent, action=promotion_journal.INTENT, config=site.repository.read_config()))
    try:
        site.checkpoint("intent written")
        yield intent
    except BaseException as error:
        if site.needs_recovery:
            logger.error("the intent of version %d stays for the next deployment to withdraw", intent.version)
        else:
            withdraw(site, intent, f"{type(error).__name__}: {error}")
        raise


def withdraw(site: Site, intent: Promotion, reason: str) -> None:
    """Takes `intent` back in the journal; where that cannot be written, the next deployment does it."""
    reason = "; ".join([reason, *site.lost])
    line = replace(intent, action=promotion_journal.WITHDRAWN, time=site.now(), reason=reason, config=None)
    try:
        site.append(line)
    except (OSError, ContractError, TemporaryError, PermanentError) as error:
        logger.error("the journal in %s cannot be written: %s", site.store, error)
