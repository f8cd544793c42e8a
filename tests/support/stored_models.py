"""Fixtures of a model registry with real files: toy models and reference scores.

`tests.support.toy_models` defines the toy models.
"""

import numpy as np
import pytest

from evergreen.contracts.manifests import Model, ModelQuality, RawDataset
from evergreen.registry.models import model_folder
from evergreen.runtime.durable import sha256_tree
from testing.recommenders import SHOP, arrays_of
from testing.releases import passing_verdict, store_model
from tests.support.toy_models import toy_model, toy_workflow


@pytest.fixture(scope="session")
def make_parts():
    """Makes a seeded workflow with some empty vocabularies, and a toy model that fits it."""

    def make(seed=0, vocabularies=None, **shape):
        workflow = toy_workflow(seed, vocabularies)
        return workflow, toy_model(workflow, seed, **shape)

    return make


@pytest.fixture
def raw_rows(raw_table):
    """Makes `n` raw rows as served tensors: dense [n, d] and categorical [n, positions]."""
    return lambda n=64, seed=0: arrays_of(raw_table(n, seed=seed))


@pytest.fixture
def make_candidate(tmp_path, make_parts, raw_table, raw_rows):
    """Makes a stored model with its RawDataset and Verdict.

    The verdict's scores are computed by the reference formula and not by the graph.

    `parts` are the model's workflow and its toy network, which are made by default. `quality` is
    the quality that the gate measured.
    """

    def make(store, seed, *, n=60, accepted=True, parts=None, quality=None):
        import pyarrow.parquet as pq

        model_id = f"model-{seed}"
        workflow, toy = parts or make_parts(seed)
        folder = model_folder(store, model_id)
        toy.save(folder / Model.WEIGHTS)
        workflow.save(folder / Model.WORKFLOW)
        time = "2026-01-01T00:00:00+00:00"
        model = store_model(
            store,
            model_id,
            config=toy.document,
            slot_sizes=workflow.slot_sizes,
            seed=seed,
            num_train_rows=n,
            progressive={"auc": None, "log_loss": None},
            last_event_time=time,
            watermark=time,
            raw_digest="digest",
            created_at=time,
            sha256={part: sha256_tree(folder / part) for part in (Model.WEIGHTS, Model.WORKFLOW)},
        )
        holdout = tmp_path / f"hold out {seed}"
        holdout.mkdir()
        table = raw_table(n, seed=seed)
        pq.write_table(table.slice(0, n // 2), holdout / "part-0.parquet", row_group_size=40)
        pq.write_table(table.slice(n // 2), holdout / "part-1.parquet")
        raw = RawDataset(
            source_uri="file:///lake",
            window_start=None,
            window_end=None,
            first_event_time="",
            last_event_time="",
            watermark="",
            train_uri=holdout.as_uri(),
            holdout_uri=holdout.as_uri(),
            num_train_rows=n,
            num_holdout_rows=n,
            num_malformed=0,
            malformed_uri=None,
            num_duplicates=0,
            digest="digest",
            recommender=SHOP,
        )
        scores = tmp_path / f"scores-{seed}.npz"
        np.savez(scores, candidate=toy.scores(workflow, *raw_rows(n, seed)).astype(np.float32))
        verdict = passing_verdict(
            model_id,
            scores,
            num_rows=n,
            decision="pass" if accepted else "fail",
            accepted=accepted,
            champion_reference="none",
            candidate=quality or ModelQuality(),
        )
        return model, verdict, raw

    return make
