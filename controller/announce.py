"""Check a request, choose the version to serve, and announce the change in the journal.

A verdict compares a candidate with one champion. If two runs overlap, another model may go live
after the verdict. The verdict then does not compare the candidate with the live model. The
candidate is then refused and must be evaluated again. If a run chose its champion explicitly, or
chose no champion, the champion is not checked.

A version number that the journal contains is never reused. The registry keeps the graph and the
golden rows of each version permanently. The gate scores the champion with these files, `verify`
recomputes logged scores, and a rollback restores versions that Triton's repository no longer
contains. The stored files are copies and not hard links to the served files, because a corrupt
served file must not corrupt its only backup.
"""

import logging
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from controller.deployment_target import Attempt, DeploymentTarget
from controller.moves import forget
from evergreen.config.reader import read_mapping
from evergreen.contracts.checks import FAIL, PASS
from evergreen.contracts.manifests import CURRENT, Release, ServingTarget, Verdict
from evergreen.contracts.requests import ADVANCE, CANARY, RELEASE, ROLLBACK, ServingRequest
from evergreen.registry import promotion_journal
from evergreen.registry.models import (
    DATA_FILE,
    GRAPH_FILE,
    graph_folder,
    read_release,
    release_path,
    write_serving_target,
)
from evergreen.registry.promotion_journal import Promotion, canary_at_work
from evergreen.registry.requests import RequestState
from evergreen.registry.traffic_plan import Arm, TrafficPlan
from evergreen.runtime.durable import whole_directory
from evergreen.runtime.errors import ContractError, PermanentError, Refused, TemporaryError
from evergreen.serving.intact import golden_rows
from evergreen.serving.prepare import PreparedVersion, check_belonging, read_prepared
from evergreen.serving.repository.model_repository import GOLDEN_FILE, ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import probe

logger = logging.getLogger(__name__)

SHADOW_SHARE = 1.0
"""Share of the requests that both arms score, so that the two scores can be compared. If both arms
score all requests, a canary is decided as early as possible. Clients drop shadow requests that
would delay served requests (`inference_client.routing`)."""


class StaleVerdict(Refused):
    """The verdict compared the candidate with a model that is no longer live.

    The candidate needs a new evaluation.
    """


@dataclass(frozen=True, kw_only=True)
class Satisfied:
    """Result for a request that needs no change, because its version is already served."""

    version: int


def satisfied(target: DeploymentTarget, state: RequestState) -> Satisfied | None:
    """Return the version that already serves as requested, or None.

    A retried step must not release a model twice, even if the model was rolled back since. If a
    rollback is requested while a change is in progress, the undo of this change satisfies the
    request.
    """
    request, live, at_work = state.request, target.live, canary_at_work(target.store)
    if state.recorded is not None:
        return Satisfied(version=state.recorded.version)
    if state.earlier is not None:
        version = state.earlier.version
        return None if version is None else Satisfied(version=version)
    if request.kind in (RELEASE, CANARY) and live is not None:
        if live.model_id == request.model_id and live.version in target.repository.versions():
            return Satisfied(version=live.version)
        if (
            request.kind == CANARY
            and at_work is not None
            and at_work.model_id == request.model_id
            and not gives_first_share(target, request)
        ):
            return Satisfied(version=at_work.version)
    wanted = _wanted_then(state)
    if (
        request.kind == ROLLBACK
        and wanted is not None
        and request.replaces is None
        and live is not None
        and live.version == wanted
        and request.to_version in (None, live.version)
    ):
        return Satisfied(version=live.version)
    return None


def _wanted_then(state: RequestState) -> int | None:
    """Return which version was live or becoming live when the request was made.

    Returns None if no change was in progress. During a rollback, the result is the version that the
    rollback restores. During any other change, the result is the version that was live at that
    time.
    """
    intent = state.intent_then
    if intent is None:
        return None
    return intent.version if state.rollback_then else state.live_then


def gives_first_share(target: DeploymentTarget, request: ServingRequest) -> bool:
    """Return whether a `CANARY` request lets its shadow canary serve traffic."""
    at_work, plan = canary_at_work(target.store), target.repository.read_plan()
    return bool(
        request.kind == CANARY
        and at_work is not None
        and at_work.model_id == request.model_id
        and plan is not None
        and plan.canary is not None
        and plan.canary_share == 0.0
        and request.share
    )


def announce(target: DeploymentTarget, state: RequestState) -> None:
    """Write the intent of the change that a request asks for.

    Raises:
        Refused: the change may not be made now, for example for a reason in `check_may_replace`.
        ContractError: the request or a file is invalid.
        TemporaryError: a server does not answer, or a previous canary is still draining.
    """
    if state.earlier is not None:
        raise Refused(state.earlier.reason)
    _ = target.fleet  # every server must respond before anything is written
    kind = state.request.kind
    if kind == RELEASE:
        _announce_release(target, state)
    elif kind == CANARY:
        _announce_canary(target, state)
    elif kind == ADVANCE:
        _announce_promotion(target, state)
    else:
        _announce_rollback(target, state)


def _announce_release(target: DeploymentTarget, state: RequestState) -> None:
    request, prepared = state.request, read_prepared(target.store, state.id)
    verdict = prepared.verdict
    _check_prepared(target, request, prepared)
    if not verdict.accepted and not request.is_override:
        raise ContractError(
            f"verdict on model {request.model_id} is {verdict.decision!r}, expected an accepted "
            "verdict"
        )
    options = _options(request)
    check_may_replace(target, verdict, options, is_override=request.is_override)
    release = _number(target, request, prepared)
    line = _entry(
        target,
        state,
        promotion_journal.PROMOTE if request.is_override else promotion_journal.RELEASE,
        release=release,
        reason=f"{request.reason}; the verdict was: {verdict.reason}"
        if request.is_override
        else verdict.reason,
        decision=verdict.decision,
    )
    target.announce(Attempt(line=line, options=options, new_version=release.version))


def _announce_canary(target: DeploymentTarget, state: RequestState) -> None:
    request, prepared = state.request, read_prepared(target.store, state.id)
    verdict, repository = prepared.verdict, target.repository
    _check_prepared(target, request, prepared)
    if verdict.decision == FAIL:
        raise ContractError(
            f"verdict on model {request.model_id} is {FAIL!r}, expected a passed or inconclusive "
            "verdict for a canary"
        )
    if (live := target.live) is None:
        raise ContractError(
            f"model registry {target.store} has no live version, expected a live version before a "
            "canary starts"
        )
    if (at_work := canary_at_work(target.store)) is not None:
        raise Refused(
            f"version {at_work.version} is a canary; release or abort this canary before you start "
            "another canary"
        )
    options = _options(request)
    check_may_replace(target, verdict, options)
    if repository.canary.whole():
        raise TemporaryError(
            "clients may still call the previous canary, try again in some seconds"
        )
    release, before = _number(target, request, prepared), repository.read_plan()
    share = request.share or 0.0
    plan = TrafficPlan(
        sequence=before.sequence + 1 if before else 1,
        stable=Arm(model_name=target.names.model, version=live.version),
        canary=Arm(model_name=target.names.canary, version=release.version),
        canary_share=share,
        shadow_share=SHADOW_SHARE,
        # Use a fresh salt, so that different users see each canary first.
        salt=uuid4().hex,
        published_at=target.now(),
        reason=verdict.reason,
    )
    line = _entry(
        target,
        state,
        promotion_journal.CANARY,
        release=release,
        reason=verdict.reason,
        decision=verdict.decision,
    )
    line = replace(line, share=share)
    target.announce(Attempt(line=line, options=options, plan=plan, new_version=release.version))


def _announce_promotion(target: DeploymentTarget, state: RequestState) -> None:
    request, at_work = state.request, canary_at_work(target.store)
    check_plan(target, request)
    if at_work is None:
        raise Refused("there is no canary, expected a canary to release")
    released = read_release(target.store, at_work.version)
    line = _entry(
        target,
        state,
        promotion_journal.PROMOTE,
        release=released,
        reason=request.reason,
        decision=at_work.decision,
    )
    line = replace(line, trigger_id=released.trigger_id)
    target.announce(Attempt(line=line, options=target.repository.options_for(released.version)))


def _announce_rollback(target: DeploymentTarget, state: RequestState) -> None:
    request, live = state.request, target.live
    if live is None:
        raise ContractError(
            f"model registry {target.store} has no release, expected a release to roll back"
        )
    if request.replaces is not None and (
        live.version != request.replaces or live.action == promotion_journal.ROLLBACK
    ):
        raise Refused(
            f"version {live.version} is live since {live.time}, expected version {request.replaces}"
        )
    if (version := request.to_version) is None:
        wanted = _wanted_then(state)
        version = wanted if wanted is not None else _replaced_by(target.store, live)
    restored = _target_release(target, live, version)
    line = _entry(
        target, state, promotion_journal.ROLLBACK, release=restored, reason=request.reason
    )
    line = replace(line, blocked_model_id=live.model_id if request.replaces else None)
    target.announce(Attempt(line=line, options=target.repository.options_for(restored.version)))


def _entry(
    target: DeploymentTarget,
    state: RequestState,
    action: str,
    *,
    release: Release,
    reason: str,
    decision: str | None = None,
) -> Promotion:
    """Build the journal entry that records the requested change to `release`."""
    request = state.request
    return target.entry(
        action,
        release,
        reason=reason,
        who=request.who,
        request=state.id,
        trigger_id=request.trigger_id,
        decision=decision,
    )


def check_plan(target: DeploymentTarget, request: ServingRequest) -> None:
    """Check that the traffic plan has not changed since the evidence for the request was read.

    Raises:
        Refused: the plan changed since the evidence for the request was read.
    """
    plan = target.repository.read_plan()
    if request.plan is not None and (plan is None or plan.sequence != request.plan):
        raise Refused("the plan changed while its evidence was read")


def _replaced_by(store: Path, live: Promotion) -> int:
    """Return the version that the live version replaced at its first release.

    Each further rollback therefore returns to an older version.
    """
    # Read the journal, because a corrupt manifest of the live version must not prevent a rollback.
    lines = promotion_journal.read_journal(store)
    version = next(line.previous_version for line in lines if line.version == live.version)
    if version is None:
        raise ContractError(
            f"version {live.version} is the first release, expected a release with a previous "
            "version"
        )
    return version


def _target_release(target: DeploymentTarget, live: Promotion, version: int) -> Release:
    if version == live.version:
        raise ContractError(f"version {version} is live already, expected another version")
    released = sorted({entry.version for entry in promotion_journal.read_journal(target.store)})
    if version not in released:
        raise ContractError(f"version {version} was never released, expected one of {released}")
    return read_release(target.store, version)


def _check_prepared(
    target: DeploymentTarget, request: ServingRequest, prepared: PreparedVersion
) -> None:
    model, name = prepared.model, target.repository.names.model
    if model.model_id != request.model_id:
        raise ContractError(
            f"the prepared version is of model {model.model_id}, expected {request.model_id}"
        )
    check_belonging(model, prepared.verdict)
    if model.recommender.name != name:
        raise ContractError(
            f"model {model.model_id} is of recommender {model.recommender.name!r}, expected "
            f"{name!r}, the only recommender of the model registry {target.store}: use a separate "
            "registry for each recommender"
        )


def _options(request: ServingRequest) -> ServingOptions:
    return read_mapping(ServingOptions, request.options, path="options")


def check_may_replace(
    target: DeploymentTarget,
    verdict: Verdict,
    options: ServingOptions,
    *,
    is_override: bool = False,
) -> None:
    """Check that the candidate may replace the live version.

    An inconclusive candidate does not replace a running canary, because a new canary would have to
    collect its evidence from the start. A candidate that passed the gate is released directly, and
    its release ends the canary. A person can end the canary first by `canary abort`.

    Raises:
        ContractError: the live version uses another backend.
        Refused: the candidate was rolled back earlier, or a canary is running and the candidate has
            no passed verdict.
        StaleVerdict: the live model is not the champion of the verdict.
    """
    if (verdict.decision != PASS or is_override) and (canary := canary_at_work(target.store)):
        raise Refused(
            f"version {canary.version} is a running canary, expected a candidate that passes the "
            "gate; otherwise release or abort the canary first"
        )
    blocked = promotion_journal.blocked_models(target.store)
    if not is_override and (line := blocked.get(verdict.candidate_model_id)) is not None:
        raise Refused(
            f"model {verdict.candidate_model_id} was rolled back at {line.time} ({line.reason}), "
            "expected another model, or a promotion with --override"
        )
    live = target.live
    if not is_override and verdict.champion_reference == CURRENT:
        live_model = live.model_id if live else None
        if verdict.champion_model_id != live_model:
            raise StaleVerdict(
                f"model {verdict.candidate_model_id} was compared with "
                f"{verdict.champion_model_id or 'no champion'}, but {live_model or 'nothing'} is "
                "live: evaluate it again, or promote it with --override"
            )
    if live is not None and live.version in target.repository.versions():
        kind = target.repository.published.record(live.version).options.server
        if kind != options.server:
            raise ContractError(
                f"server is {options.server!r}, expected {kind!r}, the server of the live version "
                f"{live.version} in {target.repository.uri}: all versions of a model have the same "
                "server"
            )


def _number(
    target: DeploymentTarget, request: ServingRequest, prepared: PreparedVersion
) -> Release:
    """Give the prepared version its number, copy its files in the registry, and return its release.

    No server is notified, and the live version does not change.
    """
    # Another controller may be copying the files of a version that it has not announced yet.
    target.repository.check_held()
    announced = {entry.version for entry in promotion_journal.read_entries(target.store)}
    for path in (target.store / "graphs").glob("*"):
        if path.name.isdigit() and int(path.name) not in announced:
            # The controller was killed before it announced this version, so no server has loaded
            # it.
            forget(target.store, int(path.name))
    model, proof, live = prepared.model, prepared.proof, target.live
    version = next_version(target.store, target.repository)
    folder = graph_folder(target.store, version)
    with whole_directory(folder, replace=True) as building:
        for name in (GRAPH_FILE, DATA_FILE, GOLDEN_FILE):
            target.proceed()
            if (prepared.folder / name).exists():
                shutil.copyfile(prepared.folder / name, building / name)
        # The lease may have expired during the preparation. Another controller may then have used
        # the same version number.
        target.repository.check_held()
    release = Release(
        model_name=target.names.model,
        version=version,
        previous_version=live.version if live else None,
        model_id=model.model_id,
        model_uri=model.uri,
        graph_uri=(folder / GRAPH_FILE).absolute().as_uri(),
        sha256={
            "graph": proof.sha256["graph"],
            "golden": proof.sha256["golden"],
            "weights": model.sha256["weights"],
            "workflow": model.sha256["workflow"],
            "data": prepared.raw.digest,
        },
        raw_digest=prepared.raw.digest,
        parity_max_abs_diff=proof.parity_max_abs_diff,
        parity_rows=proof.parity_rows,
        repository_uri=target.repository.uri,
        trigger_id=request.trigger_id,
        reason=prepared.verdict.reason,
        published_at=target.now(),
        parent_model_id=model.parent_model_id,
    )
    release.write(release_path(target.store, version))
    target.checkpoint("stored")
    return release


def next_version(store: Path, repository: ModelRepository) -> int:
    """Return one more than the highest version in the repository, the journal and the registry.

    The versions of intents in the journal count too.
    """
    journal = [entry.version for entry in promotion_journal.read_entries(store)]
    manifests = [
        int(path.stem) for path in (store / "releases").glob("*.json") if path.stem.isdigit()
    ]
    graphs = [int(path.name) for path in (store / "graphs").glob("*") if path.name.isdigit()]
    return 1 + max([0, *repository.taken_numbers(), *journal, *manifests, *graphs])


def confirm(target: DeploymentTarget, version: int) -> None:
    """Probe the servers, because a request asks for a version that is already live.

    Raises:
        TemporaryError, PermanentError: a server does not answer, or answers wrongly.
    """
    golden = golden_rows(target.repository, target.store, version)
    target.fleet.for_each(
        partial(probe, name=target.names.model, version=version, golden=golden, named=False)
    )


def tidy(target: DeploymentTarget, line: Promotion) -> None:
    """Remove old versions, and record the deployment target of the release.

    A failure does not affect the release.
    """
    settings = target.settings
    try:
        retained = {
            line.version,
            line.previous_version or line.version,
            *target.repository.canary.whole(),
        }
        removed = target.repository.prune(retained, num_kept=settings.num_kept)
        target.checkpoint("pruned")
        logger.info("removed versions %s", removed)
        serving_target = ServingTarget(
            repository_uri=target.repository.uri,
            triton_urls=list(settings.triton_urls),
            server=target.repository.options_for(line.version).server,
        )
        write_serving_target(target.store, serving_target)
    except (ContractError, TemporaryError, PermanentError, OSError) as error:
        logger.warning("version %d is live, but tidying failed: %s", line.version, error)
