"""Fixtures for every folder, and the environment in which each folder runs.

Each step is tested in the environment of its image. If pytest runs in another environment, it skips
the step's folder.
"""

import importlib.util
import os
import sys
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest

from testing.paths import REPOSITORY

ENVIRONMENT_OF_FOLDER = {
    "components/validation": "validation",
    "components/preprocessing": "preprocessing",
    "benchmarks": "training",
    "components/training": "training",
    "evergreen/networks": "training",
    "components/evaluation": "training",
}
"""Virtual environment for the tests of each folder. The tests in all other folders run in
`driver`."""
# tests/hugectr_double has no tests. Only the tests of the HugeCTR engine import the test double.
collect_ignore = ["hugectr_double"]

FOLDERS_OF_PART = {
    "loop": ("loop",),
    "crossings": ("crossings",),
    "serving": (
        "components/deployment",
        "controller",
        "demo",
        "e2e",
        "evergreen/registry",
        "evergreen/serving",
        "evergreen/storage",
        "inference_client",
    ),
    "monitor": ("evergreen/events", "k8s", "monitoring", "tools"),
}
"""The driver's tests take longest, so their folders are divided into parts. `everywhere.py` runs
these parts and the `rest` in parallel. `EVERGREEN_TEST_PART` selects the part that pytest runs. If
the variable is unset, all parts run."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore folders of other environments, whose libraries are absent."""
    try:
        relative = collection_path.relative_to(REPOSITORY / "tests").as_posix()
    except ValueError:
        return None
    if relative == "support":
        # tests/support has no tests, and parts of it need another environment's libraries.
        return True
    here = Path(sys.prefix).name
    if collection_path.is_file():
        relative = str(Path(relative).parent)
    home = ENVIRONMENT_OF_FOLDER.get(relative, "driver")
    is_parent = any(f.startswith(f"{relative}/") for f in ENVIRONMENT_OF_FOLDER) or relative == "."
    if is_parent or home != here:
        return None if is_parent else True
    part = next(
        (part for part, folders in FOLDERS_OF_PART.items() if relative.startswith(folders)), "rest"
    )
    return None if os.environ.get("EVERGREEN_TEST_PART", "") in ("", part) else True


@pytest.fixture(scope="session")
def raw_table():
    """Draws a table of `n` raw rows with a planted signal and a fixed seed.

    `contracts.raw_rows` describes the rows. The columns are those of the default recommender.
    """
    pytest.importorskip("pyarrow")
    return _make_raw_table


@pytest.fixture(scope="session")
def criteo_table():
    """Draws a table like `raw_table`, with the columns of Criteo's click log."""
    pytest.importorskip("pyarrow")
    return partial(_make_raw_table, criteo=True)


@lru_cache(maxsize=16)  # Drawing a table takes longer than most tests that use the table.
def _make_raw_table(
    n: int = 1000,
    *,
    seed: int = 0,
    start: float = 1_760_000_000.0,
    seconds: float = 86_400.0,
    request_rows: int = 10,
    criteo: bool = False,
):
    import pyarrow

    from evergreen.contracts import raw_rows
    from evergreen.contracts.criteo import CRITEO
    from testing.recommenders import SHOP

    random, features = np.random.default_rng(seed), CRITEO if criteo else SHOP.features
    types = {
        name: _arrow_type(pyarrow, text) for name, text in raw_rows.raw_types(features).items()
    }
    columns, drawn = {}, {}
    logit = np.full(n, -1.2)
    for i, name in enumerate(features.numeric):
        values = np.floor(random.lognormal(1.0 + 0.2 * i, 1.2, n)).astype(np.float32)
        logit += 0.15 * (np.log1p(values) - np.log1p(values).mean())
        columns[name] = pyarrow.array(values, mask=random.random(n) < 0.03 * i)
    for i, name in enumerate(features.categorical):
        cardinality = 3 + 7 * i
        ranks = np.minimum(random.zipf(1.5, n) - 1, cardinality - 1)
        keys = np.random.default_rng(1000 + i).integers(0, 2**32 - 1, cardinality)
        drawn[name] = keys
        weights = np.random.default_rng(2000 + i).normal(0, 0.5, cardinality)
        logit += weights[ranks]
        columns[name] = pyarrow.array(keys[ranks], mask=random.random(n) < 0.02 * (i % 4))
    for name, (first, end, _) in zip(features.lists, features.positions.lists):
        lengths = random.integers(0, end - first + 1, n).tolist()
        elements = drawn.get(features.list_options_of(name).table or "", np.arange(9))
        columns[name] = [random.choice(elements, each).tolist() or None for each in lengths]
    columns[raw_rows.LABEL] = (random.random(n) < 1 / (1 + np.exp(-logit))).astype(np.int32)
    columns[raw_rows.REQUEST_ID] = [f"request-{seed}-{i // request_rows}" for i in range(n)]
    columns[raw_rows.ROW] = (np.arange(n) % request_rows).astype(np.int32)
    times = (start + np.arange(n) * (seconds / max(n, 1))) * 1e6
    columns[raw_rows.EVENT_TIME] = times.astype(np.int64)
    columns |= dict.fromkeys(raw_rows.SERVED_BY, pyarrow.nulls(n))
    # The function `pyarrow.array` of version 10 does not accept a pyarrow Array.
    arrays = {
        n: c if isinstance(c, pyarrow.Array) else pyarrow.array(c) for n, c in columns.items()
    }
    return pyarrow.table({name: arrays[name].cast(kind) for name, kind in types.items()})


@pytest.fixture(scope="session")
def cloud_storage_server():
    """The emulator that `cloud_storage` uses. The emulator is started once."""
    _find_emulator()
    from tests.support.cloud_storage import CloudStorage

    with CloudStorage() as server:
        yield server


@pytest.fixture
def cloud_storage(cloud_storage_server, monkeypatch):
    """A local Cloud Storage with an empty bucket `models`, used for every `gs://models/...`."""
    cloud_storage_server.reset()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud_storage_server.front.host)
    return cloud_storage_server.front


@pytest.fixture
def kubeflow(tmp_path, monkeypatch):
    """A test double of the KFP API with the pipeline `ours`.

    The home of the KFP client is a temporary folder.
    """
    from tests.support.kfp_server import KfpServer

    monkeypatch.setenv("HOME", str(tmp_path))
    double = KfpServer()
    double.pipelines = [{"pipeline_id": "p", "display_name": "ours"}]
    double.versions = [{"pipeline_id": "p", "pipeline_version_id": "v1", "display_name": "1"}]
    yield double
    double.close()


def _find_emulator() -> None:
    """Import the emulator from the driver's environment if this environment lacks it.

    The emulator is pure Python.
    """
    name = "gcp_storage_emulator"
    if importlib.util.find_spec(name) is None:
        (package,) = (REPOSITORY / ".venvs" / "driver").glob(
            f"lib/python3*/site-packages/{name}/__init__.py"
        )
        spec = importlib.util.spec_from_file_location(name, package)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


def _arrow_type(pyarrow, text: str):
    if text.startswith("timestamp"):
        return pyarrow.timestamp("us", tz="UTC")
    if text.startswith("list<"):
        return pyarrow.list_(_arrow_type(pyarrow, text[5:-1]))
    return getattr(pyarrow, text)()
