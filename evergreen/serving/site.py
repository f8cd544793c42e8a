"""The place where a deployment works: one store, one repository, its servers; opened with what a crash left repaired.

Whoever changes what is served (`release`, `rollback`, `promote`, the canary) opens the site first. Every change is
announced in the journal before any server hears of it, and withdrawn there if it comes to nothing.

A journal that ends with an intent means a deployment at work, which holds the lock, or a killed one. Whoever opens the
site next goes back, never forward: the configuration that the intent found is written again, every server is notified
and probed, then the intent is withdrawn. A killed release thus costs its version number, and the step that is retried
releases the same model under the next one. A recovery that is killed itself begins anew.

The commands that change what is served share the flags that say where, and for whom. Where is `<store>/serving.json`,
as the last release left it, so that a person on call names the store and the reason and nothing else.
"""

import argparse
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from evergreen.config.reader import add_flags
from evergreen.contracts.manifests import Model, Release
from evergreen.contracts.serving import ServedNames
from evergreen.registry import promotion_journal
from evergreen.registry.models import read_serving_place, release_path
from evergreen.registry.promotion_journal import Promotion, append_promotion
from evergreen.registry.recommenders import served_name
from evergreen.registry.traffic_plan import Arm
from evergreen.runtime.durable import no_checkpoint
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.runtime.flags import whoami
from evergreen.runtime.plain_text import log_as_text
from evergreen.serving.intact import golden_rows
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.servers import (
    ACCESS_FLAGS,
    ACCESS_VARIABLES,
    Connect,
    Fleet,
    Patience,
    Resolve,
    Triton,
    TritonAccess,
    parse_urls,
    probe,
    read_access,
    resolve,
    wait_until_ready,
)
from evergreen.storage.uris import open_objects, typed_folder, typed_uri

logger = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound="SiteSettings")


@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """Where a deployment works, for whom, and how patiently."""

    store: Path
    """The model store."""
    repository: str
    """URI of Triton's model repository, as this process sees it."""
    recommender: str | None = None
    """Name of the recommender that is served; None = that of the store (`recommenders.served_name`)."""
    triton_urls: tuple[str, ...] = ()
    """Servers, see `servers`; none = publish only, servers read it when they start."""
    who: str = field(default_factory=whoami)
    """The person or pipeline run that asks, for the journal."""
    patience: Patience = field(default_factory=Patience)
    connect: Connect = Triton
    resolve: Resolve = resolve
    clock: Callable[[], datetime] = partial(datetime.now, timezone.utc)
    """The time, with a time zone."""
    checkpoint: Callable[[str], None] = no_checkpoint
    """Called with the name of each step that a crash may follow."""

    def now(self) -> str:
        """The time, ISO 8601 UTC."""
        return self.clock().astimezone(timezone.utc).isoformat()

    def open_repository(self) -> ModelRepository:
        """The model repository, for reading without the servers; changes need its lock.

        Raises:
            ContractError: the store does not say what its recommender is called.
        """
        name = self.recommender or served_name(self.store)
        if name is None:
            raise ContractError(f"model store {self.store} has no release and no recommender, expected one of them")
        holder = f"{self.who}, process {os.getpid()} on {socket.gethostname()}"
        # Triton's process has a user of its own, and no group of ours.
        objects = open_objects(self.repository, readable=True)
        return ModelRepository(objects, ServedNames(name), holder=holder)

    def serving(self: Settings, model: Model) -> Settings:
        """The settings of a deployment of `model`, whose recommender names what is served.

        Raises:
            ContractError: the store serves a recommender of another name, which its journal is about.
        """
        name, known = model.recommender.name, served_name(self.store)
        if promotion_journal.read_entries(self.store) and known != name:
            raise ContractError(
                f"model {model.model_id} is of recommender {name!r}, expected {known!r}, which the store "
                f"{self.store} serves: another recommender needs another store"
            )
        return replace(self, recommender=name)


class Fallback(NamedTuple):
    """The version that must answer again where a change fails."""

    version: int
    golden: GoldenRows


@dataclass(kw_only=True)
class Site:
    """An open site, its lock held; see `opened`."""

    settings: SiteSettings
    repository: ModelRepository
    fleet: Fleet
    recovered: Promotion | None = None
    """The interrupted intent that was withdrawn when the site was opened."""
    is_published: bool = False
    """Whether a new configuration was written: from then on a version may have answered."""
    lost: list[str] = field(default_factory=list)
    """What could not be restored after a failure, one sentence each."""
    needs_recovery: bool = False
    """Whether the configuration could not be restored: the intent stays, and the next deployment goes back."""

    @property
    def store(self) -> Path:
        """The model store."""
        return self.settings.store

    @property
    def names(self) -> ServedNames:
        """What the recommender's models are called."""
        return self.repository.names

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
        return self.settings.now()

    def fallback(self) -> Fallback | None:
        """The live version of the journal, if the repository holds it."""
        live = self.live
        if live is None or live.version not in self.repository.versions():
            return None
        return Fallback(live.version, golden_rows(self.repository, self.store, live.version))

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
        """Writes the line with the time of now; answers it as written.

        Raises:
            TemporaryError: the lock was lost. Another deployment may have withdrawn the intent of this one since, and
                what it wrote must stay the last word.
        """
        self.repository.check_held()
        return append_promotion(self.store, replace(entry, time=self.now()))

    def holds_lock(self) -> bool:
        """Whether what lies in the store and the repository is still this deployment's to undo."""
        try:
            self.repository.check_held()
        except (TemporaryError, PermanentError) as error:
            logger.error("nothing more is undone: %s", error)
            return False
        return True

    @contextmanager
    def announced(self, intent: Promotion) -> Iterator[Promotion]:
        """Writes `intent` to the journal before the body, and withdraws it there if the body fails."""
        intent = self.append(replace(intent, action=promotion_journal.INTENT, config=self.repository.read_config()))
        try:
            self.checkpoint("intent written")
            yield intent
        except BaseException as error:
            if self.needs_recovery:
                logger.error("the intent of version %d stays for the next deployment to withdraw", intent.version)
            else:
                self.withdraw(intent, f"{type(error).__name__}: {error}")
            raise

    def withdraw(self, intent: Promotion, reason: str) -> None:
        """Takes `intent` back in the journal; where that cannot be written, the next deployment does it."""
        reason = "; ".join([reason, *self.lost])
        try:
            self.append(replace(intent, action=promotion_journal.WITHDRAWN, reason=reason, config=None))
        except (OSError, ContractError, TemporaryError, PermanentError) as error:
            logger.error("the journal in %s cannot be written: %s", self.store, error)

    def reset_plan(self, reason: str) -> bool:
        """See the function `reset_plan`."""
        return reset_plan(self.settings, self.repository, reason)

    def undo_canary_start(self, intent: Promotion) -> None:
        """Takes back a start that failed or was killed: no client asks the canary any more, and no server holds it.

        Where clients may have been sent to it already, it is unloaded by the next step, when they have read the plan.
        """
        if not self.reset_plan(f"start of version {intent.version} was withdrawn"):
            self.remove_canary()

    def remove_canary(self) -> None:
        """Unloads the canary on every server, then removes its files: as long as they are there, this is to be done.

        Raises:
            TemporaryError: a server cannot be reached now; the files stay.
        """
        self.fleet.for_each(lambda server: server.unload(self.names.canary))
        self.checkpoint("canary unloaded")
        self.repository.remove_canary()
        self.checkpoint("canary removed")


def reset_plan(settings: SiteSettings, repository: ModelRepository, reason: str) -> bool:
    """Writes a traffic plan by which the live version answers everything; needs the lock. Whether that was news.

    Without a plan there is nothing to do: everyone asks the served model by its name anyway.
    """
    plan, live = repository.read_plan(), promotion_journal.current(settings.store)
    if plan is None or live is None:
        return False
    stable = Arm(model_name=repository.names.model, version=live.version)
    if plan.canary is None and plan.stable == stable:
        return False
    # Where only the number is out of date, no client has to be waited for, so the plan keeps its time.
    published_at = plan.published_at if plan.canary is None else settings.clock().isoformat()
    repository.write_plan(plan.without_canary(stable=stable, published_at=published_at, reason=reason))
    logger.info("the traffic plan names version %d alone: %s", live.version, reason)
    return True


@contextmanager
def opened(settings: SiteSettings) -> Iterator[Site]:
    """Yields the site, with the lock held, every server answering, and what a killed deployment left repaired.

    Raises:
        ContractError: the repository cannot be written.
        TemporaryError: another deployment is at work for longer than `patience.lock_seconds`, a server does not answer,
            or cannot be restored yet.
    """
    repository, patience = settings.open_repository(), settings.patience
    with ExitStack() as stack:
        patience.until_done(lambda: stack.enter_context(repository.locked()), patience.lock_seconds)
        interrupted = promotion_journal.interrupted(settings.store)
        if interrupted:
            # Before the servers are reached: one that starts meanwhile must find what the journal calls live.
            _repair_repository(repository, interrupted)
        fleet = Fleet(settings.triton_urls, settings.connect, patience=patience, resolve=settings.resolve)
        stack.enter_context(closing(fleet))
        site = Site(settings=settings, repository=repository, fleet=fleet, recovered=interrupted)
        if interrupted:
            _finish_recovery(site, interrupted)
        yield site


def _repair_repository(repository: ModelRepository, intent: Promotion) -> None:
    """Writes the configuration that `intent` found, so that servers which start read it; needs the lock."""
    logger.warning("the deployment of version %d by %s was interrupted, going back", intent.version, intent.who)
    if repository.read_config() != intent.config:
        repository.write_config(intent.config)
    repository.discard_candidate()


def _finish_recovery(site: Site, intent: Promotion) -> None:
    """Notifies every server, removes the version that never went live, and withdraws the intent.

    Raises:
        TemporaryError: a server cannot be restored now; the intent stays, and the next deployment tries again.
    """
    fallback = site.fallback()
    problems: list[str] = []

    def restore(server: Triton) -> None:
        server.unload(site.names.candidate)
        if problem := restore_server(site, server, intent.config, fallback=fallback):
            problems.append(problem)

    site.fleet.for_each(restore)
    if problems:
        raise TemporaryError(
            f"the interrupted deployment of version {intent.version} cannot be taken back: {'; '.join(problems)}"
        )
    if intent.share is not None:
        site.undo_canary_start(intent)
    known = [*promotion_journal.read_journal(site.store), promotion_journal.canary_at_work(site.store)]
    if intent.version not in {entry.version for entry in known if entry is not None}:
        site.repository.withdraw(intent.version)
    site.withdraw(intent, f"the deployment by {intent.who} was interrupted")
    live = f"version {fallback.version} is live" if fallback else "nothing is live"
    logger.warning("the interrupted deployment of version %d is withdrawn, %s", intent.version, live)


def restore_server(site: Site, server: Triton, config: str | None, *, fallback: Fallback | None) -> str | None:
    """Notifies one server of the restored configuration and asks it; what is wrong, None if nothing is."""
    name = site.names.model
    try:
        if config is None:
            server.unload(name)
        else:
            server.load(name)
        if config is not None and fallback is not None:
            wait_until_ready(server, name, fallback.version, patience=site.patience)
            probe(server, name, version=fallback.version, golden=fallback.golden, named=False)
    except (TemporaryError, PermanentError) as error:
        return f"triton {server.url} did not return to what was live: {error}"
    return None


def add_site_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say where, and for whom."""
    parser.add_argument("--store", required=True, help="model store, folder or its URI")
    parser.add_argument(
        "--repository",
        type=typed_uri,
        help="Triton's model repository, folder or gs:// URI; default: where the last release went",
    )
    parser.add_argument(
        "--triton-urls",
        help="host:grpc_port or dns:///name:grpc_port of the running servers, comma-separated; empty = none; "
        "default: those of the last release",
    )
    parser.add_argument("--who", default="", help="who asks, for the journal; default: user@host")
    add_flags(parser, TritonAccess, prefix=ACCESS_FLAGS, variables=ACCESS_VARIABLES)


def site_of(arguments: argparse.Namespace) -> SiteSettings:
    """The place that the flags mean; also sets up the log of a command that changes what is served.

    Raises:
        ContractError: there is no such store, or neither the store nor a flag names where releases go.
    """
    log_as_text()
    store = typed_folder(arguments.store, "--store")
    place = read_serving_place(store)
    if place is None and (arguments.repository is None or arguments.triton_urls is None):
        raise ContractError(
            f"{store / 'serving.json'} is absent (no release yet), expected --repository and --triton-urls "
            "(empty = no server runs)"
        )
    urls = arguments.triton_urls
    access = read_access(arguments)
    connect = partial(Triton, access=access)
    for url in place.triton_urls if place and urls == "" else ():
        with suppress(TemporaryError), closing(connect(url)) as server:
            server.check_live()
            logger.warning("%s answers and is not told: what it serves stays, expected it in --triton-urls", url)
    return SiteSettings(
        store=store,
        repository=arguments.repository or (place.repository_uri if place else ""),
        triton_urls=parse_urls(urls) if urls is not None else tuple(place.triton_urls if place else ()),
        who=arguments.who or whoami(),
        connect=connect,
    )


def change_reason(text: str) -> str:
    """What a person gives as the reason of a change: the journal keeps it for good, so it may not be empty.

    >>> change_reason("AUC fell after version 12")
    'AUC fell after version 12'
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty, expected why, for the journal")
    return text
