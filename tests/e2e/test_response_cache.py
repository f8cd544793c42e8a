"""Tests of the real server's response cache: it never returns another version's answer."""

import dataclasses

import numpy as np
import pytest

from controller.canary.evidence import counted, fetch
from controller.rollback import rollback
from demo.triton import TritonServer, TritonSettings
from evergreen.registry.traffic_plan import Arm
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from testing.processes import wait_for
from testing.served_names import MODEL_NAME


@pytest.fixture
def triton(tmp_path):
    settings = TritonSettings(cache_bytes=1 << 20)
    with TritonServer(
        tmp_path / "repository", log=tmp_path / "triton.log", settings=settings
    ) as server:
        yield server


@pytest.fixture
def settings(settings):
    return dataclasses.replace(settings, options=ServingOptions(instances=1, response_cache=True))


@pytest.fixture
def client(triton):
    client = Triton(triton.grpc_url)
    yield client
    client.close()


def hits(server, version):
    """Return the server's count of cache hits of `version`, as a canary's step reads it."""
    address = server.metrics_url.removeprefix("http://").removesuffix("/metrics")

    def seen():
        return counted(fetch(address), {"it": Arm(model_name=MODEL_NAME, version=version)})["it"]

    def agree(counts):
        return counts["cache_hits"] <= counts["success"]

    # Cached answers count as successful requests. The server counts an answer after it has sent it.
    wait_for(lambda: agree(seen()))
    return seen()["cache_hits"]


def test_no_answer_of_previous_version_after_release_or_rollback(
    deploy, client, triton, settings, raw_rows, expected
):
    rows = raw_rows(8)

    def send_twice(version, seed):
        before = hits(triton, version)
        for _ in range(2):
            scores, answered = client.infer(MODEL_NAME, *rows)
            assert answered == version
            np.testing.assert_allclose(scores, expected(seed, rows), atol=1e-5)
        # The second answer came from the cache, and also has the right version.
        wait_for(lambda: hits(triton, version) > before)

    deploy(1)
    send_twice(1, 1)
    deploy(2)
    send_twice(2, 2)
    rollback(settings, reason="drill")
    send_twice(1, 1)
    deploy(3)
    send_twice(3, 3)
