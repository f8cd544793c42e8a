"""A model registry, a repository and two file-backed servers, for tests with many releases."""

import dataclasses
from pathlib import Path

from controller.release import ReleaseSettings
from controller.rollback import rollback
from evergreen.contracts.serving import versions_of
from evergreen.registry.models import graph_sha256
from evergreen.registry.promotion_journal import current, interrupted, read_entries
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.storage.uris import open_objects
from testing.served_names import CANDIDATE_NAME, NAMES
from tests.support.deployments import release
from tests.support.triton_double import Altered, TritonDouble

URLS = ("triton-a:8001", "triton-b:8001")


class FileDeployment:
    """A registry, a repository and two servers. Releases keep two versions in the repository."""

    def __init__(self, root, make_candidate):
        self.settings = ReleaseSettings(
            store=root / "store",
            repository=str(root / "repository"),
            triton_urls=URLS,
            num_kept=2,
            connect=self.connect,
        )
        self.state, self._make, self._root = root / "state", make_candidate, root
        self.repository = ModelRepository(open_objects(self.settings.repository), NAMES)
        self.servers = [self.connect(url).start() for url in URLS]
        self._candidates = {}

    def connect(self, url):
        return TritonDouble(url, repository=self.settings.repository, state=self.state)

    def candidate(self, seed):
        if seed not in self._candidates:
            self._candidates[seed] = self._make(self.settings.store, seed)
        return self._candidates[seed]

    def release(self, seed, **altered):
        """Release the model that is made with `seed` to the servers.

        `altered` maps the names of a server's methods to their replacements. Each replacement is
        called with the server as its first argument.
        """
        settings = self.settings
        if altered:
            settings = dataclasses.replace(
                settings, connect=lambda url: Altered(self.connect(url), **altered)
            )
        return release(*self.candidate(seed), settings=settings)

    def rollback(self, **how):
        return rollback(self.settings, **{"reason": "drill", **how})

    def entries(self):
        return read_entries(self.settings.store)

    def job(self, action, checkpoint, seed=None):
        paths = []
        if seed is not None:
            for manifest in self.candidate(seed):
                paths.append(str(self._root / f"{type(manifest).__name__}-{seed}.json"))
                manifest.write(paths[-1])
        return {
            "action": action,
            "store": str(self.settings.store),
            "repository": self.settings.repository,
            "urls": list(URLS),
            "state": str(self.state),
            "candidate": paths,
            "kill_at": checkpoint[0],
            "occurrence": checkpoint[1],
        }

    def check_served_is_whole_and_known(self):
        named = versions_of(self.repository.read_config())
        assert set(named) <= set(self.repository.versions())
        starting = self.connect("triton-new:8001").start()
        hashes = {(e.version, e.sha256["graph"]) for e in read_entries(self.settings.store)}
        for server in (*self.servers, starting):
            answering = max(server.loaded())
            assert (answering, graph_sha256(server.graph(answering).parent)) in hashes
        assert max(starting.loaded()) == max(named)

    def check_all_is_well(self, version):
        self.check_served_is_whole_and_known()
        assert current(self.settings.store).version == version
        assert interrupted(self.settings.store) is None
        for server in self.servers:
            assert max(server.loaded()) == version
            assert server.loaded(CANDIDATE_NAME) == []
        assert not (Path(self.settings.repository) / CANDIDATE_NAME).exists()
