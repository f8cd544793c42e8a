"""The service times' benchmark against a real Triton whose model takes a known time, and the file that it writes."""

from __future__ import annotations

import pytest

from benchmarks import service_times
from k8s.scaling.service_times import read_service_times
from tests.support.served_names import MODEL_NAME
from tests.support.sleeping_triton import sleeping_triton

pytestmark = pytest.mark.e2e

SLEEP = 0.1


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with sleeping_triton(tmp_path_factory.mktemp("server") / "it", {MODEL_NAME: SLEEP}) as (server, client):
        yield server.grpc_url, client


def test_file_has_the_seconds_that_the_model_takes_and_the_simulator_reads_it(server, tmp_path, monkeypatch):
    monkeypatch.setattr(service_times, "ROWS", (1, 8))
    out = tmp_path / "times.json"
    line = ["--server", server[0], "--describe", "a model that sleeps", "--seconds", "0.5", "--output", str(out)]
    assert service_times.main(line) == 0
    times = read_service_times(out)
    assert times.rows == (1, 8)
    # Never less than its sleep; each request was measured alone, so none holds two sleeps.
    assert all(SLEEP <= each < 2 * SLEEP for each in times.medians)
    assert times.quantiles[0][1] * min(times.medians) > 0.9 * SLEEP
    assert times.what.startswith("a model that sleeps; measured 20")
