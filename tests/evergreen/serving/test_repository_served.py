"""Tests of the real tritonserver with a model repository in a folder, and with one in a bucket.

The emulator from PyPI serves the bucket, behind `tests/support/cloud_storage.py`. Triton's Cloud
Storage client finds the emulator by an environment variable. The module calls the repository's
methods and the server's `load` directly, without the release protocol.
"""

import dataclasses
import re
import urllib.request

import numpy as np
import pytest

from demo.triton import TritonServer
from evergreen.registry.models import GRAPH_FILE
from evergreen.runtime.errors import PermanentError
from evergreen.serving.graph.export import export
from evergreen.serving.parity import GoldenRows, open_graph, score
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import WARMUP_BATCH, ServingOptions
from evergreen.serving.servers import Triton
from evergreen.storage.folder import FolderObjects
from testing.processes import wait_for
from testing.recommenders import SHOP
from testing.served_names import CANARY_NAME, CANDIDATE_NAME, MODEL_NAME, NAMES
from tests.support.errors import raises

OPTIONS = ServingOptions(instances=1, warmup_rows=2)


class BucketServer(TritonServer):
    """A server whose repository is `gs://models/triton`, with an empty local repository."""

    def _flags(self, *arguments):
        flags = [
            flag
            for flag in super()._flags(*arguments)
            if not flag.startswith("--model-repository=")
        ]
        return [*flags, "--model-repository=gs://models/triton", f"--load-model={MODEL_NAME}"]


# The case `folder` runs only in slow runs, because all other tests with a real server use a folder.
@pytest.fixture(params=[pytest.param("folder", marks=pytest.mark.slow), "bucket"])
def target(request, tmp_path):
    """The repository, and a function that starts another server over it."""
    if request.param == "folder":
        root = tmp_path / "model repository"
        return ModelRepository(FolderObjects(root), NAMES), lambda log: TritonServer(
            root, log=tmp_path / log
        )
    from evergreen.storage.bucket import BucketObjects

    host = request.getfixturevalue("cloud_storage").host
    variables = {"CLOUD_STORAGE_EMULATOR_ENDPOINT": host, "STORAGE_EMULATOR_HOST": host}
    return (
        ModelRepository(BucketObjects("gs://models/triton"), NAMES),
        lambda log: BucketServer(tmp_path / "nothing", log=tmp_path / log, variables=variables),
    )


@pytest.fixture
def make_version(make_candidate, raw_rows, tmp_path):
    """Exports a real graph, and computes the expected scores of its golden rows in this process."""

    def make(seed):
        model, _, _ = make_candidate(tmp_path / "store", seed)
        graph = tmp_path / f"graph-{seed}"
        export(model, graph)
        dense, categorical = raw_rows(16, seed)
        rows = GoldenRows(
            features=SHOP.features,
            dense=dense,
            categorical=categorical,
            expected=np.zeros(16, np.float32),
        )
        dataclasses.replace(rows, expected=score(open_graph(graph / GRAPH_FILE), rows)).save(
            graph / "golden.npz"
        )
        return graph

    return make


def connect(server):
    client = Triton(server.grpc_url)
    client.check_live()
    return client


def answers(client, golden, *, version=None, name=MODEL_NAME):
    scores, answered = client.infer(name, golden.dense, golden.categorical, version=version)
    assert np.abs(scores - golden.expected).max() < 1e-6
    return answered


def num_requests(server, version):
    text = urllib.request.urlopen(server.metrics_url, timeout=60).read().decode()
    return int(
        re.search(
            rf'nv_inference_request_success{{model="click_model",version="{version}"}} (\d+)', text
        )[1]
    )


def test_server_serves_only_what_configuration_names(target, make_version):
    repository, start = target
    first, second = make_version(1), make_version(2)
    rows = [GoldenRows.load(folder / "golden.npz") for folder in (first, second)]
    with repository.locked():
        repository.stage(1, first, OPTIONS)
        repository.publish(1)
        repository.write_config(repository.config_for(1, OPTIONS))
        with start("one.log") as server:
            client = connect(server)
            # On every instance, the warm-up ran each golden row once, and then a batch of golden
            # rows.
            wait_for(lambda: num_requests(server, 1) == OPTIONS.warmup_rows + WARMUP_BATCH)
            assert answers(client, rows[0]) == 1

            repository.stage(2, second, OPTIONS)
            client.load(CANDIDATE_NAME)
            assert answers(client, rows[1], name=CANDIDATE_NAME) == 2
            client.unload(CANDIDATE_NAME)
            repository.publish(2)
            # A server that starts during the release gets the version that was published last.
            with start("two.log") as newcomer:
                late = connect(newcomer)
                assert answers(late, rows[0]) == 1
                with raises(PermanentError, "2"):
                    late.infer(MODEL_NAME, rows[0].dense, rows[0].categorical, version=2)
                late.close()

            repository.write_config(repository.config_for(2, OPTIONS))
            client.load(MODEL_NAME)
            assert answers(client, rows[1]) == 2
            repository.place_canary(1, OPTIONS)
            client.load(CANARY_NAME)
            assert answers(client, rows[0], name=CANARY_NAME) == 1
            client.close()
