"""Verify the stored files of all known versions by hash, at the start and once a day.

The inspection is part of the release controller (`controller`). A disk can return wrong bytes
without an error. The probes with golden rows detect few of these errors: a flipped bit in an
embedding changes no golden score if no golden row uses this embedding. A corrupt file in Triton's
repository is replaced by the model registry's copy. A corrupt file in the registry is replaced by
the repository's copy. Servers then reload the graph.

Hashing takes minutes, so a separate thread compares the hashes. The thread only reads, and the
controller carries out requests at the same time. The controller itself replaces the files, one
version per round. Before it replaces a file, it compares the hashes of that version again under the
lock.
"""

import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from controller.deployment_target import TargetSettings
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


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a separate thread, which does not delay the end of the process."""
    threading.Thread(target=work, name="inspection", daemon=True).start()


@dataclass(kw_only=True)
class _Search:
    """Comparison of all hashes, which may run in another thread."""

    corrupt: deque[tuple[VersionFolders, int]] = field(default_factory=deque)
    """Versions with a corrupt file that was not replaced yet."""
    problems: list[str] = field(default_factory=list)
    """Error messages of versions that could not be compared or repaired."""
    failure: TemporaryError | PermanentError | None = None
    """Error that ended the search early."""
    is_done: bool = False


@dataclass(kw_only=True)
class Inspection:
    """Check of the version files of one target, by their hashes. Call `step` repeatedly."""

    target: TargetSettings
    start: Callable[[Callable[[], None]], None] = in_thread
    """Function that runs the comparison of all hashes in parallel to the controller."""
    healed: list[str] = field(default_factory=list)
    """Paths of the files that were replaced since the start."""
    _due: float | None = None
    _problem: str | None = None
    _search: _Search | None = None

    def step(self) -> None:
        """Start a comparison of all hashes if one is due, and replace corrupt files that it found.

        One call replaces the files of at most one version.

        Raises:
            ContractError: both copies of a file are corrupt. The error is raised again by every
                call until the next inspection.
            TemporaryError: a deployment is running, or the storage does not answer. The next call
                tries again.
            PermanentError: the storage rejected a read.
        """
        now = self.target.timeouts.clock()
        if self._search is None:
            if self._due is not None and now < self._due:
                if self._problem is not None:
                    raise ContractError(self._problem)
                return
            self._due, self._problem = now + RETRY_SECONDS, None
            if not promotion_journal.read_entries(self.target.store):
                self._due = None  # inspect right after the first release
                return
            search = self._search = _Search()
            repository = self.target.open_repository()
            self.start(lambda: self._compare(repository, search))
        search = self._search
        if search.corrupt:
            self._replace(search)
        if search.is_done and not search.corrupt:
            self._search = None
            self._end(search, now)

    def _end(self, search: _Search, now: float) -> None:
        """Set the time of the next inspection, and report what could not be repaired."""
        if search.failure is not None:
            raise search.failure
        remove_stale(self.target.store, self.target.clock())
        if search.problems:
            self._problem = "; ".join(search.problems)
            raise ContractError(self._problem)
        self._due = now + DAY_SECONDS

    def _compare(self, repository: ModelRepository, search: _Search) -> None:
        """Compare all hashes. This method only reads, and may run in another thread."""
        try:
            for folders, version in self._versions(repository):
                try:
                    if find_corrupt(folders, self.target.store, version):
                        search.corrupt.append((folders, version))
                except (ContractError, OSError) as error:  # the other versions are still compared
                    search.problems.append(str(error))
        except (ContractError, OSError) as error:
            search.problems.append(str(error))
        except (TemporaryError, PermanentError) as error:
            search.failure = error
        except Exception as error:  # otherwise the end of the thread would look like success
            search.failure = PermanentError(
                f"the inspection failed: {type(error).__name__}: {error}"
            )
            logger.exception("the inspection failed")
        finally:
            search.is_done = True

    def _replace(self, search: _Search) -> None:
        """Replace the corrupt files of one version."""
        folders, version = search.corrupt[0]
        repository = self.target.open_repository()
        try:
            with repository.locked():
                repository.check_held()
                self._heal(repository, folders, version)
        except (ContractError, OSError, PermanentError) as error:
            search.problems.append(str(error))  # the other versions are still healed
        search.corrupt.popleft()

    def _versions(self, repository: ModelRepository) -> list[tuple[VersionFolders, int]]:
        """Return the versions that are both in the journal and in the repository."""
        known = {entry.version for entry in promotion_journal.read_journal(self.target.store)}
        canary = promotion_journal.canary_at_work(self.target.store)
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
        store = self.target.store
        if promotion_journal.interrupted(store):
            raise TemporaryError(
                "a killed deployment must be rolled back before its files are inspected"
            )
        known = {(each.uri, number) for each, number in self._versions(repository)}
        if (folders.uri, version) not in known:
            return
        healed = heal(folders, store, version, options=repository.options_for(version))
        self.healed += healed
        live = promotion_journal.current(store)
        is_canary = folders.uri == repository.canary.uri
        is_served = is_canary or (live is not None and live.version == version)
        if is_served and any(path.startswith(folders.uri) for path in healed):
            name = repository.names.canary if is_canary else repository.names.model
            self._reload(name, version, repository)

    def _reload(self, name: str, version: int, repository: ModelRepository) -> None:
        """Make every server reload the model.

        If a server fails to reload, the watchdog reloads it later.
        """
        golden = golden_rows(repository, self.target.store, version)
        for url in addresses(self.target.triton_urls, self.target.resolve):
            try:
                with closing(self.target.connect(url)) as server:
                    bring_up(
                        server, name, version=version, golden=golden, timeouts=self.target.timeouts
                    )
            except (TemporaryError, PermanentError) as error:
                logger.warning("the healed version %d: %s", version, error)


def remove_stale(store: Path, now: datetime) -> None:
    """Remove prepared versions that are over a day old, unless an open request names them.

    Steps that were killed before they appended a request leave such versions.
    """
    open_ids = {state.id for state in open_requests(store)}
    for folder in (store / PREPARED_FOLDER).glob("*"):
        age = now.timestamp() - folder.stat().st_mtime
        if folder.name not in open_ids and age > DAY_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
