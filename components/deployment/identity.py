"""Whether a version is still what was released: its hashes in journal, manifest and files, and what its graph says.

Looks and never changes; each thing that is looked at is a `Check`. Which answers were logged is `verify`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.contracts.manifests import Model, Release
from components.deployment.graph.export import export
from components.deployment.graph.files import graph_sha256
from components.deployment.graph.parity import TOLERANCE, GoldenRows, check_scores, score
from components.deployment.repository.files import GOLDEN_FILE
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.store.models import graph_folder, model_folder, release_path
from components.store.promotion_journal import Promotion, read_entries


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that identifies a version."""

    name: str
    held: bool | None
    """None = it could not be looked at: an older release does not hold it."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the store says about a version."""

    version: int
    manifest: Release | None
    entries: list[Promotion]
    """The journal's lines about it, oldest first."""

    @property
    def model_id(self) -> str:
        """The model that the version serves."""
        return self.manifest.model_id if self.manifest else self.entries[-1].model_id

    @property
    def sha256(self) -> dict[str, str]:
        """Hashes as released; of the journal where a release that came to nothing left no manifest."""
        if self.manifest:
            return {"data": self.manifest.raw_digest, **self.manifest.sha256}
        return next((entry.sha256 for entry in reversed(self.entries) if entry.sha256), {})


def read_recorded(store: Path, version: int) -> Recorded:
    """What the store says about `version`.

    Raises:
        ContractError: nothing: it was never released.
    """
    path = release_path(store, version)
    manifest = Release.read(path) if path.exists() else None
    entries = [entry for entry in read_entries(store) if entry.version == version]
    if manifest is None and not entries:
        raise ContractError(f"version {version} was never released in model store {store}, expected one of its journal")
    return Recorded(version=version, manifest=manifest, entries=entries)


def check_identity(recorded: Recorded, store: Path, scratch: Path) -> tuple[list[Check], Path | None]:
    """The checks of identity, and the folder of a graph with the released hash; None where there is none left."""
    released = recorded.sha256
    model = _stored_model(recorded, store)
    kept = _kept_graph(recorded, store)
    checks = [_check_journal(recorded)]
    sources: dict[str, Callable[[], str]] = {
        "data": lambda: model().raw_digest,
        "workflow": lambda: sha256_tree(local_path(model().uri) / Model.WORKFLOW),
        "weights": lambda: sha256_tree(local_path(model().uri) / Model.WEIGHTS),
        "graph": lambda: graph_sha256(kept),
        "graph exported again": lambda: _export_again(model(), scratch),
    }
    for name, source in sources.items():
        checks.append(_check_hash(name, released.get(name.split()[0]), source))
    held = {check.name: check.held for check in checks}
    graph = kept if held["graph"] else scratch if held["graph exported again"] else None
    return checks, graph


def _kept_graph(recorded: Recorded, store: Path) -> Path:
    """The folder of the released graph: in this store, or where an older release left it."""
    kept = graph_folder(store, recorded.version)
    return local_path(recorded.manifest.graph_uri).parent if recorded.manifest and not kept.exists() else kept


def _stored_model(recorded: Recorded, store: Path) -> Callable[[], Model]:
    """Reads the model's manifest, when it is asked for: its absence is a finding, not the end.

    What is looked at is this store's, also where the store was moved or restored elsewhere since it wrote its URIs.
    """
    folder = model_folder(store, recorded.model_id).absolute()
    return lambda: replace(Model.read(folder / Model.MANIFEST), uri=folder.as_uri())


def _export_again(model: Model, scratch: Path) -> str:
    export(model, scratch)
    return graph_sha256(scratch)


def _check_hash(name: str, released: str | None, source: Callable[[], str]) -> Check:
    if released is None:
        return Check(name=name, held=None, detail="was not recorded by this release")
    try:
        found = source()
    except (ContractError, OSError) as error:
        return Check(name=name, held=False, detail=str(error))
    detail = f"sha256 {found}" if found == released else f"sha256 is {found}, expected {released} as released"
    return Check(name=name, held=found == released, detail=detail)


def _check_journal(recorded: Recorded) -> Check:
    """That every line of the journal about the version names the hashes and the model of its manifest."""
    name, hashes = "journal", recorded.sha256
    if not recorded.entries:
        return Check(name=name, held=False, detail=f"no line names version {recorded.version}, but it has a manifest")
    for entry in recorded.entries:
        if entry.model_id != recorded.model_id:
            return Check(name=name, held=False, detail=f"model is {entry.model_id}, expected {recorded.model_id}")
        for part, digest in entry.sha256.items():
            if digest != hashes.get(part, digest):
                detail = f"sha256 of {part} is {digest} in the line of {entry.time}, expected {hashes[part]}"
                return Check(name=name, held=False, detail=detail)
    told = ", ".join(f"{entry.action} {entry.time}" for entry in recorded.entries)
    if not any(entry.sha256 for entry in recorded.entries):
        return Check(name=name, held=None, detail=f"{told}; older lines name no hashes")
    return Check(name=name, held=True, detail=told)


def check_golden(session: Any, recorded: Recorded, store: Path) -> Check:
    """Whether the graph behind `session` answers the version's golden rows as training did."""
    path = _kept_graph(recorded, store) / GOLDEN_FILE
    if not path.exists():
        return Check(name="golden rows", held=None, detail=f"{path} is absent")
    try:
        golden = GoldenRows.load(path)
        largest = check_scores(score(session, golden), golden, tolerance=TOLERANCE, source="graph")
    except ContractError as error:
        return Check(name="golden rows", held=False, detail=str(error))
    return Check(name="golden rows", held=True, detail=f"{len(golden)} rows, largest difference {largest:.3g}")
