"""The release protocol: an accepted model becomes the version that is served and recorded, or nothing changes.

In order: lock, and what a killed deployment left repaired (`site`); servers answer; the verdict is about what is live;
graph built and parity proven; both kept in the model store under a new version number; from there on
`switch.make_live`. A version number that the journal ever named is never given again.

The graph and its golden rows are kept in the model store for good: the gate scores the champion with them, `verify`
repeats logged answers, and a rollback brings back a version that Triton's repository no longer holds. They are a copy,
not a hard link of what is served: a file damaged there must not take its only backup with it.

Only the new version is named to the servers. Triton loads it before it lets the previous one go, which answers what it
has begun; a previous version kept loaded would gain nothing, since Triton loads every named version anew whenever the
configuration changed. It stays in the repository and in the store, and a rollback loads it from there.
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
from evergreen.serving.site import Site, SiteSettings, opened
from evergreen.serving.switch import make_live

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings(SiteSettings):
    """Where a release goes, and how the version is served there."""

    options: ServingOptions = field(default_factory=ServingOptions)
    """How the version is served."""
    trigger_id: str | None = None
    """The retrain request that this answers."""
    num_kept: int = 3
    """Versions kept in the repository, the live and the previous one among them."""


class StaleVerdict(Refused):
    """The verdict compared with a model that is not the live one any more: the candidate must be judged again."""


def release(
    model: Model, verdict: Verdict, raw: RawDataset, *, settings: ReleaseSettings, override: str | None = None
) -> Release:
    """The release that made `model` live; a model that is live already keeps its release.

    `override` says why it goes live whatever the verdict decided or compared with (`promote`); None = the verdict
    counts.

    Raises:
        ContractError: the inputs do not belong together, or parity fails.
        Refused: another model went live since the verdict, or a canary is at work and the verdict is no pass; what is
            live is live.
        TemporaryError: a server does not answer, or another deployment is at work; what was live is live.
        PermanentError: a server refused the version or answered wrongly; what was live is live.
    """
    check_belonging(model, verdict)
    if not verdict.accepted and override is None:
        raise ContractError(f"verdict on model {model.model_id} is {verdict.decision!r}, expected an accepted one")
    settings = settings.serving(model)
    with opened(settings) as site:
        live = site.live
        if live is not None and live.model_id == model.model_id and live.version in site.repository.versions():
            return _confirm(site, live, settings)
        check_may_replace(site, verdict, settings, override=override)
        done = prepare_version(site, model, verdict, raw=raw, settings=settings)
        line = site.entry(
            promotion_journal.PROMOTE if override else promotion_journal.RELEASE,
            done,
            reason=done.reason if override is None else f"{override}; the verdict was: {verdict.reason}",
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
    """The release of the model that is live already: a retried step must not release it twice, and tidies up."""
    golden = golden_rows(site.repository, site.store, live.version)
    site.fleet.for_each(partial(probe, name=site.names.model, version=live.version, golden=golden, named=False))
    _tidy(site, settings, live)
    logger.info("model %s is live already as version %d", live.model_id, live.version)
    return read_release(site.store, live.version)


def _tidy(site: Site, settings: ReleaseSettings, line: Promotion) -> None:
    """Removes versions that nobody needs, and notes where this release went; it stands whether or not this works."""
    try:
        kept = {line.version, line.previous_version or line.version, *site.repository.canary.whole()}
        removed = site.repository.prune(kept, num_kept=settings.num_kept)
        site.checkpoint("pruned")
        logger.info("removed versions %s", removed)
        place = ServingPlace(
            repository_uri=site.repository.uri, triton_urls=list(settings.triton_urls), server=settings.options.server
        )
        write_serving_place(site.store, place)
    except (ContractError, TemporaryError, PermanentError, OSError) as error:
        logger.warning("version %d is live, but tidying failed: %s", line.version, error)


def check_belonging(model: Model, verdict: Verdict) -> None:
    """Returns if the verdict is about the model.

    Raises:
        ContractError: it is not.
    """
    if verdict.candidate_model_id != model.model_id:
        raise ContractError(f"verdict is about model {verdict.candidate_model_id}, expected {model.model_id}")


def check_may_replace(site: Site, verdict: Verdict, settings: ReleaseSettings, *, override: str | None = None) -> None:
    """Returns if the candidate may take the live version's place; checked before anything is built.

    A verdict compares with one champion. If another model went live since (two runs at once: one wins), it says nothing
    of the exchange that a release would make, so the loser is refused and must be judged again. A run that named its
    champion, or wanted none, has chosen what to compare with.

    A canary goes on beside a round that is undecided too: it has gathered evidence that the newer candidate would begin
    anew. A candidate that passed needs none, and its release ends the canary; a person ends it first by `canary abort`.

    Raises:
        ContractError: the live version is of another kind of server.
        Refused: a canary is at work, and the candidate did not pass; or the candidate was taken back before.
        StaleVerdict: the live model is not the one that the verdict compared with.
    """
    if (verdict.decision != PASS or override is not None) and (canary := canary_at_work(site.store)):
        raise Refused(
            f"version {canary.version} is a canary and goes on; expected a candidate that passes the gate, or the "
            "canary released or ended first"
        )
    bars = promotion_journal.barred(site.store)
    if override is None and (bar := bars.get(verdict.candidate_model_id)) is not None:
        raise Refused(
            f"model {verdict.candidate_model_id} was taken back at {bar.time} ({bar.reason}), expected another "
            "model, or a promotion with --override"
        )
    live = site.live
    if override is None and verdict.champion_reference == CURRENT:
        live_model = live.model_id if live else None
        if verdict.champion_model_id != live_model:
            raise StaleVerdict(
                f"model {verdict.candidate_model_id} was judged against {verdict.champion_model_id or 'no champion'}, "
                f"but {live_model or 'nothing'} is live: judge it again, or promote it with --override"
            )
    if live is not None and live.version in site.repository.versions():
        kind = site.repository.published.record(live.version).options.server
        if kind != settings.options.server:
            raise ContractError(
                f"server is {settings.options.server!r}, expected {kind!r} as the live version {live.version} in "
                f"{site.repository.uri}: one model serves all its versions alike"
            )


def prepare_version(
    site: Site, model: Model, verdict: Verdict, *, raw: RawDataset, settings: ReleaseSettings
) -> Release:
    """The manifest of a new version, its graph proven and kept in the store; no server is notified, nothing is live.

    The verdict's scores of the held-out rows of `raw` are what the graph must repeat.

    Raises:
        ContractError: the graph differs from training; nothing is left of it.
    """
    announced = {entry.version for entry in promotion_journal.read_entries(site.store)}
    for path in (site.store / "graphs").glob("*"):
        if path.name.isdigit() and int(path.name) not in announced:
            # A killed deployment kept it and had not announced it yet: no server heard of it.
            forget(site.store, int(path.name))
    version, live = next_version(site.store, site.repository), site.live
    folder = graph_folder(site.store, version)
    with whole_directory(folder, replace=True) as building:
        export(model, building)
        rows = read_held_out(raw, verdict)
        difference = prove_parity(open_graph(building / GRAPH_FILE), rows)
        logger.info("parity: %.3g over %d rows", difference, len(rows))
        rows.sample().save(building / GOLDEN_FILE)
        # All this may have outlasted a lease, and whoever took it over may have given the number again.
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
    """One more than any version that the repository, the journal (an intent is enough) or the store names."""
    journal = [entry.version for entry in promotion_journal.read_entries(store)]
    manifests = [int(path.stem) for path in (store / "releases").glob("*.json") if path.stem.isdigit()]
    graphs = [int(path.name) for path in (store / "graphs").glob("*") if path.name.isdigit()]
    return 1 + max([0, *repository.taken_numbers(), *journal, *manifests, *graphs])


def forget(store: Path, version: int) -> None:
    """Removes what the store keeps of a version that no client can have met."""
    release_path(store, version).unlink(missing_ok=True)
    shutil.rmtree(graph_folder(store, version), ignore_errors=True)
