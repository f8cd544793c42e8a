"""The release protocol over a bucket: published, gone back from, put right after a failure, refused while locked."""

from __future__ import annotations

import dataclasses

import pytest

from components.contracts.manifests import Release
from components.contracts.serving import CANDIDATE_NAME, MODEL_NAME
from components.deployment.graph.files import graph_sha256
from components.deployment.release import release
from components.deployment.release_settings import ReleaseSettings
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.repository.triton_config import versions_of
from components.deployment.rollback import rollback
from components.deployment.servers import Patience
from components.runtime.errors import TemporaryError
from components.storage.locations import open_objects
from components.store.models import release_path
from components.store.promotion_journal import current, read_entries

pytestmark = pytest.mark.e2e


@pytest.fixture
def settings(cloud_storage, tmp_path):
    return ReleaseSettings(
        store=tmp_path / "store", repository="gs://models/repository", server="onnxruntime", num_kept=2
    )


@pytest.fixture
def repository(settings):
    return ModelRepository(open_objects(settings.repository))


def test_versions_go_live_leave_and_come_back(settings, repository, make_candidate):
    for seed in (1, 2, 3):
        release(*make_candidate(settings.store, seed), settings)
    assert repository.versions() == [2, 3]
    assert versions_of(repository.read_config()) == [3]
    assert rollback(settings.site, to_version=1, reason="drill").version == 1
    assert versions_of(repository.read_config()) == [1]
    assert repository.graph_sha256(1) == current(settings.store).sha256["graph"]


def test_an_interrupted_release_is_put_right_by_the_next(settings, repository, make_candidate):
    release(*make_candidate(settings.store, 1), settings)

    class Killed(BaseException):
        """Ends the process before any of its clean-up could run."""

    def die(name):
        if name == "config written":
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        # Nothing of the clean-up happens in a process that is gone.
        patch.setattr("components.deployment.switch._restore", lambda *_: [])
        patch.setattr("components.deployment.make_live._withdraw_files", lambda *_: None)
        patch.setattr("components.deployment.site.withdraw", lambda *_: None)
        with pytest.raises(Killed):
            release(*make_candidate(settings.store, 2), dataclasses.replace(settings, checkpoint=die))
    assert versions_of(repository.read_config()) == [2]
    assert read_entries(settings.store)[-1].action == "intent"
    done = release(*make_candidate(settings.store, 3), settings)
    assert [entry.action for entry in read_entries(settings.store)][-3:] == ["withdrawn", "intent", "release"]
    assert versions_of(repository.read_config()) == [done.version] == [3]
    assert repository.taken_numbers() == [1, 3]
    assert not [each for each in repository.objects.list(CANDIDATE_NAME)]


def test_a_second_deployment_at_the_same_time_is_told_so(settings, repository, make_candidate):
    candidate = make_candidate(settings.store, 1)
    hasty = dataclasses.replace(settings, patience=Patience(lock_seconds=0))
    with repository.locked(), pytest.raises(TemporaryError, match="another deployment is at work"):
        release(*candidate, hasty)
    assert release(*candidate, settings).version == 1
    assert repository.objects.read(f"{MODEL_NAME}/config.pbtxt") is not None


@pytest.mark.parametrize("place", ["kept", "probed"])
def test_a_deployment_that_lost_its_lease_writes_nothing_more(settings, repository, make_candidate, place):
    """It slept while its lease ended; another one went back, released, and has the last word."""
    release(*make_candidate(settings.store, 1), settings)
    seen = []

    def overtaken(name):
        if name == place and not seen:
            seen.append(name)
            repository.objects.delete("deployment.lease")
            seen.append(release(*make_candidate(settings.store, 3), settings).version)

    with pytest.raises(TemporaryError, match="no longer holds"):
        release(*make_candidate(settings.store, 2), dataclasses.replace(settings, checkpoint=overtaken))
    version = seen[1]
    last = read_entries(settings.store)[-1]
    assert (last.action, last.version, last.model_id) == ("release", version, "model-3")
    assert versions_of(repository.read_config()) == [version]
    assert Release.read(release_path(settings.store, version)).model_id == "model-3"
    assert graph_sha256(settings.store / "graphs" / str(version)) == last.sha256["graph"]
