"""A model repository to put versions into by hand: small ones, whose bytes need no meaning."""

from __future__ import annotations

import numpy as np

from components.deployment.graph.files import DATA_FILE, GRAPH_FILE
from components.deployment.graph.parity import GoldenRows
from components.deployment.repository.triton_config import ServingOptions, versions_of

OPTIONS = ServingOptions(warmup_rows=1)


class Clocks:
    """Wall clock and monotonic clock, moved by hand."""

    def __init__(self):
        self.wall, self.steady = 1_760_000_000.0, 50.0

    def pass_(self, seconds):
        self.wall += seconds
        self.steady += seconds


def small_version(folder, number, *, data=b""):
    """A graph's folder and golden rows, told apart by a number."""
    random = np.random.default_rng(number)
    graph = folder / f"graph {number}"
    graph.mkdir(exist_ok=True)
    (graph / GRAPH_FILE).write_bytes(random.bytes(3000))
    if data:
        (graph / DATA_FILE).write_bytes(data)
    golden = GoldenRows(
        dense=random.normal(size=(5, 13)).astype(np.float32),
        categorical=random.integers(0, 2**32, (5, 26)),
        expected=random.random(5).astype(np.float32),
    )
    return graph, golden


def everything(objects):
    """Content by name of all objects but the lock."""
    return {each.name: objects.read(each.name).content for each in objects.list() if not each.name.endswith(".lease")}


def named(repository):
    """Versions that the configuration names."""
    config = repository.read_config()
    return [] if config is None else versions_of(config)
