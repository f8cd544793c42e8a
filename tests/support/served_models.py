"""Real and file-backed servers with a small model registry, for the tests of deployment."""

import dataclasses
import shutil

import numpy as np
import pytest

from controller.release import ReleaseSettings
from demo.triton import TritonServer, TritonSettings
from evergreen.registry.models import GRAPH_FILE
from evergreen.serving.graph.export import export
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from evergreen.storage import uris
from evergreen.storage.bucket import BucketObjects
from evergreen.storage.folder import FolderObjects
from testing.served_names import MODEL_NAME, NAMES
from tests.support.deployments import release
from tests.support.file_deployment import FileDeployment
from tests.support.model_repository import OPTIONS, small_version, with_versions
from tests.support.stored_models import make_candidate, make_parts, raw_rows  # noqa: F401  fixtures

# ruff: noqa: F811  a fixture is imported under the name of the argument


@pytest.fixture
def with_scores():
    """Applies `change(array) -> array` to a verdict's scores, and returns the new verdict."""

    def make(verdict, change, tmp_path):
        path = tmp_path / "other-scores.npz"
        np.savez(
            path, candidate=change(np.load(uris.local_path(verdict.scores_uri))["candidate"].copy())
        )
        return dataclasses.replace(verdict, scores_uri=path.as_uri())

    return make


@pytest.fixture
def exported(tmp_path):
    """Export a stored model, and return the path of its graph."""

    def make(model, name="graph"):
        export(model, tmp_path / name)
        return tmp_path / name / GRAPH_FILE

    return make


@pytest.fixture(scope="session")
def triton(tmp_path_factory):
    """Real tritonserver with one repository. Each test starts with an empty repository."""
    root = tmp_path_factory.mktemp("triton with space")
    # After a stub was killed, Triton 2.51 always waits for its full stop timeout.
    settings = TritonSettings(stop_seconds=0.2)
    (root / "home").mkdir()
    variables = {"HOME": str(root / "home")}
    with TritonServer(
        root / "repository", log=root / "triton.log", settings=settings, variables=variables
    ) as server:
        yield server


@pytest.fixture
def client(triton):
    """A connection to `triton`. At the end, no model is loaded and the repository is empty."""
    client = Triton(triton.grpc_url)
    yield client
    client.unload(MODEL_NAME)
    client.close()
    shutil.rmtree(triton.repository)
    triton.repository.mkdir()


@pytest.fixture
def settings(triton, client, tmp_path):
    """Settings of a release to `triton` from a registry of this test."""
    return ReleaseSettings(
        store=tmp_path / "store",
        repository=triton.repository.as_uri(),
        triton_urls=(triton.grpc_url,),
        # Use one instance, because two instances take twice as long to start. Most tests send no
        # parallel requests.
        options=ServingOptions(instances=1),
        trigger_id="drift-7",
        who="run-7",
    )


@pytest.fixture
def unserved(tmp_path):
    """Settings of a release without servers."""
    return ReleaseSettings(
        store=tmp_path / "a store", repository=(tmp_path / "repository").as_uri()
    )


@pytest.fixture
def repository(settings):
    """Model repository named in `settings`."""
    return ModelRepository(uris.open_objects(settings.repository), NAMES)


@pytest.fixture
def deploy(settings, make_candidate):
    """Releases the model that is made with `seed`. Keyword arguments change the settings."""
    return lambda seed, **changes: release(
        *make_candidate(settings.store, seed), settings=dataclasses.replace(settings, **changes)
    )


@pytest.fixture
def deployment(tmp_path, make_candidate):
    """See `file_deployment`."""
    return FileDeployment(tmp_path, make_candidate)


@pytest.fixture(params=["folder", "bucket"])
def open_objects(request, tmp_path):
    """Opens a model repository's storage.

    Each call returns a separate handle on the same folder or bucket.
    """
    if request.param == "folder":
        return lambda: FolderObjects(tmp_path / "model repository")
    return request.getfixturevalue("open_bucket")


@pytest.fixture
def open_bucket(cloud_storage):
    """Opens a bucket as a model repository's storage, with short timeouts."""
    return lambda: BucketObjects(
        "gs://models/triton", retry_seconds=20.0, first_delay_seconds=0.001
    )


@pytest.fixture
def make_version(tmp_path):
    """Creates a folder with a graph and golden rows. The content depends on the number.

    The graph's bytes are meaningless.
    """
    return lambda number, **more: small_version(tmp_path, number, **more)


@pytest.fixture
def put_live(make_version):
    """Stages, publishes and configures a small version without servers.

    The configuration also contains the versions in `beside`.
    """

    def do(repository, number, *, beside=(), options=OPTIONS):
        repository.stage(number, make_version(number), options)
        repository.publish(number)
        repository.write_config(
            with_versions(repository.config_for(number, options), [*beside, number])
        )

    return do
