"""The release protocol: an accepted model becomes the version that is served and recorded, or nothing changes.

In order: lock; servers answer; graph built; parity proven; staged and flushed; the staged file opened and asked;
rehearsed on every server under the candidate's name; published by one rename; switched (`switch`); recorded. The
rehearsal (0.1 s on an idle machine) is there because Triton gives requests without a version to the highest one the
moment it is loaded: whatever a load can reveal must be revealed before the real name is touched. The record (release
manifest, then the journal's line) comes last: a version that the journal does not name was never released, and the
next release passes over it.

The previous version stays loaded beside the new one, so `rollback` needs no load to have worked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

from components.contracts import promotion_journal
from components.contracts.errors import ContractError, PermanentError, TemporaryError
from components.contracts.manifests import Model, RawDataset, Release, Verdict
from components.contracts.model_store import release_path
from components.contracts.promotion_journal import Promotion, append_promotion
from components.contracts.serving import CANDIDATE_NAME, MODEL_NAME
from components.contracts.uris import local_path
from components.deployment.graph import export
from components.deployment.graph_files import GRAPH_FILE, graph_bytes
from components.deployment.parity import (
    TOLERANCE,
    GoldenRows,
    check_scores,
    open_graph,
    prove_parity,
    read_held_out,
    score,
)
from components.deployment.repository import ModelRepository
from components.deployment.switch import Connect, Patience, Server, connected, probe, switch, wait_until_ready
from components.deployment.triton_client import Triton
from components.deployment.triton_config import PYTHON, SERVERS
from components.storage.locations import open_objects

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings:
    """Where a release goes, and how patiently."""

    store: Path
    """The model store."""
    repository: str
    """URI of Triton's model repository, as this process sees it."""
    triton_urls: tuple[str, ...] = ()
    """host:grpc_port of each running Triton; none = publish only, servers read it when they start."""
    server: str = PYTHON
    """`python` or `onnxruntime`, see `triton_config`."""
    trigger_id: str | None = None
    """The retrain request that this answers."""
    num_kept: int = 3
    """Versions kept in the repository, the live and the previous one among them."""
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        """Refuses settings that no release has."""
        if self.server not in SERVERS:
            raise ContractError(f"server is {self.server!r}, expected one of {', '.join(SERVERS)}")
        if self.num_kept < 2:
            raise ContractError(f"num_kept is {self.num_kept}, expected at least 2 (live and previous)")


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """What is about to be released."""

    version: int
    previous: int | None
    """The version that is live; None before the first release."""
    graph: Path
    """Folder of the graph's files, on this machine."""
    golden: GoldenRows
    parity_max_abs_diff: float
    parity_rows: int


class _Stopwatch:
    """Seconds of each named part of a release."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = round(time.perf_counter() - started, 4)


def release(
    model: Model, verdict: Verdict, raw: RawDataset, settings: ReleaseSettings, *, connect: Connect = Triton
) -> Release:
    """The release that made `model` live; a model that is live already keeps its release.

    Raises:
        ContractError: the inputs do not belong together, parity fails, or the repository cannot be written.
        TemporaryError: a server does not answer, or another deployment is at work; what was live is live.
        PermanentError: a server refused the version or answered wrongly; what was live is live.
    """
    _check_belonging(model, verdict)
    repository = ModelRepository(open_objects(settings.repository))
    with (
        repository.locked(),
        connected(list(settings.triton_urls), connect) as servers,
        TemporaryDirectory(prefix="evergreen-graph-") as scratch,
    ):
        live = promotion_journal.current(settings.store)
        if live is not None and live.model_id == model.model_id and live.version in repository.versions():
            return _confirm(live, repository, servers)
        watch = _Stopwatch()
        previous = live.version if live else None
        candidate = _prepare(model, verdict, raw, previous, settings, repository, watch, Path(scratch))
        _stage_and_rehearse(candidate, settings, repository, servers, watch)
        done = _publish(candidate, model, verdict, raw, settings, repository, servers, watch)
        kept = {candidate.version} | ({previous} if previous else set())
        removed = repository.prune(kept, num_kept=settings.num_kept)
        logger.info("version %d is live, model %s; removed versions %s", done.version, model.model_id, removed)
        return done


def _check_belonging(model: Model, verdict: Verdict) -> None:
    if verdict.candidate_model_id != model.model_id:
        raise ContractError(f"verdict is about model {verdict.candidate_model_id}, expected {model.model_id}")
    if not verdict.accepted:
        raise ContractError(f"verdict on model {model.model_id} is {verdict.decision!r}, expected an accepted one")


def _confirm(live: Promotion, repository: ModelRepository, servers: list[Server]) -> Release:
    """The release of the model that is live already: a retried step must not release it twice."""
    for server in servers:
        probe(server, MODEL_NAME, live.version, repository.golden_rows(live.version), named=False)
    logger.info("model %s is live already as version %d", live.model_id, live.version)
    return Release.read(local_path(live.release_uri))


def _prepare(
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    previous: int | None,
    settings: ReleaseSettings,
    repository: ModelRepository,
    watch: _Stopwatch,
    scratch: Path,
) -> _Candidate:
    """The graph, in `scratch`, with its proof; nothing is written elsewhere."""
    if previous in repository.versions() and previous is not None:
        kind = repository.server_of(previous)
        if kind != settings.server:
            raise ContractError(
                f"server is {settings.server!r}, expected {kind!r} as the live version {previous} in "
                f"{repository.path}: one model serves all its versions alike"
            )
    with watch.time("export"):
        export(model, scratch)
    with watch.time("parity"):
        rows = read_held_out(raw, verdict)
        difference = prove_parity(open_graph(scratch / GRAPH_FILE), rows)
    logger.info("parity: %.3g over %d rows", difference, len(rows))
    return _Candidate(
        version=next_version(settings.store, repository),
        previous=previous,
        graph=scratch,
        golden=rows.sample(),
        parity_max_abs_diff=difference,
        parity_rows=len(rows),
    )


def next_version(store: Path, repository: ModelRepository) -> int:
    """One more than any version that the repository, the journal or a release manifest names."""
    recorded = [p.version for p in promotion_journal.read_journal(store)]
    manifests = [int(p.stem) for p in (store / "releases").glob("*.json") if p.stem.isdigit()]
    return 1 + max([0, *repository.versions(), *recorded, *manifests])


def _stage_and_rehearse(
    candidate: _Candidate,
    settings: ReleaseSettings,
    repository: ModelRepository,
    servers: list[Server],
    watch: _Stopwatch,
) -> None:
    """Leaves the version staged, read back from disk, and answered rightly by every server under another name."""
    version, golden = candidate.version, candidate.golden
    try:
        with watch.time("stage"):
            folder = repository.stage(version, candidate.graph, golden, settings.server)
            scores = score(open_graph(folder / GRAPH_FILE), golden)
            check_scores(scores, golden, tolerance=TOLERANCE, source="staged graph")
        with watch.time("rehearsal"):
            for server in servers:
                _rehearse(server, version, golden, settings.patience)
    except BaseException:
        repository.discard_candidate()
        raise


def _rehearse(server: Server, version: int, golden: GoldenRows, patience: Patience) -> None:
    """Returns if the server loads the candidate and answers rightly with it; unloads it either way."""
    try:
        server.load(CANDIDATE_NAME)
        wait_until_ready(server, CANDIDATE_NAME, version, patience)
        probe(server, CANDIDATE_NAME, version, golden)
    except (TemporaryError, PermanentError):
        with suppress(TemporaryError, PermanentError):
            server.unload(CANDIDATE_NAME)
        raise
    server.unload(CANDIDATE_NAME)


def _publish(
    candidate: _Candidate,
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    settings: ReleaseSettings,
    repository: ModelRepository,
    servers: list[Server],
    watch: _Stopwatch,
) -> Release:
    """The release, once every server answers with it and the journal names it; otherwise the version is withdrawn."""
    version, previous = candidate.version, candidate.previous
    started = time.perf_counter()
    released: list[Release] = []

    def record() -> None:
        watch.seconds["switch"] = round(time.perf_counter() - started, 4)
        released.append(_manifest(candidate, model, verdict, raw, settings, repository, watch))
        _record(settings.store, released[0])

    beside = [previous] if previous is not None and previous in repository.versions() else []
    try:
        repository.publish(version)
        switch(
            repository,
            servers,
            versions=[*beside, version],
            golden=candidate.golden,
            server_kind=settings.server,
            patience=settings.patience,
            record=record,
        )
    except BaseException:
        repository.withdraw(version)
        raise
    return released[0]


def _manifest(
    candidate: _Candidate,
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    settings: ReleaseSettings,
    repository: ModelRepository,
    watch: _Stopwatch,
) -> Release:
    version = candidate.version
    return Release(
        model_name=MODEL_NAME,
        version=version,
        previous_version=candidate.previous,
        model_id=model.model_id,
        model_uri=model.uri,
        graph_uri=(repository.version_path(version) / GRAPH_FILE).absolute().as_uri(),
        sha256={
            "graph": repository.graph_sha256(version),
            "weights": model.sha256["weights"],
            "workflow": model.sha256["workflow"],
        },
        raw_digest=raw.digest,
        parity_max_abs_diff=candidate.parity_max_abs_diff,
        parity_rows=candidate.parity_rows,
        repository_uri=repository.path.absolute().as_uri(),
        trigger_id=settings.trigger_id,
        reason=verdict.reason,
        published_at=datetime.now(timezone.utc).isoformat(),
        extra={"server": settings.server, "seconds": dict(watch.seconds), "graph_bytes": graph_bytes(candidate.graph)},
    )


def _record(store: Path, done: Release) -> None:
    """Writes the manifest, then the journal's line, which is what makes the version the live one."""
    path = release_path(store, done.version)
    done.write(path)
    append_promotion(
        store,
        Promotion(
            time=done.published_at,
            action=promotion_journal.RELEASE,
            version=done.version,
            previous_version=done.previous_version,
            model_id=done.model_id,
            model_uri=done.model_uri,
            release_uri=path.absolute().as_uri(),
            trigger_id=done.trigger_id,
            reason=done.reason,
        ),
    )
