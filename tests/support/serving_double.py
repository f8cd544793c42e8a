"""Triton doubles for tests that kill canaries at every step. They count requests as Triton does."""

from collections import Counter

from controller.canary.evidence import COUNTERS
from tests.support.file_triton import FileTriton


class ServerDouble(FileTriton):
    """A server over the repository folder that counts its requests."""

    def __init__(self, url, *, repository, state):
        super().__init__(url, repository=repository, state=state)
        self.counted: dict[str, Counter] = {name: Counter() for name in COUNTERS}

    def infer(self, name, dense, categorical, *, version=None):
        scores, answered = super().infer(name, dense, categorical, version=version)
        self.count(name, answered, success=1, infer_us=1000)
        return scores, answered

    def count(self, name, version, **counters):
        for counter, number in counters.items():
            self.counted[counter][name, version] += number

    def start(self):
        """Start like a new pod, with counters at zero."""
        self.counted = {name: Counter() for name in COUNTERS}
        return super().start()

    def metrics(self):
        """Return Triton's Prometheus text."""
        lines = ["# HELP nv_inference_request_success Number of successful inference requests"]
        for counter, name in COUNTERS.items():
            for (model, version), value in self.counted[counter].items():
                more = 'reason="BACKEND",' if counter == "failure" else ""
                lines.append(f'{name}{{model="{model}",{more}version="{version}"}} {value:g}')
        return "\n".join(lines) + "\n"


class AlteredDouble:
    """A server with some methods replaced by the test.

    Each replacement gets the server as its first argument.
    """

    def __init__(self, real, **methods):
        self._real = real
        for name, method in methods.items():
            setattr(self, name, lambda *a, method=method, **k: method(real, *a, **k))

    def __getattr__(self, name):
        return getattr(self._real, name)
