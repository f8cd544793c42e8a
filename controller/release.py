"""Release an accepted model: serve it and record it, or change nothing.

A release takes the lock and repairs what a killed deployment left (`site`). It checks that the
servers answer, and that the verdict compared the model with the live model. Then it exports the
graph, checks its parity, and stores the graph and the golden rows in the model registry under a new
version number. The remaining steps are in `switch.make_live`. A version number that the journal
contains is never reused.

The registry keeps the graph and its golden rows permanently. The gate scores the champion with
them, `verify` recomputes logged scores, and a rollback restores versions that Triton's repository
no longer contains. The stored files are copies and not hard links to the served files, because a
corrupt served file must not corrupt its only backup.

The configuration names only the new version. Triton loads the new version before it unloads the
previous version, which first finishes its requests. Keeping the previous version loaded would have
no benefit, because Triton reloads every named version when the configuration changes. The previous
version stays in the repository and in the registry, and a rollback loads it from there.
"""

import logging
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from evergreen.contracts.checks import PASS
from evergreen.contracts.manifests import CURRENT, Model, RawDataset, Release, ServingPlace, Verdict
from evergreen.registry import promotion_journal
from evergreen.registry.models import (
    GRAPH_FILE,
    graph_folder,
    graph_sha256,
    read_release,
    release_path,
    write_serving_place,
)
from evergreen.registry.promotion_journal import Promotion, canary_at_work
from evergreen.runtime.durable import sha256_file, whole_directory
from evergreen.runtime.errors import ContractError, PermanentError, Refused, TemporaryError
from evergreen.serving.graph.export import export
from evergreen.serving.intact import golden_rows
from evergreen.serving.parity import open_graph, prove_parity, read_held_out
from evergreen.serving.repository.model_repository import GOLDEN_FILE, ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import probe
from controller.site import Site, SiteSettings, opened
from controller.switch import make_live

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings(SiteSettings):
    """Deployment target and serving options of a release."""

    options: ServingOptions = field(default_factory=ServingOptions)
    """Serving options of the version."""
    trigger_id: str | None = None
    """Retrain request that this release answers, or None."""
    num_kept: int = 3
    """Number of versions that stay in the repository, including the live version and the previous
    version."""


class StaleVerdict(Refused):
    """The verdict compared the candidate with a model that is no longer live.

    The candidate needs a new evaluation.
    """


def release(
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    *,
    settings: ReleaseSettings,
    override: str | None = None,
) -> Release:
    """Release `model`, and return its manifest. If it is already live, return its existing release.

    Args:
        model: Model to release.
        verdict: Verdict about it.
        raw: Data with the holdout rows.
        settings: Deployment target and serving options.
        override: Reason to release the model whatever the verdict is (`promote`). None = the
            verdict must accept the model.

    Raises:
        ContractError: the inputs do not belong together, or the parity check fails.
        Refused: another model went live since the verdict, or a canary is running and the verdict
            is not a pass. The live version is unchanged.
        TemporaryError: a server does not answer, or another deployment is running. The live version
            is unchanged.
        PermanentError: a server rejected the version or answered wrongly. The live version is
            unchanged.
    """
    check_belonging(model, verdict)
    if not verdict.accepted and override is None:
        raise ContractError(
            f"verdict on model {model.model_id} is {verdict.decision!r}, expected an accepted one"
        )
    settings = settings.serving(model)
    with opened(settings) as site:
        live = site.live
        if (
            live is not None
            and live.model_id == model.model_id
            and live.version in site.repository.versions()
        ):
            return _confirm(site, live, settings)
        check_may_replace(site, verdict, settings, override=override)
        done = prepare_version(site, model, verdict, raw=raw, settings=settings)
        line = site.entry(
            promotion_journal.PROMOTE if override else promotion_journal.RELEASE,
            done,
            reason=done.reason
            if override is None
            else f"{override}; the verdict was: {verdict.reason}",
            trigger_id=settings.trigger_id,
            decision=verdict.decision,
        )
        try:
            line = make_live(site, done, line, options=settings.options)
        except BaseException:
            if not site.is_published and site.holds_lock():
                forget(site.store, done.version)
            raise
        _tidy(site, settings, line)
        logger.info("version %d is live, model %s", done.version, model.model_id)
        return done


def _confirm(site: Site, live: Promotion, settings: ReleaseSettings) -> Release:
    """Probe the servers and return the release of a model that is already live.

    A retried step must not release the model twice. It only repeats the cleanup.
    """
    golden = golden_rows(site.repository, site.store, live.version)
    site.fleet.for_each(
        partial(probe, name=site.names.model, version=live.version, golden=golden, named=False)
    )
    _tidy(site, settings, live)
    logger.info("model %s is live already as version %d", live.model_id, live.version)
    return read_release(site.store, live.version)


def _tidy(site: Site, settings: ReleaseSettings, line: Promotion) -> None:
    """Remove old versions and record where the release went.

    A failure does not affect the release.
    """
    try:
        kept = {
            line.version,
            line.previous_version or line.version,
            *site.repository.canary.whole(),
        }
        removed = site.repository.prune(kept, num_kept=settings.num_kept)
        site.checkpoint("pruned")
        logger.info("removed versions %s", removed)
        place = ServingPlace(
            repository_uri=site.repository.uri,
            triton_urls=list(settings.triton_urls),
            server=settings.options.server,
        )
        write_serving_place(site.store, place)
    except (ContractError, TemporaryError, PermanentError, OSError) as error:
        logger.warning("version %d is live, but tidying failed: %s", line.version, error)


def check_belonging(model: Model, verdict: Verdict) -> None:
    """Check that the verdict is about the model.

    Raises:
        ContractError: the verdict is about another model.
    """
    if verdict.candidate_model_id != model.model_id:
        raise ContractError(
            f"verdict is about model {verdict.candidate_model_id}, expected {model.model_id}"
        )


def check_may_replace(
    site: Site, verdict: Verdict, settings: ReleaseSettings, *, override: str | None = None
) -> None:
    """Check that the candidate may replace the live version, before anything is built.

    A verdict compares the candidate with one champion. If two runs overlap, another model may have
    gone live since the verdict, so the verdict does not compare the candidate with the live model.
    The candidate is then refused and must be evaluated again. Runs that chose their champion
    explicitly, or chose no champion, are not checked.

    If a canary is running, a candidate with an inconclusive verdict does not replace it, because a
    new canary would have to collect its evidence from the start. A candidate that passed is
    released directly, which ends the canary. A person can end the canary first by `canary abort`.

    Raises:
        ContractError: the live version uses another backend.
        Refused: a canary is running and the candidate did not pass, or the candidate was rolled
            back earlier.
        StaleVerdict: the live model is not the champion of the verdict.
    """
    if (verdict.decision != PASS or override is not None) and (
        canary := canary_at_work(site.store)
    ):
        raise Refused(
            f"version {canary.version} is a running canary, expected a candidate that passes the "
            "gate, or the canary released or ended first"
        )
    blocked = promotion_journal.blocked_models(site.store)
    if override is None and (line := blocked.get(verdict.candidate_model_id)) is not None:
        raise Refused(
            f"model {verdict.candidate_model_id} was rolled back at {line.time} ({line.reason}), "
            "expected another model, or a promotion with --override"
        )
    live = site.live
    if override is None and verdict.champion_reference == CURRENT:
        live_model = live.model_id if live else None
        if verdict.champion_model_id != live_model:
            raise StaleVerdict(
                f"model {verdict.candidate_model_id} was compared with "
                f"{verdict.champion_model_id or 'no champion'}, but {live_model or 'nothing'} is "
                "live: evaluate it again, or promote it with --override"
            )
    if live is not None and live.version in site.repository.versions():
        kind = site.repository.published.record(live.version).options.server
        if kind != settings.options.server:
            raise ContractError(
                f"server is {settings.options.server!r}, expected {kind!r} as the live version "
                f"{live.version} in {site.repository.uri}: one model serves all its versions alike"
            )


def prepare_version(
    site: Site, model: Model, verdict: Verdict, *, raw: RawDataset, settings: ReleaseSettings
) -> Release:
    """Export a new version, check its parity, store it in the registry and return its manifest.

    No server is notified and nothing is live yet. The graph must reproduce the verdict's scores of
    the holdout rows in `raw`.

    Raises:
        ContractError: the graph's scores differ from training. The version's files were removed.
    """
    announced = {entry.version for entry in promotion_journal.read_entries(site.store)}
    for path in (site.store / "graphs").glob("*"):
        if path.name.isdigit() and int(path.name) not in announced:
            # No server has loaded this version, because a deployment was killed before it announced
            # the version.
            forget(site.store, int(path.name))
    version, live = next_version(site.store, site.repository), site.live
    folder = graph_folder(site.store, version)
    with whole_directory(folder, replace=True) as building:
        export(model, building)
        rows = read_held_out(raw, verdict)
        difference = prove_parity(open_graph(building / GRAPH_FILE), rows)
        logger.info("parity: %.3g over %d rows", difference, len(rows))
        rows.sample().save(building / GOLDEN_FILE)
        # The lease may have expired meanwhile, and another deployment may have used the same
        # number.
        site.repository.check_held()
    done = Release(
        model_name=site.names.model,
        version=version,
        previous_version=live.version if live else None,
        model_id=model.model_id,
        model_uri=model.uri,
        graph_uri=(folder / GRAPH_FILE).absolute().as_uri(),
        sha256={
            "graph": graph_sha256(folder),
            "golden": sha256_file(folder / GOLDEN_FILE),
            "weights": model.sha256["weights"],
            "workflow": model.sha256["workflow"],
            "data": raw.digest,
        },
        raw_digest=raw.digest,
        parity_max_abs_diff=difference,
        parity_rows=len(rows),
        repository_uri=site.repository.uri,
        trigger_id=settings.trigger_id,
        reason=verdict.reason,
        published_at=site.now(),
        parent_model_id=model.parent_model_id,
    )
    done.write(release_path(site.store, version))
    site.checkpoint("kept")
    return done


def next_version(store: Path, repository: ModelRepository) -> int:
    """Return one more than the highest version in the repository, the journal and the registry.

    Intents in the journal count too.
    """
    journal = [entry.version for entry in promotion_journal.read_entries(store)]
    manifests = [
        int(path.stem) for path in (store / "releases").glob("*.json") if path.stem.isdigit()
    ]
    graphs = [int(path.name) for path in (store / "graphs").glob("*") if path.name.isdigit()]
    return 1 + max([0, *repository.taken_numbers(), *journal, *manifests, *graphs])


def forget(store: Path, version: int) -> None:
    """Remove the registry's files of a version that was never served."""
    release_path(store, version).unlink(missing_ok=True)
    shutil.rmtree(graph_folder(store, version), ignore_errors=True)
