"""Open one deployment target: its registry, its model repository and its servers.

A deployment target is a model registry, a Triton model repository and the Triton servers that read
it. Only the process that holds the repository's lock changes what a target serves
(`controller.reconcile`). A running controller holds the lock all the time. Without a running
controller, a command holds the lock until its own request is done.

The commands share the flags for the target and for the author of a change. The default target is
read from `<store>/serving.json`, which the last release wrote. An operator on call therefore needs
to pass only the registry and a reason.
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

from controller.protocol import (
    FAILED,
    NONE,
    RUNNING,
    UNKNOWN,
    Desired,
    Observed,
    ProtocolRule,
    Server,
)
from evergreen.config.reader import add_flags
from evergreen.contracts.manifests import Model, Release
from evergreen.contracts.serving import ServedNames, versions_of
from evergreen.registry import promotion_journal
from evergreen.registry.models import read_serving_target, release_path
from evergreen.registry.promotion_journal import Promotion, append_promotion
from evergreen.registry.recommenders import served_name
from evergreen.registry.traffic_plan import DRAIN_SECONDS, Arm, Baseline, TrafficPlan
from evergreen.runtime.durable import no_checkpoint
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.runtime.flags import whoami
from evergreen.runtime.plain_text import log_as_text
from evergreen.serving.canary_policy import CanaryPolicy
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions, read_options
from evergreen.serving.servers import (
    ACCESS_FLAGS,
    ACCESS_VARIABLES,
    Connect,
    Fleet,
    Resolve,
    Timeouts,
    Triton,
    TritonAccess,
    parse_urls,
    read_access,
    resolve,
)
from evergreen.storage.uris import open_objects, typed_folder, typed_uri

logger = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound="TargetSettings")


@dataclass(frozen=True, kw_only=True)
class CanaryStages:
    """How a canary grows."""

    shares: tuple[float, ...] = CanaryPolicy.shares
    """Share of each stage, ascending."""
    drain_seconds: float = DRAIN_SECONDS
    """Seconds until clients have read a plan."""
    read_baseline: Callable[[TrafficPlan], Baseline] = lambda _: {}
    """Returns the servers' counters at the start of a stage."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """Deployment target, the person or run that deploys to it, and the timeouts."""

    store: Path
    """Folder of the model registry."""
    repository: str
    """URI of Triton's model repository, as seen from this process."""
    recommender: str | None = None
    """Name of the served recommender. None means the name in the registry
    (`recommenders.served_name`)."""
    triton_urls: tuple[str, ...] = ()
    """Addresses of the running servers (see `servers`). If empty, a release is only published, and
    servers read it when they start."""
    who: str = field(default_factory=whoami)
    """Person, pipeline run or program that makes the change, for the journal."""
    num_kept: int = 3
    """Number of versions that stay in the repository, including the live version and the previous
    version."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    connect: Connect = Triton
    resolve: Resolve = resolve
    stages: CanaryStages = field(default_factory=CanaryStages)
    """How a canary grows."""
    held: ModelRepository | None = None
    """Model repository whose lock this process holds, or None. If it is set, `open_repository`
    returns it."""
    trace: Callable[[ProtocolRule, Desired, Observed], None] = lambda *_: None
    """Function that is called before each move. Its arguments are the rule, and the state that
    selected the rule."""
    clock: Callable[[], datetime] = partial(datetime.now, timezone.utc)
    """Current time, with a time zone."""
    checkpoint: Callable[[str], None] = no_checkpoint
    """Function that is called with a name at each point where a crash is tested."""

    def now(self) -> str:
        """Return the current time as ISO 8601 in UTC."""
        return self.clock().astimezone(timezone.utc).isoformat()

    def open_repository(self) -> ModelRepository:
        """Open the model repository.

        Reads need no lock. Changes need the repository's lock. No server is contacted.

        Raises:
            ContractError: the registry does not contain the recommender's name.
        """
        if self.held is not None:
            return self.held
        name = self.recommender or served_name(self.store)
        if name is None:
            raise ContractError(
                f"model registry {self.store} has no release and no recommender, expected one of "
                "them"
            )
        holder = f"{self.who}, process {os.getpid()} on {socket.gethostname()}"
        # Triton runs as another user, so the files must be readable for everyone.
        objects = open_objects(self.repository, readable=True)
        newest = promotion_journal.newest_lease(self.store)
        return ModelRepository(objects, ServedNames(name), holder=holder, min_lease=newest)

    def serving(self: Settings, model: Model) -> Settings:
        """Return the settings for a deployment of `model`, with its recommender's name.

        Raises:
            ContractError: the registry already serves a recommender of another name.
        """
        name, known = model.recommender.name, served_name(self.store)
        if promotion_journal.read_entries(self.store) and known != name:
            raise ContractError(
                f"model {model.model_id} is of recommender {name!r}, expected {known!r}, the only "
                f"recommender of the model registry {self.store}: use a separate registry for each "
                "recommender"
            )
        return replace(self, recommender=name)


class Fallback(NamedTuple):
    """Version to restore if a change fails, with its golden rows."""

    version: int
    golden: GoldenRows


@dataclass(kw_only=True)
class Attempt:
    """State of the change that this process is making."""

    state: str = NONE
    """`NONE`, `RUNNING` or `FAILED` (`controller.protocol`)."""
    request: str | None = None
    """Id of the request, or None before it is known."""
    line: Promotion | None = None
    """Journal entry that records the change."""
    options: ServingOptions | None = None
    """Serving options of the version."""
    plan: TrafficPlan | None = None
    """Plan that shows the version as a canary, or None if the version goes live."""
    new_version: int | None = None
    """Version whose files were stored in the registry for this attempt."""
    is_rehearsed: bool = False
    is_published: bool = False
    """Whether a new configuration was written. Servers may already have answered with this
    configuration."""
    is_shown: bool = False
    """Whether clients may have read a plan with the canary."""
    is_blocked: bool = False
    """Whether the undo of the attempt has failed."""
    error: BaseException | None = None
    lost: list[str] = field(default_factory=list)
    """Error messages of everything that could not be restored after a failure."""


@dataclass(kw_only=True)
class DeploymentTarget:
    """Deployment target whose lock is held. The function `opened` creates a `DeploymentTarget`."""

    settings: TargetSettings
    repository: ModelRepository
    stack: ExitStack
    attempt: Attempt = field(default_factory=Attempt)
    known: Server | None = None
    """Models that every server has loaded, according to the last answers to this process. None =
    the models that the journal names."""
    errors: dict[str, BaseException] = field(default_factory=dict)
    """Error of each request that failed in this process, by the id of the request."""
    baked: tuple[Promotion, str] | None = None
    """Journal entry of the version whose baking may end, and the reason. None = the evidence does
    not allow the baking to end."""
    proceed: Callable[[], None] = lambda: None
    """Function that a long move calls after each file or server. The function raises `Refused` if a
    later request supersedes the change."""
    recovered: Promotion | None = None
    """Interrupted intent that was withdrawn, or None."""
    _fleet: Fleet | None = None

    @property
    def fleet(self) -> Fleet:
        """Connections to every server, which are opened at the first use.

        Raises:
            TemporaryError: a server does not answer.
        """
        if self._fleet is None:
            settings = self.settings
            self._fleet = Fleet(
                settings.triton_urls,
                settings.connect,
                timeouts=settings.timeouts,
                resolve=settings.resolve,
            )
            self.stack.enter_context(closing(self._fleet))
        return self._fleet

    @property
    def store(self) -> Path:
        """Folder of the model registry."""
        return self.settings.store

    @property
    def names(self) -> ServedNames:
        """Names of the recommender's models in Triton."""
        return self.repository.names

    @property
    def timeouts(self) -> Timeouts:
        """Timeouts of the deployment."""
        return self.settings.timeouts

    @property
    def live(self) -> Promotion | None:
        """Journal entry that made the live version live, or None."""
        return promotion_journal.current(self.store)

    @property
    def intent(self) -> Promotion | None:
        """Intent that is neither recorded nor withdrawn, or None.

        If the recording of a change failed, the change counts as an intent, even if its line is in
        the journal.
        """
        found = promotion_journal.interrupted(self.store)
        if found is None and self.attempt.state in (RUNNING, FAILED):
            return self.attempt.line
        return found

    def checkpoint(self, name: str) -> None:
        """Call the hook that simulates a crash in tests."""
        self.settings.checkpoint(name)

    def now(self) -> str:
        """Return the current time as ISO 8601 in UTC."""
        return self.settings.now()

    def entry(
        self,
        action: str,
        release: Release,
        *,
        reason: str,
        who: str,
        request: str | None,
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
            who=who,
            decision=decision,
            parent_model_id=release.parent_model_id,
            sha256=dict(release.sha256),
            share=share,
            request=request,
        )

    def append(self, entry: Promotion) -> Promotion:
        """Append the entry to the journal with the current time, and return the entry as written.

        Raises:
            TemporaryError: the lock was lost. Another controller may have withdrawn the intent
                since the lock was lost, and its withdrawal must remain the last entry.
        """
        self.repository.check_held()
        return append_promotion(
            self.store, replace(entry, time=self.now(), lease=self.repository.lease)
        )

    def announce(self, attempt: Attempt) -> None:
        """Append the intent of the attempt to the journal.

        After that, the attempt counts as running.

        If the append fails, the entry may nevertheless be complete. The attempt is therefore stored
        in `self` first.
        """
        assert attempt.line is not None
        config = self.repository.read_config()
        self.attempt, attempt.request = attempt, attempt.line.request
        self.known = Server(serves=live_version(config), canary=UNKNOWN)
        attempt.line = replace(attempt.line, config=config, lease=self.repository.lease)
        self.append(replace(attempt.line, action=promotion_journal.INTENT))
        attempt.state = RUNNING
        self.checkpoint("intent written")

    def fail(self, error: BaseException) -> None:
        """Mark the current attempt as failed."""
        self.attempt.state, self.attempt.error = FAILED, error

    def holds_lock(self) -> bool:
        """Return whether this controller still holds the lock and may undo its changes."""
        try:
            self.repository.check_held()
        except (TemporaryError, PermanentError) as error:
            logger.error("the rollback stops: %s", error)
            return False
        return True

    def reset_plan(self, reason: str) -> None:
        """Write a traffic plan that sends all traffic to the live version.

        If there is no plan yet, no plan is written, because clients then call the served model by
        its name. A plan without a canary keeps its time, because no client has to be drained.
        """
        plan, live = self.repository.read_plan(), self.live
        if plan is None or live is None:
            return
        stable = Arm(model_name=self.names.model, version=live.version)
        published_at = plan.published_at if plan.canary is None else self.now()
        self.repository.write_plan(
            plan.without_canary(stable=stable, published_at=published_at, reason=reason)
        )
        logger.info("the traffic plan names version %d alone: %s", live.version, reason)

    def remove_canary(self) -> None:
        """Unload the canary on every server, and then remove the canary's files.

        The files stay until every server has unloaded the canary.

        Raises:
            TemporaryError: a server cannot be reached now. The files stay.
        """
        self.fleet.for_each(lambda server: server.unload(self.names.canary))
        self.checkpoint("canary unloaded")
        self.repository.remove_canary()
        self.checkpoint("canary removed")


def live_version(config: str | None) -> int | None:
    """Return the version that answers clients with this configuration.

    Returns None if there is no configuration, and `UNKNOWN` if the configuration is corrupt.
    """
    if config is None:
        return None
    try:
        read_options(config)
        return max(versions_of(config), default=UNKNOWN)
    except ContractError:
        return UNKNOWN


@contextmanager
def opened(settings: TargetSettings) -> Iterator[DeploymentTarget]:
    """Take the lock if this process does not hold it yet, and open the target.

    Servers are contacted only when a move needs them.

    Raises:
        ContractError: the repository is not writable.
        TemporaryError: another controller holds the lock for longer than `timeouts.lock_seconds`.
    """
    repository, timeouts = settings.open_repository(), settings.timeouts
    with ExitStack() as stack:
        timeouts.until_done(lambda: stack.enter_context(repository.locked()), timeouts.lock_seconds)
        yield DeploymentTarget(
            settings=replace(settings, held=repository), repository=repository, stack=stack
        )


def add_target_flags(parser: argparse.ArgumentParser, *, author: str = "") -> None:
    """Add the flags for the deployment target and for the author of the changes.

    Args:
        parser: Parser of the command.
        author: Default author in the journal. If it is empty, the default author is the person who
            starts the command.
    """
    parser.add_argument("--store", required=True, help="folder or URI of the registry")
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
        "--who",
        default=author,
        help="author of the changes in the journal"
        if author
        else "person who makes the change, for the journal; default: user@host",
    )
    add_flags(parser, TritonAccess, prefix=ACCESS_FLAGS, variables=ACCESS_VARIABLES)


def target_of(arguments: argparse.Namespace) -> TargetSettings:
    """Return the settings from the command's flags, and configure the command's logging.

    Raises:
        ContractError: the registry does not exist. The error is also raised if neither the registry
            nor a flag contains the address of the repository and the servers.
    """
    log_as_text()
    store = typed_folder(arguments.store, "--store")
    serving_target = read_serving_target(store)
    if serving_target is None and (arguments.repository is None or arguments.triton_urls is None):
        raise ContractError(
            f"{store / 'serving.json'} is absent (no release yet), expected --repository and "
            "--triton-urls (empty = no server runs)"
        )
    urls = arguments.triton_urls
    access = read_access(arguments)
    connect = partial(Triton, access=access)
    for url in serving_target.triton_urls if serving_target and urls == "" else ():
        with suppress(TemporaryError, PermanentError), closing(connect(url)) as server:
            server.check_live()
            logger.warning(
                "%s answers but is not in --triton-urls, so it keeps serving its version", url
            )
    return TargetSettings(
        store=store,
        repository=arguments.repository
        or (serving_target.repository_uri if serving_target else ""),
        triton_urls=parse_urls(urls)
        if urls is not None
        else tuple(serving_target.triton_urls if serving_target else ()),
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
