"""Stores that were written before graphs were kept in them: what Triton's repository still holds is copied in time.

The next deployment clears away version folders without a record, as the older ones are; the copies let a rollback bring
those versions back. Nothing else needs to know that a store is old.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from components.contracts.manifests import Release
from components.deployment.graph.files import DATA_FILE, GRAPH_FILE, graph_sha256
from components.deployment.repository.files import GOLDEN_FILE
from components.runtime.durable import whole_directory
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.store import promotion_journal
from components.store.models import graph_folder, release_path

logger = logging.getLogger(__name__)


def keep_older_graphs(store: Path) -> None:
    """Copies graph and golden rows of every released version that the store has none of, where they still lie."""
    for version in sorted({entry.version for entry in promotion_journal.read_journal(store)}):
        folder = graph_folder(store, version)
        if not folder.exists() and (source := _source(store, version)):
            with whole_directory(folder) as copy:
                for name in (GRAPH_FILE, DATA_FILE, GOLDEN_FILE):
                    if (source / name).exists():
                        shutil.copyfile(source / name, copy / name)
            logger.info("kept the graph of version %d, of an older store", version)


def _source(store: Path, version: int) -> Path | None:
    """The folder with what was released as `version`; None where it is gone or damaged."""
    try:
        release = Release.read(release_path(store, version))
        folder = local_path(release.graph_uri).parent
    except ContractError:
        return None
    whole = all((folder / name).exists() for name in (GRAPH_FILE, GOLDEN_FILE))
    return folder if whole and graph_sha256(folder) == release.sha256.get("graph") else None
