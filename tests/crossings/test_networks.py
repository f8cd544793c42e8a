"""Tests of every other network through all six steps and a real server."""

import shutil
from datetime import date

import numpy as np
import pytest

from demo.simulation.simulator import Simulator, write_lake
from demo.triton import TritonServer
from evergreen.config.model import NETWORKS
from evergreen.serving.servers import Triton
from evergreen.statistics.metrics import roc_auc
from evergreen.storage.uris import local_path
from tests.support.served_names import MODEL_NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("network", sorted(set(NETWORKS) - {"dcn"}))
def test_network_is_trained_evaluated_released_served_and_continued(
    network, tmp_path, chain_of, held_out_rows
):
    chain = chain_of(model={"kind": network, "embedding_dim": 4, "tower": [16, 8]})
    world = Simulator.create(seed=3)
    write_lake(world, str(tmp_path / "lake"), rows=3000, days=3, last_day=date(2026, 1, 3), seed=3)
    first = chain.turn("round-1")
    write_lake(world, str(tmp_path / "lake"), rows=1500, days=1, last_day=date(2026, 1, 4), seed=4)
    second = chain.turn("round-2", validation_report=first.paths["validation"])
    assert second.training.parent_model_id == first.training.model_id
    assert second.training.config["network"] == network
    assert second.deployment.parity_max_abs_diff <= 1e-5
    dense, categorical, labels = held_out_rows(second.extraction)
    with np.load(local_path(second.evaluation.scores_uri)) as stored:
        expected = stored["candidate"]
    assert roc_auc(labels, expected) > 0.55
    repository = tmp_path / "served"
    shutil.copytree(tmp_path / "repository", repository)
    with TritonServer(repository, log=tmp_path / "triton.log") as server:
        client = Triton(server.grpc_url)
        client.load(MODEL_NAME)
        served, version = client.infer(MODEL_NAME, dense, categorical)
        client.close()
    assert version == second.deployment.version
    np.testing.assert_allclose(served, expected, rtol=0, atol=1e-5)
