"""Rollback: an earlier version is live again, on every server and in the journal, with the reason.

`python -m components.deployment.rollback --store S --repository R --triton-urls host:port --reason "..."`. Without
`--to` it is the version that the live one replaced. Only the named version stays loaded; the newer ones stay on disk,
and a later release gets a number above them all.
"""

from __future__ import annotations

import argparse
import logging
import sys
from datetime import datetime, timezone
from pathlib import Path

from components.contracts import promotion_journal
from components.contracts.errors import ContractError, PermanentError, TemporaryError
from components.contracts.manifests import Release
from components.contracts.model_store import release_path
from components.contracts.promotion_journal import Promotion, append_promotion
from components.contracts.uris import local_path
from components.deployment.repository import ModelRepository
from components.deployment.switch import Connect, Patience, connected, parse_urls, switch
from components.deployment.triton_client import Triton
from components.storage.locations import open_objects

logger = logging.getLogger(__name__)


def rollback(
    store: Path,
    repository: str,
    triton_urls: list[str],
    *,
    to_version: int | None = None,
    reason: str,
    trigger_id: str | None = None,
    patience: Patience | None = None,
    connect: Connect = Triton,
) -> Promotion:
    """The journal's entry that made an earlier version live again.

    Args:
        store: The model store.
        repository: URI of Triton's model repository.
        triton_urls: host:grpc_port of each running server; none = they read the repository when they start.
        to_version: The version wanted; None = the one that the live version replaced.
        reason: Why, for the journal.
        trigger_id: What asked for it, if not a person.
        patience: How long to wait for readiness.
        connect: Makes a connection from an address.

    Raises:
        ContractError: there is no such version, it left the repository, or its graph is damaged.
        TemporaryError: a server does not answer, or a deployment is at work; what was live is live.
        PermanentError: a server refused the version or answered wrongly; what was live is live.
    """
    models = ModelRepository(open_objects(repository))
    with models.locked(), connected(triton_urls, connect) as servers:
        live = promotion_journal.current(store)
        if live is None:
            raise ContractError(f"model store {store} has no release, expected one to roll back")
        version = to_version if to_version is not None else _replaced_by(live)
        target = _check_target(store, models, live, version)
        path = release_path(store, version)
        entry = Promotion(
            time=datetime.now(timezone.utc).isoformat(),
            action=promotion_journal.ROLLBACK,
            version=version,
            previous_version=live.version,
            model_id=target.model_id,
            model_uri=target.model_uri,
            release_uri=path.absolute().as_uri(),
            trigger_id=trigger_id,
            reason=reason,
        )
        switch(
            models,
            servers,
            versions=[version],
            golden=models.golden_rows(version),
            server_kind=models.server_of(version),
            patience=patience or Patience(),
            record=lambda: append_promotion(store, entry),
        )
        logger.info("rolled back from version %d to %d: %s", live.version, version, reason)
        return entry


def _replaced_by(live: Promotion) -> int:
    """The version before the live one in its own line; after a rollback that leads further back, not forth again."""
    version = Release.read(local_path(live.release_uri)).previous_version
    if version is None:
        raise ContractError(f"version {live.version} is the first release, expected one with a previous version")
    return version


def _check_target(store: Path, models: ModelRepository, live: Promotion, version: int) -> Release:
    if version == live.version:
        raise ContractError(f"version {version} is live already, expected another version")
    manifest = release_path(store, version)
    if not manifest.exists():
        raise ContractError(f"version {version} was never released, expected a version of {manifest.parent}")
    if version not in models.versions():
        raise ContractError(f"version {version} is no longer in {models.path}, expected one of {models.versions()}")
    target = Release.read(manifest)
    found = models.graph_sha256(version)
    if found != target.sha256["graph"]:
        raise ContractError(f"graph of version {version} has sha256 {found}, expected {target.sha256['graph']}")
    return target


def build_parser() -> argparse.ArgumentParser:
    """The flags of a rollback."""
    parser = argparse.ArgumentParser(prog="python -m components.deployment.rollback", description=__doc__)
    parser.add_argument("--store", required=True, help="model store, folder URI")
    parser.add_argument("--repository", required=True, help="Triton's model repository, folder URI")
    parser.add_argument("--triton-urls", default="", help="host:grpc_port of each running Triton, comma-separated")
    parser.add_argument(
        "--to", type=int, default=None, help="version wanted; default: the one the live version replaced"
    )
    parser.add_argument("--reason", required=True, help="why, for the journal")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Rolls back; exit code 0 done, 2 misuse or impossible, 3 a server failed and what was live is live."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        entry = rollback(
            local_path(arguments.store),
            arguments.repository,
            parse_urls(arguments.triton_urls),
            to_version=arguments.to,
            reason=arguments.reason,
        )
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (TemporaryError, PermanentError) as error:
        print(f"error: {error}; version in the journal stays live", file=sys.stderr)
        return 3
    print(f"version {entry.version} is live again (was {entry.previous_version})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
