"""A small model store with real files, and a second opinion on what its models say: float64 NumPy, row by row."""

from __future__ import annotations

import dataclasses
import math
import shutil

import numpy as np
import pytest

from components.contracts.criteo import CATEGORICAL, DENSE, MISSING_CATEGORY
from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.manifests import Model, ModelQuality, RawDataset, Verdict
from components.contracts.model_files import ModelWeights, write_model
from components.contracts.workflow import TOMBSTONE, FeatureWorkflow
from components.runtime.durable import sha256_tree
from components.storage.folder import FolderObjects
from components.store.models import model_folder
from tests.support.model_repository import OPTIONS, small_version, with_versions

CONFIG = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8))


def _known(workflow):
    """Row in its table of every key that each vocabulary holds."""
    return [{int(k): 3 + i for i, k in enumerate(vocabulary) if k != TOMBSTONE} for vocabulary in workflow.vocabularies]


def _encode(workflow, known, dense_row, categorical_row):
    values = []
    for value, mean, std in zip(dense_row, workflow.means, workflow.stds):
        value = workflow.fill if math.isnan(value) else float(value)
        values.append((math.log(1.0 + max(value, workflow.clip_min)) - float(mean)) / float(std))
    rows, offset = [], 0
    for key, vocabulary, rows_of_keys in zip(categorical_row, workflow.vocabularies, known):
        rows.append(offset + (1 if key == MISSING_CATEGORY else rows_of_keys.get(int(key), 2)))
        offset += 3 + len(vocabulary)
    return values, rows


@pytest.fixture(scope="session")
def reference_scores():
    """Probabilities [n] as the papers and the contracts' docstrings define them, without the code under test."""

    def forward(workflow, weights, config, dense, categorical):
        p = {name: value.astype(np.float64) for name, value in weights.dense.items()}
        known, answers = _known(workflow), []
        for dense_row, categorical_row in zip(dense, categorical):
            values, rows = _encode(workflow, known, dense_row, categorical_row)
            x0 = np.concatenate([weights.embeddings[rows].astype(np.float64).ravel(), values])
            cross = x0
            for i in range(config.num_cross_layers):
                bias = p[f"cross.{i}.bias"]
                if config.projection_dim:
                    cross = x0 * (cross @ p[f"cross.{i}.u"] @ p[f"cross.{i}.v"] + bias) + cross
                else:
                    cross = x0 * (cross @ p[f"cross.{i}.weight"]) + cross + bias
            deep = x0
            for i in range(len(config.tower)):
                deep = np.maximum(deep @ p[f"tower.{i}.weight"] + p[f"tower.{i}.bias"], 0)
            logit = np.concatenate([deep, cross]) @ p["final.weight"] + p["final.bias"]
            answers.append(1 / (1 + np.exp(np.minimum(-logit[0], 700.0))))
        return np.array(answers)

    return forward


@pytest.fixture(scope="session")
def make_parts():
    """A workflow and weights that fit it; seeded; some vocabularies empty."""

    def make(seed=0, config=CONFIG, vocabularies=None):
        random = np.random.default_rng(seed)
        if vocabularies is None:
            # The cardinalities and keys of the shared `raw_table`; every fifth column never saw a frequent category.
            vocabularies = []
            for i in range(26):
                keys = np.unique(np.random.default_rng(1000 + i).integers(0, 2**32 - 1, 3 + 7 * i))
                keep = random.permutation(keys)[: 0 if i % 5 == 4 else max(1, len(keys) - 2)]
                vocabularies.append(keep.astype(np.int64))
        workflow = FeatureWorkflow(
            vocabularies=tuple(vocabularies),
            fill=0.0,
            clip_min=0.0,
            means=random.normal(1.5, 0.5, 13).astype(np.float32),
            stds=random.uniform(0.5, 2.0, 13).astype(np.float32),
            frequency_threshold=2,
        )
        weights = ModelWeights(
            dense={n: random.normal(0, 0.15, shape).astype(np.float32) for n, shape in dense_layout(config)},
            embeddings=random.normal(0, 0.3, (sum(workflow.slot_sizes), config.embedding_dim)).astype(np.float32),
        )
        return workflow, weights

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
def make_candidate(tmp_path, make_parts, raw_table, raw_rows, reference_scores):
    """A stored model with its RawDataset and Verdict; the scores are the second opinion's, not the graph's."""

    def make(store, seed, *, n=60, accepted=True):
        import pyarrow.parquet as pq

        model_id = f"model-{seed}"
        workflow, weights = make_parts(seed)
        folder = model_folder(store, model_id)
        write_model(folder / Model.WEIGHTS, CONFIG, weights)
        workflow.save(folder / Model.WORKFLOW)
        model = Model(
            model_id=model_id,
            uri=folder.as_uri(),
            backend="pytorch",
            config=CONFIG.as_document(),
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
        np.savez(scores, candidate=reference_scores(workflow, weights, CONFIG, *raw_rows(n, seed)).astype(np.float32))
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
