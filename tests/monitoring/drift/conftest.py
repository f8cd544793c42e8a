"""Fixtures of simulated rows: a reference, requests, and counts computed with NumPy alone."""

from dataclasses import replace

import numpy as np
import pytest

from demo.simulation.simulator import Simulator, raw_table
from evergreen.contracts.criteo import CRITEO
from evergreen.contracts.records import PredictionBatch
from evergreen.statistics.profile_counter import ProfileCounter
from evergreen.statistics.reference import ScoreHistogram, TrainingReference


def reference_of(rows, *, size=50) -> TrainingReference:
    """Return the reference that validation writes for the rows `rows`.

    Each request has `size` rows.

    The reference includes the distribution of scores.
    """
    n = len(rows.label)
    ids = [f"t{i // size}" for i in range(n)]
    table = raw_table(rows, request_ids=ids, row=np.arange(n, dtype=np.int32), times=np.zeros(n))
    counter = ProfileCounter(CRITEO)
    for batch in table.to_batches(max_chunksize=10_000):
        counter.add(batch)
    return replace(counter.reference(), scores=ScoreHistogram.of(rows.probability))


def requests_of(
    rows, *, size=50, time=1000.0, version=1, prefix="r", scores=None
) -> list[PredictionBatch]:
    scores = rows.probability if scores is None else scores
    return [
        PredictionBatch(
            request_id=f"{prefix}{at // size}",
            time=time,
            model_version=version,
            dense=rows.dense[at : at + size],
            categorical=rows.categorical[at : at + size],
            scores=scores[at : at + size].astype(np.float32),
        )
        for at in range(0, len(rows.label), size)
    ]


@pytest.fixture(scope="session")
def simulator():
    return Simulator.create(11)


@pytest.fixture(scope="session")
def training_rows(simulator):
    return simulator.draw(40_000, np.random.default_rng(1))


@pytest.fixture(scope="session")
def reference(training_rows):
    return reference_of(training_rows)
