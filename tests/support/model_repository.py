"""Small versions for a model repository, with meaningless bytes."""

import re

import numpy as np

from evergreen.contracts.serving import versions_of
from evergreen.registry.models import DATA_FILE, GRAPH_FILE
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import GOLDEN_FILE
from evergreen.serving.repository.triton_config import ServingOptions
from testing.recommenders import SHOP, draw_arrays

OPTIONS = ServingOptions(warmup_rows=1)


def small_version(folder, number, *, data=b""):
    """Create a folder with a graph and golden rows. The content depends on `number`."""
    random = np.random.default_rng(number)
    graph = folder / f"graph {number}"
    graph.mkdir(exist_ok=True)
    (graph / GRAPH_FILE).write_bytes(random.bytes(3000))
    if data:
        (graph / DATA_FILE).write_bytes(data)
    dense, categorical = draw_arrays(SHOP.features, 5, random)
    golden = GoldenRows(
        features=SHOP.features,
        dense=dense,
        categorical=categorical,
        expected=random.random(5).astype(np.float32),
    )
    golden.save(graph / GOLDEN_FILE)
    return graph


def everything(objects):
    """Map the names of all objects except the lock to their content."""
    return {
        each.name: objects.read(each.name).content
        for each in objects.list()
        if not each.name.endswith((".lease", ".fence.json"))
    }


def named(repository):
    """Return the versions that the configuration names."""
    config = repository.read_config()
    return [] if config is None else versions_of(config)


def with_versions(text, versions):
    """Return the configuration changed to serve exactly `versions`."""
    listed = "".join(f"    versions: {version}\n" for version in sorted(versions))
    return re.sub(r"specific \{[^}]*\}", f"specific {{\n{listed}  }}", text)
