"""Verify the stored files of all known versions by hash, at the start and once a day.

The inspection is part of the release controller (`controller`). A disk can return wrong bytes
without an error. Golden rows detect few of these errors: a flipped bit in an embedding row that no
golden row uses changes no golden score. A corrupt file in Triton's repository is replaced by the
model registry's copy. A corrupt file in the registry is replaced by the repository's copy. Servers
then reload the graph.
"""

import logging
import shutil
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from controller.site import SiteSettings
from evergreen.registry import promotion_journal
from evergreen.registry.requests import open_requests
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.intact import find_corrupt, golden_rows, heal
from evergreen.serving.prepare import PREPARED_FOLDER
from evergreen.serving.repository.model_repository import ModelRepository, VersionFolders
from evergreen.serving.servers import addresses, bring_up

logger = logging.getLogger(__name__)

DAY_SECONDS = 86_400.0
RETRY_SECONDS = 300.0
"""Seconds until the next inspection, if the last inspection failed or found a file that it could
not repair."""


@dataclass(kw_only=True)
class Inspection:
    """Inspection of the version files of one site. Call `step` repeatedly."""

    site: SiteSettings
    healed: list[str] = field(default_factory=list)
    """Paths of the files that were replaced since the start."""
    _due: float | None = None
    _problem: str | None = None

    def step(self) -> None:
        """Compare all hashes if the inspection is due, and replace corrupt files.

        Raises:
            ContractError: both copies of a file are corrupt. The error is raised again by every
                call until the next inspection.
            TemporaryError: a deployment is running, or the storage does not answer. The next call
                tries again.
        """
        now = self.site.patience.clock()
        if self._due is not None and now < self._due:
            if self._problem is not None:
                raise ContractError(self._problem)
            return
        self._due, self._problem = now + RETRY_SECONDS, None
        if not promotion_journal.read_entries(self.site.store):
            self._due = None  # inspect right after the first release
            return
        try:
            self._inspect()
        except ContractError as error:
            self._problem = str(error)
            raise
        self._due = now + DAY_SECONDS

    def _inspect(self) -> None:
        repository, problems = self.site.open_repository(), []
        for folders, version in self._versions(repository):
            try:
                if find_corrupt(folders, self.site.store, version):
                    with repository.locked():
                        # Hashing takes minutes, in which a lease can pass to another controller.
                        repository.check_held()
                        self._heal(repository, folders, version)
            except (ContractError, OSError) as error:  # the other versions are still inspected
                problems.append(str(error))
        remove_stale(self.site.store, self.site.clock())
        if problems:
            raise ContractError("; ".join(problems))

    def _versions(self, repository: ModelRepository) -> list[tuple[VersionFolders, int]]:
        """Return the versions that are both in the journal and in the repository."""
        known = {entry.version for entry in promotion_journal.read_journal(self.site.store)}
        canary = promotion_journal.canary_at_work(self.site.store)
        at_work = {canary.version} if canary else set()
        found = [
            (repository.published, version)
            for version in repository.taken_numbers()
            if version in known
        ]
        return found + [
            (repository.canary, version)
            for version in repository.canary.sizes()
            if version in at_work
        ]

    def _heal(self, repository: ModelRepository, folders: VersionFolders, version: int) -> None:
        """Replace the files that are still corrupt, and reload them on the servers.

        The caller holds the lock.
        """
        store = self.site.store
        if promotion_journal.interrupted(store):
            raise TemporaryError(
                "a killed deployment must be rolled back before its files are inspected"
            )
        if (folders, version) not in self._versions(repository):
            return
        healed = heal(folders, store, version, options=repository.options_for(version))
        self.healed += healed
        live = promotion_journal.current(store)
        is_served = folders is repository.canary or (live is not None and live.version == version)
        if is_served and any(path.startswith(folders.uri) for path in healed):
            name = (
                repository.names.canary if folders is repository.canary else repository.names.model
            )
            self._reload(name, version, repository)

    def _reload(self, name: str, version: int, repository: ModelRepository) -> None:
        """Make every server reload the model.

        If a server fails to reload, the watchdog reloads it later.
        """
        golden = golden_rows(repository, self.site.store, version)
        for url in addresses(self.site.triton_urls, self.site.resolve):
            try:
                with closing(self.site.connect(url)) as server:
                    bring_up(
                        server, name, version=version, golden=golden, patience=self.site.patience
                    )
            except (TemporaryError, PermanentError) as error:
                logger.warning("the healed version %d: %s", version, error)


def remove_stale(store: Path, now: datetime) -> None:
    """Remove prepared versions that are over a day old and that no open request names.

    These versions are left by steps that were killed before they appended a request.
    """
    open_ids = {state.id for state in open_requests(store)}
    for folder in (store / PREPARED_FOLDER).glob("*"):
        age = now.timestamp() - folder.stat().st_mtime
        if folder.name not in open_ids and age > DAY_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
