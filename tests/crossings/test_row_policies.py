"""Tests of downsampled rows, excluded columns and immature rows, over two runs."""

from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from demo.simulation.simulator import Simulator, write_lake
from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts import criteo, raw_rows
from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT
from evergreen.statistics.metrics import calibration, normalized_entropy
from evergreen.storage.uris import local_path
from tests.crossings.conftest import Chain

pytestmark = pytest.mark.timeout(900)

ROWS = 16_000
"""Number of rows in each of the two parts of the lake."""
RATES = (0.2, 0.3)
EXCLUDED = ("I4", "C2", "C20")
INCLUDED = [name for name in criteo.FEATURES if name not in EXCLUDED]
HOURS = 6


@pytest.fixture(scope="module")
def rounds(tmp_path_factory, chain, warm):
    """Two runs, each with its own downsampling rate, over a growing lake.

    The validation report is a stub.
    """
    report = chain.rounds[0].paths["validation"]
    chain = Chain(tmp_path_factory.mktemp("row policies"), warm=warm)
    window = {
        "holdout_fraction": 0.25,
        "columns": INCLUDED,
        "attribution_hours": HOURS,
        "replay_share": 0.2,
    }
    simulator = Simulator.create(seed=3, click_rate=0.1)
    for number, rate in enumerate(RATES):
        last_day = date(2026, 1, 2 + 2 * number)
        write_lake(
            simulator, str(chain.root / "lake"), rows=ROWS, days=2, last_day=last_day, seed=number
        )
        downsampling = {"frequency_threshold": 2, "negative_rate": rate}
        chain.settings = {**chain.settings, "extraction": window, "preprocessing": downsampling}
        chain.turn(f"round {number}", validation_report=report)
    return chain


def read(folder):
    return pa.concat_tables(
        [pq.ParquetFile(path).read() for path in sorted(folder.rglob("*.parquet"))]
    )


def held_out(this):
    """Return labels of the holdout rows, and scores computed from the stored weights."""
    labels = read(local_path(this.extraction.holdout_uri))[raw_rows.LABEL].to_numpy()
    with np.load(local_path(this.evaluation.scores_uri), allow_pickle=False) as arrays:
        return labels, arrays["candidate"].astype(np.float64)


@pytest.mark.parametrize("turn", [0, 1])
def test_scores_of_full_holdout_are_calibrated_only_with_correction(rounds, turn):
    """The bound is four standard errors of the number of clicks in holdout and training rows."""
    this, rate = rounds.rounds[turn], RATES[turn]
    labels, scores = held_out(this)
    assert len(labels) == this.extraction.num_holdout_rows
    bound = 4 * (2 / labels.sum()) ** 0.5
    assert this.evaluation.candidate.calibration == pytest.approx(1, abs=bound)
    assert this.evaluation.candidate.normalized_entropy < 1
    odds = scores / (1 - scores) / rate
    uncorrected = odds / (1 + odds)
    assert calibration(labels, uncorrected) > 1 + 2 * bound
    assert normalized_entropy(labels, uncorrected) > 1 > normalized_entropy(labels, scores)


@pytest.mark.parametrize("turn", [0, 1])
def test_served_graph_scores_excluded_columns_like_training_without_them(rounds, turn):
    import onnxruntime

    this = rounds.rounds[turn]
    assert this.extraction.excluded_columns == list(EXCLUDED)
    assert this.training.excluded_columns == list(EXCLUDED)
    raw = read(local_path(this.extraction.holdout_uri))
    assert all(raw[name].null_count == raw.num_rows for name in EXCLUDED)
    whole = read(rounds.root / "lake")
    locations = {
        key: i
        for i, key in enumerate(
            zip(*(whole[n].to_pylist() for n in (raw_rows.REQUEST_ID, raw_rows.ROW)))
        )
    }
    rows = whole.take(
        [
            locations[key]
            for key in zip(*(raw[n].to_pylist() for n in (raw_rows.REQUEST_ID, raw_rows.ROW)))
        ]
    )
    assert all(rows[name].null_count < rows.num_rows / 2 for name in EXCLUDED)
    dense, categorical = (
        np.stack([rows[name].cast(kind).fill_null(missing).to_numpy() for name in names], axis=1)
        for names, kind, missing in (
            (criteo.DENSE, "float32", float("nan")),
            (criteo.CATEGORICAL, "int64", MISSING_CATEGORY),
        )
    )
    session = onnxruntime.InferenceSession(
        str(local_path(this.deployment.graph_uri)), providers=["CPUExecutionProvider"]
    )
    inputs = {DENSE_INPUT: dense, CATEGORICAL_INPUT: categorical}
    served = session.run([PROBABILITY_OUTPUT.name], inputs)[0].ravel()
    _, scores = held_out(this)
    np.testing.assert_allclose(served, scores, atol=1e-5, rtol=0)
    # A change in an excluded column does not change the scores, but a change in another column
    # does.
    dense[:, 3], categorical[:, [1, 19]] = 7.0, 12_345
    np.testing.assert_array_equal(session.run([PROBABILITY_OUTPUT.name], inputs)[0].ravel(), served)
    categorical[:, 0] = 12_345
    assert np.abs(session.run([PROBABILITY_OUTPUT.name], inputs)[0].ravel() - served).max() > 1e-3
