"""Tests that Triton exports the metric names of alerts and dashboards."""

import re
import urllib.request

import numpy as np

from demo.triton import TritonServer, TritonSettings
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from tests.support import metric_names
from tests.support.triton import write_model


def test_recorded_names_and_labels_are_those_of_server(tmp_path):
    # The second model has no response cache. For a model with a response cache, the server exports
    # no request summary.
    models = {"click_model": True, "click_model_canary": False}
    for name, cached in models.items():
        write_model(tmp_path / "repository", name, options=ServingOptions(response_cache=cached))
    settings = TritonSettings(cache_bytes=1 << 20)
    with TritonServer(
        tmp_path / "repository", log=tmp_path / "triton.log", settings=settings
    ) as server:
        client = Triton(server.grpc_url)
        for name in models:
            client.infer(name, np.zeros((3, 2), np.float32), np.zeros((3, 8), np.int64))
        client.close()
        text = urllib.request.urlopen(server.metrics_url, timeout=60).read().decode()
    found: dict[str, frozenset[str]] = {}
    values: dict[str, set[str]] = {"reason": set(), "quantile": set()}
    # The test parses the text itself, because the Python client's parser appends `_total` to
    # counters.
    for line in filter(lambda line: line and not line.startswith("#"), text.splitlines()):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        name = re.split(r"[{ ]", line)[0]
        found[name] = found.get(name, frozenset()) | frozenset(labels)
        for label in values.keys() & labels.keys():
            values[label].add(labels[label])
    assert found == metric_names.TRITON
    assert values == {"reason": metric_names.FAILURE_REASONS, "quantile": metric_names.QUANTILES}
