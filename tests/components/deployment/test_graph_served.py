"""A graph whose tables lie beside it, released to the real tritonserver."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, MODEL_NAME
from components.deployment import release as release_module
from components.deployment.graph.export import GraphLimits, export
from components.deployment.graph.files import DATA_FILE, graph_sha256
from components.deployment.graph.parity import open_graph
from components.storage.uris import local_path

pytestmark = pytest.mark.e2e


def test_tables_beside_the_graph_are_released_with_it_and_the_server_answers_as_the_session_here(
    deploy, client, repository, raw_rows, monkeypatch
):
    limits = GraphLimits(inline_bytes=0, label_encoder_entries=0)
    monkeypatch.setattr(release_module, "export", functools.partial(export, limits=limits))
    done = deploy(1)
    kept, served = local_path(done.graph_uri), repository.objects.local(f"click_model/{done.version}")
    assert (served / DATA_FILE).stat().st_size == (kept.parent / DATA_FILE).stat().st_size
    assert graph_sha256(served) == graph_sha256(kept.parent) == done.sha256["graph"]
    dense, categorical = raw_rows(700, 3)
    scores, version = client.infer(MODEL_NAME, dense, categorical)
    expected = open_graph(kept).run(None, {DENSE_INPUT.name: dense, CATEGORICAL_INPUT.name: categorical})[0]
    assert version == done.version
    np.testing.assert_array_equal(scores.view(np.int32), expected.ravel().view(np.int32))
