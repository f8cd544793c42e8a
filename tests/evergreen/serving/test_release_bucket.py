"""Tests of the release protocol over a bucket: publish, roll back, repair and lock."""

import dataclasses

import pytest

from controller.reconcile import reconciled
from controller.release import ReleaseSettings
from controller.rollback import rollback
from evergreen.contracts.manifests import Release
from evergreen.contracts.serving import versions_of
from evergreen.registry.models import graph_folder, graph_sha256, release_path
from evergreen.registry.promotion_journal import current, read_entries
from evergreen.runtime.errors import TemporaryError
from evergreen.serving.parity import GoldenRows, open_graph, score
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.storage.uris import open_objects
from testing.recommenders import SHOP
from testing.served_names import MODEL_NAME, NAMES
from tests.support.deployments import release


@pytest.fixture
def settings(cloud_storage, tmp_path):
    return ReleaseSettings(
        store=tmp_path / "store",
        repository="gs://models/repository",
        options=ServingOptions(server="onnxruntime"),
        num_kept=2,
    )


@pytest.fixture
def repository(settings):
    return ModelRepository(open_objects(settings.repository), NAMES)


def test_versions_go_live_leave_and_come_back(settings, repository, make_candidate):
    for seed in (1, 2, 3):
        release(*make_candidate(settings.store, seed), settings=settings)
    assert repository.versions() == [2, 3]
    assert versions_of(repository.read_config()) == [3]
    assert rollback(settings, to_version=1, reason="drill").version == 1
    assert versions_of(repository.read_config()) == [1]
    assert repository.published.record(1).graph_sha256 == current(settings.store).sha256["graph"]
    repository.published.check(1)


@pytest.mark.parametrize("place", ["stored", "probed"])
def test_deployment_that_lost_its_lease_writes_nothing_more(
    settings, repository, make_candidate, place
):
    """The process was suspended until its lease had expired.

    Meanwhile, the new holder of the lease undid the unfinished release and repeated it under the
    next number. The new holder then released another model, whose version must stay live.
    """
    release(*make_candidate(settings.store, 1), settings=settings)
    seen = []

    def overtaken(name):
        if name == place and not seen:
            seen.append(name)
            repository.objects.delete(f"{MODEL_NAME}.lease")
            seen.append(release(*make_candidate(settings.store, 3), settings=settings).version)

    done = release(
        *make_candidate(settings.store, 2),
        settings=dataclasses.replace(settings, checkpoint=overtaken),
    )
    assert done.version == seen[1] - 1, "the new holder must have released this version"
    version = seen[1]
    last = read_entries(settings.store)[-1]
    assert (last.action, last.version, last.model_id) == ("release", version, "model-3")
    assert versions_of(repository.read_config()) == [version]
    assert Release.read(release_path(settings.store, version)).model_id == "model-3"
    assert graph_sha256(settings.store / "graphs" / str(version)) == last.sha256["graph"]


class Overtaken:
    """Server double that returns the scores of the released graph.

    While the double loads the live name, another deployment takes over.
    """

    def __init__(self, url, store, take_over):
        self.url, self.calls, self._store, self._take_over = url, [], store, take_over

    def check_live(self):
        pass

    def close(self):
        pass

    def load(self, name):
        self.calls.append(("load", name))
        if name == MODEL_NAME:
            self._take_over()
            self.calls.append("taken over")
            raise TemporaryError("the load was too slow")

    def unload(self, name):
        self.calls.append(("unload", name))

    def is_ready(self, name, version):
        return True

    def infer(self, name, dense, categorical, *, version=None):
        rows = GoldenRows(
            features=SHOP.features, dense=dense, categorical=categorical, expected=dense[:, 0]
        )
        return score(open_graph(graph_folder(self._store, version) / "model.onnx"), rows), version


def test_deployment_without_lease_leaves_configuration_to_new_holder(
    settings, repository, make_candidate
):
    release(*make_candidate(settings.store, 1), settings=settings)

    def take_over():
        repository.objects.delete(f"{MODEL_NAME}.lease")
        with reconciled(settings):
            pass

    server = Overtaken("triton:8001", settings.store, take_over)
    served = dataclasses.replace(settings, triton_urls=("triton:8001",), connect=lambda url: server)
    assert release(*make_candidate(settings.store, 2), settings=served).version == 3
    assert server.calls[-1] == "taken over", "the old holder must send no call after the new holder"
    assert versions_of(repository.read_config()) == [3]
    assert [(entry.action, entry.version) for entry in read_entries(settings.store)][-4:] == [
        ("intent", 2),
        ("withdrawn", 2),
        ("intent", 3),
        ("release", 3),
    ]
