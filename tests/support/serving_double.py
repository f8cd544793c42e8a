"""Tritons in this process, for tests that kill deployments at every step: what they serve is what the repository says.

Honest where a deployment could be fooled: a load reads the configuration and the graph that are on disk then, scores
are ONNX Runtime's on that graph, requests without a version get the highest one loaded, and what fails changes nothing.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from components.contracts.criteo import CRITEO
from components.contracts.serving import versions_of
from components.deployment.canary.evidence import COUNTERS
from components.deployment.graph.parity import GoldenRows, open_graph, score
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.store.models import GRAPH_FILE


class ServerDouble:
    """One server over the repository folder."""

    def __init__(self, url, repository):
        self.url, self.repository = url, repository
        self.models: dict[str, dict[int, object]] = {}
        self.is_up = True
        self.counted: dict[str, Counter] = {name: Counter() for name in COUNTERS}

    def _answering(self):
        if not self.is_up:
            raise TemporaryError(f"triton {self.url}: connection refused")

    def close(self):
        pass

    def check_live(self):
        self._answering()

    def load(self, name):
        self._answering()
        config = self.repository / name / "config.pbtxt"
        if not config.exists():
            raise PermanentError(f"triton {self.url}: load of {name} failed: no config")
        versions = versions_of(config.read_text())
        try:
            self.models[name] = {v: open_graph(self.repository / name / str(v) / GRAPH_FILE) for v in versions}
        except ContractError as error:
            raise PermanentError(f"triton {self.url}: failed to load {name}: {error}") from error

    def unload(self, name):
        self._answering()
        self.models.pop(name, None)

    def is_ready(self, name, version):
        self._answering()
        return version in self.models.get(name, {})

    def infer(self, name, dense, categorical, *, version=None):
        self._answering()
        loaded = self.models.get(name, {})
        version = max(loaded, default=None) if version is None else version
        if version not in loaded:
            raise PermanentError(f"triton {self.url}: NOT_FOUND {name} {version}")
        rows = GoldenRows(
            features=CRITEO, dense=dense, categorical=categorical, expected=np.zeros(len(dense), np.float32)
        )
        self.count(name, version, success=1, infer_us=1000)
        return score(loaded[version], rows), version

    def count(self, name, version, **counters):
        for counter, number in counters.items():
            self.counted[counter][name, version] += number

    def restart(self):
        """As a pod told to load the live model alone: what that configures is loaded, everything counts from zero."""
        self.is_up, self.models = True, {}
        self.counted = {name: Counter() for name in COUNTERS}
        for config in self.repository.glob("click_model/config.pbtxt"):
            self.load(config.parent.name)

    def metrics(self):
        """Triton's Prometheus text."""
        lines = ["# HELP nv_inference_request_success Number of successful inference requests"]
        for counter, name in COUNTERS.items():
            for (model, version), value in self.counted[counter].items():
                more = 'reason="BACKEND",' if counter == "failure" else ""
                lines.append(f'{name}{{model="{model}",{more}version="{version}"}} {value:g}')
        return "\n".join(lines) + "\n"


class AlteredDouble:
    """A server of which the test changes some methods; each gets the server itself first."""

    def __init__(self, real, **methods):
        self._real = real
        for name, method in methods.items():
            setattr(self, name, lambda *a, method=method, **k: method(real, *a, **k))

    def __getattr__(self, name):
        return getattr(self._real, name)
