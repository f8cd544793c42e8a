"""A small model store with real files, of toy models (`tests.support.toy_models`) with their second opinion."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from components.contracts.criteo import CATEGORICAL, DENSE, MISSING_CATEGORY
from components.contracts.manifests import Model, ModelQuality, RawDataset, Verdict
from components.runtime.durable import sha256_tree
from components.storage.folder import FolderObjects
from components.store.models import model_folder
from tests.support.model_repository import OPTIONS, small_version, with_versions
from tests.support.toy_models import toy_model, toy_workflow


@pytest.fixture(scope="session")
def make_parts():
    """A workflow and a toy model that fits it; seeded; some vocabularies empty."""

    def make(seed=0, vocabularies=None, **shape):
        workflow = toy_workflow(seed, vocabularies)
        return workflow, toy_model(workflow, seed, **shape)

    return make


@pytest.fixture
def raw_rows(raw_table):
    """`n` raw rows as served tensors: dense [n, 13] and categorical [n, 26]."""

    def make(n=64, seed=0):
        table = raw_table(n, seed=seed)
        dense = np.stack([table[c].to_numpy().astype(np.float32) for c in DENSE], axis=1)
        keys = np.stack([table[c].fill_null(MISSING_CATEGORY).to_numpy() for c in CATEGORICAL], axis=1)
        return dense, keys.astype(np.int64)

    return make


@pytest.fixture
def make_candidate(tmp_path, make_parts, raw_table, raw_rows):
    """A stored model with its RawDataset and Verdict; the scores are the second opinion's, not the graph's."""

    def make(store, seed, *, n=60, accepted=True):
        import pyarrow.parquet as pq

        model_id = f"model-{seed}"
        workflow, toy = make_parts(seed)
        folder = model_folder(store, model_id)
        toy.save(folder / Model.WEIGHTS)
        workflow.save(folder / Model.WORKFLOW)
        model = Model(
            model_id=model_id,
            uri=folder.as_uri(),
            backend="pytorch",
            config=toy.document,
            slot_sizes=workflow.slot_sizes,
            parent_model_id=None,
            seed=seed,
            num_train_rows=n,
            optimizer_step=1,
            early_stopping={"auc": None, "log_loss": None},
            last_event_time="2026-01-01T00:00:00+00:00",
            raw_digest="digest",
            sha256={part: sha256_tree(folder / part) for part in (Model.WEIGHTS, Model.WORKFLOW)},
            created_at="2026-01-01T00:00:00+00:00",
        )
        model.write(folder / Model.MANIFEST)
        holdout = tmp_path / f"hold out {seed}"
        holdout.mkdir()
        table = raw_table(n, seed=seed)
        pq.write_table(table.slice(0, n // 2), holdout / "part-0.parquet", row_group_size=40)
        pq.write_table(table.slice(n // 2), holdout / "part-1.parquet")
        raw = RawDataset(
            source_uri="file:///lake", window_start=None, window_end=None, first_event_time="", last_event_time="",
            train_uri=holdout.as_uri(), holdout_uri=holdout.as_uri(), num_train_rows=n, num_holdout_rows=n,
            num_malformed=0, malformed_uri=None, num_duplicates=0, digest="digest",
        )  # fmt: skip
        scores = tmp_path / f"scores-{seed}.npz"
        np.savez(scores, candidate=toy.scores(workflow, *raw_rows(n, seed)).astype(np.float32))
        verdict = Verdict(
            candidate_model_id=model_id, champion_model_id=None, decision="pass" if accepted else "fail",
            accepted=accepted, reason="auc is high enough", num_rows=n, num_clicks=1, candidate=ModelQuality(),
            champion=None, difference=None, rows_needed=None, scores_uri=scores.as_uri(), champion_reference="none",
        )  # fmt: skip
        return model, verdict, raw

    return make


@pytest.fixture
def with_scores():
    """The verdict with its scores changed by `change(array) -> array`."""

    def make(verdict, change, tmp_path):
        from components.storage.uris import local_path

        path = tmp_path / "other-scores.npz"
        np.savez(path, candidate=change(np.load(local_path(verdict.scores_uri))["candidate"].copy()))
        return dataclasses.replace(verdict, scores_uri=path.as_uri())

    return make


@pytest.fixture
def exported(tmp_path):
    """Exports a stored model; the graph's file."""
    from components.deployment.graph.export import export
    from components.deployment.graph.files import GRAPH_FILE

    def make(model, name="graph"):
        export(model, tmp_path / name)
        return tmp_path / name / GRAPH_FILE

    return make


@pytest.fixture(scope="session")
def triton(tmp_path_factory):
    """A real tritonserver over one repository, for all tests that start from nothing being served."""
    from pipelines.local.triton import TritonServer, TritonSettings

    root = tmp_path_factory.mktemp("triton with space")
    # After a stub was killed, this Triton uses up whatever time it is given to stop.
    settings = TritonSettings(stop_seconds=3)
    with TritonServer(root / "repository", log=root / "triton.log", settings=settings) as server:
        yield server


@pytest.fixture
def client(triton):
    """A connection to `triton`; afterwards nothing is served and the repository is empty."""
    from components.contracts.serving import MODEL_NAME
    from components.deployment.triton_client import Triton

    client = Triton(triton.grpc_url)
    yield client
    client.unload(MODEL_NAME)
    client.close()
    shutil.rmtree(triton.repository)
    triton.repository.mkdir()


@pytest.fixture
def settings(triton, client, tmp_path):
    """A release to `triton` from a store of this test."""
    from components.deployment.release import ReleaseSettings
    from components.deployment.repository.triton_config import ServingOptions

    return ReleaseSettings(
        store=tmp_path / "store",
        repository=triton.repository.as_uri(),
        triton_urls=(triton.grpc_url,),
        # One starts in half the time of two, and these tests ask for nothing at once.
        options=ServingOptions(instances=1),
        trigger_id="drift-7",
        who="run-7",
    )


@pytest.fixture
def repository(settings):
    """The repository that `settings` names."""
    from components.deployment.repository.model_repository import ModelRepository
    from components.storage.locations import open_objects

    return ModelRepository(open_objects(settings.repository))


@pytest.fixture
def deploy(settings, make_candidate):
    """Releases the model of `seed`; keyword arguments change the settings."""
    from components.deployment.release import release

    return lambda seed, **changes: release(
        *make_candidate(settings.store, seed), dataclasses.replace(settings, **changes)
    )


@pytest.fixture
def world(tmp_path, make_candidate):
    """See `file_world`."""
    from tests.support.file_world import World

    return World(tmp_path, make_candidate)


@pytest.fixture(params=["folder", "bucket"])
def open_objects(request, tmp_path):
    """Opens a model repository's storage; every call is one more handle on the same root."""
    if request.param == "folder":
        return lambda: FolderObjects(tmp_path / "model repository")
    return request.getfixturevalue("open_bucket")


@pytest.fixture
def open_bucket(cloud_storage):
    """Opens a bucket's storage for a model repository, with little patience."""
    from components.storage.bucket import BucketObjects

    return lambda: BucketObjects("gs://models/triton", retry_seconds=20.0, first_delay_seconds=0.001)


@pytest.fixture
def make_version(tmp_path):
    """A folder with a graph and golden rows that differ by number; the graph's bytes need no meaning."""
    return lambda number, **more: small_version(tmp_path, number, **more)


@pytest.fixture
def put_live(make_version):
    """Stages and publishes a small version, and names it with those in `beside`: a release without servers."""

    def do(repository, number, *, beside=(), options=OPTIONS):
        repository.stage(number, make_version(number), options)
        repository.publish(number)
        repository.write_config(with_versions(repository.config_for(number, options), [*beside, number]))

    return do
