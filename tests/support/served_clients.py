"""Fixtures for the tests of the client: a server's test double, rows, and the content of a log."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from evergreen.config.features import Features
from evergreen.contracts.record_format import RecordFormat
from evergreen.registry.traffic_plan import TrafficPlan
from evergreen.storage.folder import FolderObjects
from testing.recommenders import SHOP, accept_into, draw_arrays
from testing.served_names import TRAFFIC_FILE
from tests.support.triton_double import GrpcTriton, ScoringDouble, known_scores


@pytest.fixture(scope="session")
def recommender():
    """The recommender of all fixtures in this module. A test folder may override this fixture."""
    return SHOP


@pytest.fixture
def server(recommender):
    running = GrpcTriton(ScoringDouble(recommender.features))
    yield running
    running.close()


@pytest.fixture(scope="session")
def store(tmp_path_factory, recommender):
    """A model registry with the recommender."""
    store = tmp_path_factory.mktemp("store")
    accept_into(store, recommender)
    return store


@pytest.fixture
def objects(tmp_path):
    """A model repository in a folder."""
    return FolderObjects(tmp_path / "a repository")


@pytest.fixture
def publish(objects):
    """Writes a traffic plan, valid or not, into the repository."""

    def write(plan):
        objects.write(TRAFFIC_FILE, plan.dumps() if isinstance(plan, TrafficPlan) else plan)

    return write


@pytest.fixture
def served(server):
    """The server with version 3 and a canary, version 4."""
    server.scoring.version, server.scoring.canary_version = 3, 4
    return server


@pytest.fixture
def score_rows():
    """Scoring function of the server's test double.

    The scores under the canary's name are 1 minus the returned scores.
    """
    return known_scores


@pytest.fixture
def make_rows(recommender):
    """Makes seeded rows of the recommender, with missing values."""
    return lambda n, seed=0: draw_arrays(recommender.features, n, np.random.default_rng(seed))


@pytest.fixture
def read_log(recommender):
    """Reads all records of an SQLite log in the order of publication."""
    from evergreen.events.sqlite import SqliteLog

    def read(path: Path, features: Features = recommender.features):
        log = SqliteLog(path)
        try:
            return [
                RecordFormat(features).decode(delivery.payload) for delivery in log.pull(1_000_000)
            ]
        finally:
            log.close()

    return read


@pytest.fixture
def sleeps():
    """A replacement for sleep that returns at once, and records its arguments in `seconds`."""

    class Sleeps:
        def __init__(self) -> None:
            self.seconds: list[float] = []

        async def __call__(self, seconds: float) -> None:
            self.seconds.append(seconds)
            await asyncio.sleep(0)

    return Sleeps()
