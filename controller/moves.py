"""Carry out single moves of the release protocol on files, servers, plan and journal.

`controller.protocol` decides which move comes next, and `controller.reconcile` calls it. A version
that is no longer in Triton's repository is restored from its copy in the model registry. The time
for which the repository keeps versions therefore affects only the duration of a rollback.

The rehearsal takes about 0.3 s under traffic. Triton sends requests without a version to the
highest version as soon as it is loaded. An error during a load must therefore appear before the
served name is changed.

The longest moves copy and hash files, or load a version on one server after another. After each
file or server, these moves check whether a later rollback supersedes the change
(`DeploymentTarget.proceed`).

The configuration is changed by one atomic write. After this write, every server that starts serves
the new version. Running servers load the version one after another. A server that appears during
this move also loads the version. Each server is notified, and is probed with golden rows after it
has loaded the version. Triton itself drains a version that it unloads.

The configuration names only the new version. Triton loads the new version before it unloads the
previous version, which first finishes its requests. Keeping the previous version loaded would have
no benefit, because Triton reloads every named version when the configuration changes. The previous
version stays in the repository and in the registry, and a rollback loads it from there.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from controller.deployment_target import Attempt, DeploymentTarget, Fallback, live_version
from controller.protocol import (
    ADOPT,
    CONFIGURE,
    DISCARD,
    END_BAKING,
    END_CANARY,
    LOAD_CANARY,
    PLACE_CANARY,
    PUBLISH,
    RECORD,
    REHEARSE,
    REMOVE_FILES,
    RESTORE_CONFIG,
    RESTORE_SERVERS,
    SERVE,
    SHOW_CANARY,
    STAGE,
    UNKNOWN,
    UNLOAD_CANARY,
    WITHDRAW_INTENT,
    Server,
)
from evergreen.registry import promotion_journal
from evergreen.registry.models import graph_folder, read_release, release_path
from evergreen.registry.promotion_journal import Promotion, canary_at_work
from evergreen.registry.requests import last_abort
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.intact import check_stored_copy, golden_rows, heal
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import GOLDEN_FILE
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton, addresses, bring_up, probe, wait_until_ready

logger = logging.getLogger(__name__)


def forget(store: Path, version: int) -> None:
    """Remove the registry's files of a version that was never served."""
    release_path(store, version).unlink(missing_ok=True)
    shutil.rmtree(graph_folder(store, version), ignore_errors=True)


def load_canary(target: DeploymentTarget, version: int, *, only_missing: bool) -> None:
    """Load the canary on every server, including new ones, and probe it with golden rows.

    If `only_missing` is set, servers that already report the canary as ready are skipped.
    """
    golden = golden_rows(target.repository, target.store, version)

    def load(server: Triton) -> None:
        target.proceed()
        if only_missing and server.is_ready(target.names.canary, version):
            return
        bring_up(
            server, target.names.canary, version=version, golden=golden, timeouts=target.timeouts
        )
        target.checkpoint("canary loaded on one")

    target.fleet.for_all(load)
    if target.known is not None:
        _know(target, canary=version)
    target.checkpoint("canary loaded")


def _running(target: DeploymentTarget) -> tuple[Promotion, ServingOptions]:
    attempt = target.attempt
    assert attempt.line is not None
    assert attempt.options is not None
    return attempt.line, attempt.options


def _intent(target: DeploymentTarget) -> Promotion:
    intent = target.intent
    assert intent is not None
    return intent


def _know(target: DeploymentTarget, **changes: int | None) -> None:
    target.known = replace(target.known or Server(), **changes)


def _stage(target: DeploymentTarget) -> None:
    line, options = _running(target)
    version, folder = line.version, graph_folder(target.store, line.version)
    if not (folder / GOLDEN_FILE).exists():
        raise ContractError(
            f"version {version} is no longer in the repository, and {folder} contains no copy of it"
        )
    check_stored_copy(target.store, read_release(target.store, version))
    target.repository.stage(version, folder, options, proceed=target.proceed)
    target.checkpoint("staged")


def _rehearse(target: DeploymentTarget) -> None:
    version = _running(target)[0].version
    golden = GoldenRows.load(graph_folder(target.store, version) / GOLDEN_FILE)

    def rehearse(server: Triton) -> None:
        target.proceed()
        bring_up(
            server, target.names.candidate, version=version, golden=golden, timeouts=target.timeouts
        )
        server.unload(target.names.candidate)

    _know(target, candidate=UNKNOWN)
    target.fleet.for_each(rehearse)
    _know(target, candidate=None)
    target.attempt.is_rehearsed = True
    target.checkpoint("rehearsed")


def _publish(target: DeploymentTarget) -> None:
    target.repository.publish(_running(target)[0].version)
    target.checkpoint("folder published")


def _configure(target: DeploymentTarget) -> None:
    (line, options), repository = _running(target), target.repository
    if not target.attempt.is_rehearsed:  # no rehearsal: the version was in the repository before
        heal(repository.published, target.store, line.version, options=options)
    config = repository.config_for(line.version, options)
    golden_rows(
        repository, target.store, line.version
    )  # raises an error before anything is changed
    target.attempt.is_published = True
    repository.write_config(config)
    _know(target, serves=UNKNOWN)
    target.checkpoint("config written")


def _serve(target: DeploymentTarget) -> None:
    version, name = _running(target)[0].version, target.names.model
    golden = golden_rows(target.repository, target.store, version)

    def serve(server: Triton) -> None:
        target.proceed()
        bring_up(server, name, version=version, golden=golden, timeouts=target.timeouts)
        probe(server, name, version=version, golden=golden, named=False)
        logger.info("triton %s serves version %d", server.url, version)
        target.checkpoint("loaded")

    target.fleet.for_all(serve)
    _know(target, serves=version)


def _place_canary(target: DeploymentTarget) -> None:
    line, options = _running(target)
    target.repository.place_canary(line.version, options)
    target.checkpoint("canary placed")


def _load_canary(target: DeploymentTarget) -> None:
    if target.attempt.line is not None:
        load_canary(target, target.attempt.line.version, only_missing=False)
    elif (at_work := canary_at_work(target.store)) is not None:
        if not target.repository.canary.whole():  # somebody removed the files
            options = target.repository.options_for(at_work.version)
            target.repository.place_canary(at_work.version, options)
        load_canary(target, at_work.version, only_missing=True)


def _show_canary(target: DeploymentTarget) -> None:
    plan = target.attempt.plan
    assert plan is not None
    target.attempt.is_shown = True
    target.repository.write_plan(replace(plan, published_at=target.now()))
    target.checkpoint("plan written")


def _record(target: DeploymentTarget) -> None:
    line = _running(target)[0]
    if line.action != promotion_journal.CANARY:
        target.checkpoint("probed")
    target.append(replace(line, config=None))
    target.attempt, target.known = Attempt(), None
    target.checkpoint("journal written")


def _check_lock(target: DeploymentTarget) -> None:
    # Another controller may already have rolled back, and may have switched to another version. The
    # servers then belong to that controller and must not be changed.
    if not target.holds_lock():
        raise TemporaryError("another controller holds the lock now, so nothing was restored")


def _restore_config(target: DeploymentTarget) -> None:
    _check_lock(target)
    intent, live = target.intent, target.live
    if intent is not None:
        try:
            target.repository.write_config(intent.config)
        except (TemporaryError, PermanentError, ContractError) as error:
            # Do not notify the servers here, because this would make them load the version that is
            # being rolled back. Servers that were not notified yet still serve the previous
            # version.
            raise TemporaryError(f"the configuration could not be restored: {error}") from error
    elif live is not None:
        options = target.repository.options_for(live.version)
        target.repository.write_config(target.repository.config_for(live.version, options))
        logger.error("the configuration did not name version %d, and was rewritten", live.version)


def _restore_servers(target: DeploymentTarget) -> None:
    """Make every server serve the version that was configured before the intent.

    The configuration is restored already. If a server cannot be restored here, the watchdog
    restores it later.
    """
    _check_lock(target)
    intent, known = _intent(target), target.known or Server(serves=UNKNOWN, candidate=UNKNOWN)
    before = live_version(intent.config)
    fallback = _fallback(target, before)

    def restore(server: Triton) -> None:
        try:
            if known.candidate is not None:
                server.unload(target.names.candidate)
            if known.serves != before:
                _restore_server(target, server, intent.config, fallback=fallback)
        except (TemporaryError, PermanentError) as error:
            problem = f"triton {server.url} could not be restored: {error}"
            logger.error("%s", problem)
            target.attempt.lost.append(problem)

    try:
        fleet = target.fleet
    except TemporaryError:
        # The intent stays until every server responds. The servers that respond get the previous
        # version at once.
        for address in addresses(target.settings.triton_urls, target.settings.resolve):
            with closing(target.settings.connect(address)) as server:
                restore(server)
        raise
    fleet.for_each(restore)
    _know(target, serves=before, candidate=None)


def _fallback(target: DeploymentTarget, version: int | None) -> Fallback | None:
    """Return the version with its golden rows.

    Returns None if the version is not in the repository, or if no copy of its golden rows is
    intact. The servers are then restored without a probe.
    """
    if version is None or version not in target.repository.versions():
        return None
    try:
        return Fallback(version, golden_rows(target.repository, target.store, version))
    except ContractError as error:
        logger.error("version %d is restored without a probe: %s", version, error)
        return None


def _restore_server(
    target: DeploymentTarget, server: Triton, config: str | None, *, fallback: Fallback | None
) -> None:
    name = target.names.model
    if config is None:
        server.unload(name)
        return
    server.load(name)
    if fallback is not None:
        wait_until_ready(server, name, fallback.version, timeouts=target.timeouts)
        probe(server, name, version=fallback.version, golden=fallback.golden, named=False)


def _discard(target: DeploymentTarget) -> None:
    target.repository.discard_candidate()


def _remove_files(target: DeploymentTarget) -> None:
    target.repository.withdraw(_intent(target).version)


def _adopt(target: DeploymentTarget) -> None:
    target.append(_intent(target))
    target.checkpoint("intent adopted")


def _withdraw_intent(target: DeploymentTarget) -> None:
    intent, attempt = _intent(target), target.attempt
    error = attempt.error
    why = (
        f"the change by {intent.who} was interrupted"
        if error is None
        else f"{type(error).__name__}: {error}"
    )
    reason = "; ".join([why, *attempt.lost])
    target.append(replace(intent, action=promotion_journal.WITHDRAWN, reason=reason, config=None))
    if error is None:
        target.recovered = intent
        logger.warning("the interrupted change to version %d is withdrawn", intent.version)
    forget_unserved(target)
    attempt.line, target.known = None, None


def forget_unserved(target: DeploymentTarget) -> None:
    """Remove the registry's files of a version that never served clients."""
    attempt = target.attempt
    if attempt.new_version is not None and not (attempt.is_published or attempt.is_shown):
        forget(target.store, attempt.new_version)
    attempt.new_version = None


def _unload_canary(target: DeploymentTarget) -> None:
    target.remove_canary()
    logger.info("the canary is unloaded")


def _end_canary(target: DeploymentTarget) -> None:
    at_work, plan = canary_at_work(target.store), target.repository.read_plan()
    assert at_work is not None
    abort = last_abort(target.store)
    ended = replace(
        at_work,
        action=promotion_journal.CANARY_ENDED,
        reason=abort.reason if abort else plan.reason if plan else "no plan names it",
        who=abort.who if abort else target.settings.who,
        request=abort.request if abort else None,
        share=None,
    )
    target.append(ended)


def _end_baking(target: DeploymentTarget) -> None:
    assert target.baked is not None
    line, reason = target.baked
    target.append(line.baked(target.now(), target.settings.who, reason))
    target.baked = None


BODIES: Mapping[str, Callable[[DeploymentTarget], None]] = {
    STAGE: _stage,
    REHEARSE: _rehearse,
    PUBLISH: _publish,
    CONFIGURE: _configure,
    SERVE: _serve,
    PLACE_CANARY: _place_canary,
    LOAD_CANARY: _load_canary,
    SHOW_CANARY: _show_canary,
    RECORD: _record,
    RESTORE_CONFIG: _restore_config,
    RESTORE_SERVERS: _restore_servers,
    DISCARD: _discard,
    REMOVE_FILES: _remove_files,
    WITHDRAW_INTENT: _withdraw_intent,
    ADOPT: _adopt,
    UNLOAD_CANARY: _unload_canary,
    END_CANARY: _end_canary,
    END_BAKING: _end_baking,
}
"""Functions that carry out moves without a request, by the name of the move."""
