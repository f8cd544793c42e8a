"""Open one deployment target, and repair what a crashed deployment left behind.

A deployment target is a model registry, a Triton model repository and the Triton servers that read
it. In the code it is called a site. Every command that changes what is served (`release`,
`rollback`, `promote`, the canary commands) opens the site first. The command writes an intent to
the promotion journal before it notifies any server. If the change fails, the command withdraws the
intent.

If the last line of the journal is an intent, either a deployment is running and holds the lock, or
a deployment was killed. After a kill, the next command that opens the site rolls back. The rollback
restores the configuration from before the intent, notifies and probes every server, then withdraws
the intent. The version number of a killed release is not used again. A retry of the step releases
the same model under the next number. If the recovery itself is killed, the next command starts it
again.

The commands share the flags for the target and for the person who asks. The default target is read
from `<store>/serving.json`, which the last release wrote. An operator on call therefore needs to
pass only the registry and a reason.
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
    """Deployment target, the person or run that deploys to it, and the timeouts."""

    store: Path
    """Folder of the model registry."""
    repository: str
    """URI of Triton's model repository, as seen from this process."""
    recommender: str | None = None
    """Name of the served recommender. None means the name in the registry
    (`recommenders.served_name`)."""
    triton_urls: tuple[str, ...] = ()
    """Addresses of the running servers, see `servers`. If empty, a release is only published, and
    servers read it when they start."""
    who: str = field(default_factory=whoami)
    """Person or pipeline run that makes the change, for the journal."""
    patience: Patience = field(default_factory=Patience)
    connect: Connect = Triton
    resolve: Resolve = resolve
    clock: Callable[[], datetime] = partial(datetime.now, timezone.utc)
    """Current time, with a time zone."""
    checkpoint: Callable[[str], None] = no_checkpoint
    """Function that is called with a name at each point where a crash is tested."""

    def now(self) -> str:
        """Return the current time as ISO 8601 in UTC."""
        return self.clock().astimezone(timezone.utc).isoformat()

    def open_repository(self) -> ModelRepository:
        """Open the model repository. Changes need its lock, reads do not. No server is contacted.

        Raises:
            ContractError: the registry does not contain the recommender's name.
        """
        name = self.recommender or served_name(self.store)
        if name is None:
            raise ContractError(
                f"model registry {self.store} has no release and no recommender, "
                "expected one of them"
            )
        holder = f"{self.who}, process {os.getpid()} on {socket.gethostname()}"
        # Triton runs as another user, so the files must be readable for everyone.
        objects = open_objects(self.repository, readable=True)
        return ModelRepository(objects, ServedNames(name), holder=holder)

    def serving(self: Settings, model: Model) -> Settings:
        """Return the settings for a deployment of `model`, with its recommender's name.

        Raises:
            ContractError: the registry already serves a recommender of another name.
        """
        name, known = model.recommender.name, served_name(self.store)
        if promotion_journal.read_entries(self.store) and known != name:
            raise ContractError(
                f"model {model.model_id} is of recommender {name!r}, expected {known!r}, which the "
                f"store {self.store} serves: another recommender needs another store"
            )
        return replace(self, recommender=name)


class Fallback(NamedTuple):
    """Version to restore if a change fails, with its golden rows."""

    version: int
    golden: GoldenRows


@dataclass(kw_only=True)
class Site:
    """Open deployment target whose lock is held. `opened` yields it."""

    settings: SiteSettings
    repository: ModelRepository
    fleet: Fleet
    recovered: Promotion | None = None
    """Interrupted intent that was withdrawn when the site was opened, or None."""
    is_published: bool = False
    """Whether a new configuration was written. If True, servers may already have answered from
    it."""
    lost: list[str] = field(default_factory=list)
    """Error messages of everything that could not be restored after a failure."""
    needs_recovery: bool = False
    """Whether restoring the configuration failed. If True, the intent stays in the journal, and the
    next deployment rolls back."""

    @property
    def store(self) -> Path:
        """Folder of the model registry."""
        return self.settings.store

    @property
    def names(self) -> ServedNames:
        """Names of the recommender's models in Triton."""
        return self.repository.names

    @property
    def patience(self) -> Patience:
        """Timeouts of the deployment."""
        return self.settings.patience

    @property
    def live(self) -> Promotion | None:
        """Journal entry that made the live version live, or None."""
        return promotion_journal.current(self.store)

    def checkpoint(self, name: str) -> None:
        """Report a point where a crash is tested."""
        self.settings.checkpoint(name)

    def now(self) -> str:
        """Return the current time as ISO 8601 in UTC."""
        return self.settings.now()

    def fallback(self) -> Fallback | None:
        """Return the live version with its golden rows, or None if it is not in the repository."""
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
        """Build a journal entry about `release` with the current time."""
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
        """Append the entry to the journal with the current time, and return the entry as written.

        Raises:
            TemporaryError: the lock was lost. Another deployment may have withdrawn this
                deployment's intent since then, and the other deployment's entry must remain the
                last one.
        """
        self.repository.check_held()
        return append_promotion(self.store, replace(entry, time=self.now()))

    def holds_lock(self) -> bool:
        """Return whether this deployment still holds the lock and may undo its changes."""
        try:
            self.repository.check_held()
        except (TemporaryError, PermanentError) as error:
            logger.error("the rollback stops: %s", error)
            return False
        return True

    @contextmanager
    def announced(self, intent: Promotion) -> Iterator[Promotion]:
        """Append `intent` to the journal before the body, and withdraw it if the body fails."""
        intent = self.append(
            replace(intent, action=promotion_journal.INTENT, config=self.repository.read_config())
        )
        try:
            self.checkpoint("intent written")
            yield intent
        except BaseException as error:
            if self.needs_recovery:
                logger.error(
                    "the next deployment has to withdraw the intent of version %d", intent.version
                )
            else:
                self.withdraw(intent, f"{type(error).__name__}: {error}")
            raise

    def withdraw(self, intent: Promotion, reason: str) -> None:
        """Append the withdrawal of `intent` to the journal.

        If the write fails, the next deployment withdraws it.
        """
        reason = "; ".join([reason, *self.lost])
        try:
            self.append(
                replace(intent, action=promotion_journal.WITHDRAWN, reason=reason, config=None)
            )
        except (OSError, ContractError, TemporaryError, PermanentError) as error:
            logger.error("the journal in %s cannot be written: %s", self.store, error)

    def reset_plan(self, reason: str) -> bool:
        """Send all traffic to the live version, by the function `reset_plan`."""
        return reset_plan(self.settings, self.repository, reason)

    def undo_canary_start(self, intent: Promotion) -> None:
        """Undo the start of a canary that failed or was killed, so that no request is sent to it.

        If clients may already have read a plan that names the canary, the canary stays loaded. The
        next canary step unloads it, after the clients have read the new plan.
        """
        if not self.reset_plan(f"start of version {intent.version} was withdrawn"):
            self.remove_canary()

    def remove_canary(self) -> None:
        """Unload the canary on every server, then remove its files.

        The files stay until every server has unloaded the canary.

        Raises:
            TemporaryError: a server cannot be reached now. The files stay.
        """
        self.fleet.for_each(lambda server: server.unload(self.names.canary))
        self.checkpoint("canary unloaded")
        self.repository.remove_canary()
        self.checkpoint("canary removed")


def reset_plan(settings: SiteSettings, repository: ModelRepository, reason: str) -> bool:
    """Write a traffic plan that sends all traffic to the live version. The caller holds the lock.

    Returns True if a plan was written. If there is no plan yet, no plan is written, because clients
    then call the served model by its name.
    """
    plan, live = repository.read_plan(), promotion_journal.current(settings.store)
    if plan is None or live is None:
        return False
    stable = Arm(model_name=repository.names.model, version=live.version)
    if plan.canary is None and plan.stable == stable:
        return False
    # If the plan has no canary, its time is kept, because no client has to be drained.
    published_at = plan.published_at if plan.canary is None else settings.clock().isoformat()
    repository.write_plan(
        plan.without_canary(stable=stable, published_at=published_at, reason=reason)
    )
    logger.info("the traffic plan names version %d alone: %s", live.version, reason)
    return True


@contextmanager
def opened(settings: SiteSettings) -> Iterator[Site]:
    """Open the site: take the lock, repair a killed deployment, connect to every server.

    Raises:
        ContractError: the repository is not writable.
        TemporaryError: another deployment holds the lock for longer than `patience.lock_seconds`,
            or a server does not answer or cannot be restored yet.
    """
    repository, patience = settings.open_repository(), settings.patience
    with ExitStack() as stack:
        patience.until_done(lambda: stack.enter_context(repository.locked()), patience.lock_seconds)
        interrupted = promotion_journal.interrupted(settings.store)
        if interrupted:
            # Repair the files before connecting: a server that starts meanwhile must read the
            # configuration of the live version.
            _repair_repository(repository, interrupted)
        fleet = Fleet(
            settings.triton_urls, settings.connect, patience=patience, resolve=settings.resolve
        )
        stack.enter_context(closing(fleet))
        site = Site(settings=settings, repository=repository, fleet=fleet, recovered=interrupted)
        if interrupted:
            _finish_recovery(site, interrupted)
        yield site


def _repair_repository(repository: ModelRepository, intent: Promotion) -> None:
    """Write the configuration from before `intent`, which starting servers read.

    The caller holds the lock.
    """
    logger.warning(
        "the deployment of version %d by %s was interrupted, rolling back",
        intent.version,
        intent.who,
    )
    if repository.read_config() != intent.config:
        repository.write_config(intent.config)
    repository.discard_candidate()


def _finish_recovery(site: Site, intent: Promotion) -> None:
    """Notify every server, remove the version that never went live, and withdraw the intent.

    Raises:
        TemporaryError: a server cannot be restored now. The intent stays, and the next deployment
            tries again.
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
            f"the interrupted deployment of version {intent.version} cannot be rolled back: "
            f"{'; '.join(problems)}"
        )
    if intent.share is not None:
        site.undo_canary_start(intent)
    known = [
        *promotion_journal.read_journal(site.store),
        promotion_journal.canary_at_work(site.store),
    ]
    if intent.version not in {entry.version for entry in known if entry is not None}:
        site.repository.withdraw(intent.version)
    site.withdraw(intent, f"the deployment by {intent.who} was interrupted")
    live = f"version {fallback.version} is live" if fallback else "nothing is live"
    logger.warning(
        "the interrupted deployment of version %d is withdrawn, %s", intent.version, live
    )


def restore_server(
    site: Site, server: Triton, config: str | None, *, fallback: Fallback | None
) -> str | None:
    """Make one server load the restored configuration, and probe it.

    Returns an error message, or None if the server serves the restored version.
    """
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
        return f"triton {server.url} could not be restored: {error}"
    return None


def add_site_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the deployment target and for the person who asks."""
    parser.add_argument("--store", required=True, help="model registry, folder or its URI")
    parser.add_argument(
        "--repository",
        type=typed_uri,
        help="Triton's model repository, folder or gs:// URI; default: that of the last release",
    )
    parser.add_argument(
        "--triton-urls",
        help="host:grpc_port or dns:///name:grpc_port of the running servers, comma-separated; "
        "empty = none; default: those of the last release",
    )
    parser.add_argument(
        "--who", default="", help="person who makes the change, for the journal; default: user@host"
    )
    add_flags(parser, TritonAccess, prefix=ACCESS_FLAGS, variables=ACCESS_VARIABLES)


def site_of(arguments: argparse.Namespace) -> SiteSettings:
    """Return the settings that the flags describe, and configure the log of the command.

    Raises:
        ContractError: the registry does not exist, or neither the registry nor a flag contains the
            address of the repository and the servers.
    """
    log_as_text()
    store = typed_folder(arguments.store, "--store")
    place = read_serving_place(store)
    if place is None and (arguments.repository is None or arguments.triton_urls is None):
        raise ContractError(
            f"{store / 'serving.json'} is absent (no release yet), expected --repository and "
            "--triton-urls (empty = no server runs)"
        )
    urls = arguments.triton_urls
    access = read_access(arguments)
    connect = partial(Triton, access=access)
    for url in place.triton_urls if place and urls == "" else ():
        with suppress(TemporaryError), closing(connect(url)) as server:
            server.check_live()
            logger.warning(
                "%s answers but is not in --triton-urls, so it keeps serving its version", url
            )
    return SiteSettings(
        store=store,
        repository=arguments.repository or (place.repository_uri if place else ""),
        triton_urls=parse_urls(urls)
        if urls is not None
        else tuple(place.triton_urls if place else ()),
        who=arguments.who or whoami(),
        connect=connect,
    )


def change_reason(text: str) -> str:
    """Check the reason that a person gives for a change.

    The reason may not be empty, because the journal keeps it.

    >>> change_reason("AUC fell after version 12")
    'AUC fell after version 12'
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty, expected a reason for the journal")
    return text
