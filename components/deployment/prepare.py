"""A new version before anyone hears of it: its number, its graph with the proof of parity, its manifest.

The graph and its golden rows are kept in the model store for good: the gate scores the champion with them, `verify`
repeats logged answers, and a rollback brings back a version that Triton's repository no longer holds. They are a copy,
not a hard link of what is served: a file damaged there must not take its only reserve with it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.contracts.manifests import Model, RawDataset, Release, Verdict
from components.contracts.serving import MODEL_NAME
from components.deployment.graph.export import export
from components.deployment.graph.files import GRAPH_FILE, graph_bytes, graph_sha256
from components.deployment.graph.memory import check_fits
from components.deployment.graph.parity import open_graph, prove_parity, read_held_out
from components.deployment.release_settings import ReleaseSettings
from components.deployment.repository.files import GOLDEN_FILE
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.site import Site
from components.runtime.durable import whole_directory
from components.store import promotion_journal
from components.store.models import graph_folder, release_path

logger = logging.getLogger(__name__)


class Stopwatch:
    """Seconds of each named part of a release."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Counts the body as `part`."""
        started = time.perf_counter()
        yield
        self.seconds[part] = round(time.perf_counter() - started, 4)


def next_version(store: Path, repository: ModelRepository) -> int:
    """One more than any version that the repository, the journal (an intent is enough) or the store names."""
    journal = [entry.version for entry in promotion_journal.read_entries(store)]
    manifests = [int(path.stem) for path in (store / "releases").glob("*.json") if path.stem.isdigit()]
    graphs = [int(path.name) for path in (store / "graphs").glob("*") if path.name.isdigit()]
    return 1 + max([0, *repository.taken_numbers(), *journal, *manifests, *graphs])


def _forget_unannounced(site: Site) -> None:
    """Removes what a killed deployment kept of a version that it had not announced yet: no server heard of it."""
    announced = {entry.version for entry in promotion_journal.read_entries(site.store)}
    for path in (site.store / "graphs").glob("*"):
        if path.name.isdigit() and int(path.name) not in announced:
            forget(site.store, int(path.name))


def forget(store: Path, version: int) -> None:
    """Removes what the store keeps of a version that no client can have met."""
    release_path(store, version).unlink(missing_ok=True)
    shutil.rmtree(graph_folder(store, version), ignore_errors=True)


def prepare_version(
    site: Site,
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    settings: ReleaseSettings,
    *,
    versions: int = 2,
    watch: Stopwatch | None = None,
) -> Release:
    """The manifest of a new version, whose graph is proven and kept in the store; no server is told, nothing is live.

    Args:
        site: Where.
        model: The model.
        verdict: Its scores of the held-out rows are what the graph must repeat.
        raw: Those rows.
        settings: How it will be served.
        versions: Versions that servers hold at once, for the check against `target_memory`.
        watch: Counts the seconds.

    Raises:
        ContractError: the graph differs from training, or does not fit; nothing is left of it.
    """
    watch = watch or Stopwatch()
    _forget_unannounced(site)
    version = next_version(site.store, site.repository)
    folder = graph_folder(site.store, version)
    difference, num_rows = _keep_graph(site, folder, model, verdict, raw, settings, versions, watch)
    live = site.live
    done = Release(
        model_name=MODEL_NAME,
        version=version,
        previous_version=live.version if live else None,
        model_id=model.model_id,
        model_uri=model.uri,
        graph_uri=(folder / GRAPH_FILE).absolute().as_uri(),
        sha256={
            "graph": graph_sha256(folder),
            "weights": model.sha256["weights"],
            "workflow": model.sha256["workflow"],
            "data": raw.digest,
        },
        raw_digest=raw.digest,
        parity_max_abs_diff=difference,
        parity_rows=num_rows,
        repository_uri=site.repository.uri,
        trigger_id=settings.trigger_id,
        reason=verdict.reason,
        published_at=site.now(),
        parent_model_id=model.parent_model_id,
        extra={"server": settings.server, "seconds": dict(watch.seconds), "graph_bytes": graph_bytes(folder)},
    )
    done.write(release_path(site.store, version))
    site.checkpoint("kept")
    return done


def _keep_graph(
    site: Site,
    folder: Path,
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    settings: ReleaseSettings,
    versions: int,
    watch: Stopwatch,
) -> tuple[float, int]:
    """Leaves graph and golden rows in `folder`, whole and proven; the largest difference, over how many rows."""
    with whole_directory(folder, replace=True) as building:
        with watch.time("export"):
            export(model, building)
        if settings.target_memory:
            check_fits(building, settings.target_memory, instances=settings.instances, versions=versions)
        with watch.time("parity"):
            rows = read_held_out(raw, verdict)
            difference = prove_parity(open_graph(building / GRAPH_FILE), rows)
        logger.info("parity: %.3g over %d rows", difference, len(rows))
        rows.sample().save(building / GOLDEN_FILE)
        # All this may have outlasted a lease, and whoever took it over may have given the number again.
        site.repository.check_held()
    return difference, len(rows)
