import numpy as np
import pytest

from components.config.features import MAX_CATEGORY, MISSING_CATEGORY
from components.contracts import criteo
from components.contracts.records import PredictionBatch, Predictions
from monitoring.drift.sketch import SCORE, Layout, Sketch

from .conftest import reference_of, requests_of


def sketch_of(layout, requests):
    sketch = Sketch(layout)
    for request in requests:
        sketch.add(Predictions.of([request]))
    return sketch


@pytest.fixture(scope="module")
def layout(training_rows):
    return Layout(reference_of(training_rows))


def test_every_row_is_counted_in_the_cell_that_numpy_says(layout, world):
    rows = world.draw(9000, np.random.default_rng(2))
    cells = sketch_of(layout, requests_of(rows)).cells
    reference = layout.reference
    for i, name in enumerate(criteo.DENSE):
        column, found = rows.dense[:, i], cells[layout.slice_of(name)]
        expected = np.histogram(column[~np.isnan(column)], reference.dense_edges)[0]
        np.testing.assert_array_equal(found, [*expected, np.isnan(column).sum()])
    for i, name in enumerate(criteo.CATEGORICAL):
        column, found = rows.categorical[:, i], cells[layout.slice_of(name)]
        listed = reference.categorical[name].values.tolist()
        expected = [np.count_nonzero(column == value) for value in listed]
        missing = np.count_nonzero(column == MISSING_CATEGORY)
        assert found.tolist() == [*expected, len(column) - sum(expected) - missing, missing]
    expected = np.histogram(rows.probability.astype(np.float32), reference.scores.edges)[0]
    np.testing.assert_array_equal(cells[layout.slice_of(SCORE)], expected)


def test_extreme_values_fall_into_the_outer_buckets_and_nan_is_missing(layout):
    dense = np.full((4, 13), 3.0, np.float32)
    dense[:, 0] = [3.4e38, -3.4e38, 3e38, np.nan]
    batch = PredictionBatch(
        request_id="a",
        time=0.0,
        model_version=1,
        dense=dense,
        categorical=np.zeros((4, 26), np.int64) + MAX_CATEGORY,
        scores=np.array([0.0, 1.0, 0.5, 0.5], np.float32),
    )
    sketch = sketch_of(layout, [batch])
    found = sketch.cells[layout.slice_of("I1")]
    assert (found[0], found[-2], found[-1], found.sum()) == (1, 2, 1, 4)
    scores = sketch.cells[layout.slice_of(SCORE)]
    assert (scores[0], scores[-1]) == (1, 1)


def test_agreement_within_requests_is_measured_without_bias_whatever_their_order(layout):
    """Requests of 10 sorted rows, of which neighbours agree more often than rows far apart."""
    random = np.random.default_rng(8)
    listed = layout.reference.categorical["C1"].values[:4]
    requests, pairs_alike, pairs = [], 0, 0
    for number in range(4000):
        values = np.sort(listed[random.integers(0, 4, 10)])
        alike = values[:, None] == values[None, :]
        pairs_alike, pairs = pairs_alike + int(alike.sum()) - 10, pairs + 90
        categorical = np.full((10, 26), MISSING_CATEGORY)
        categorical[:, 0] = values
        requests.append(
            PredictionBatch(
                request_id=f"q{number}",
                time=0.0,
                model_version=1,
                dense=np.zeros((10, 13), np.float32),
                categorical=categorical,
                scores=np.full(10, 0.5, np.float32),
            )
        )
    sketch = sketch_of(layout, requests)
    same, seen = sketch.same_cell(layout.columns.index("C1"))
    assert seen == 40_000
    assert same / seen == pytest.approx(pairs_alike / pairs, abs=0.01)
    assert sketch.same_missing(layout.columns.index("C2")) == (40_000, 40_000)
    assert sketch.mean_request_rows(0) == 10.0


def test_requests_of_one_row_say_nothing_of_pairs(layout, world):
    sketch = sketch_of(layout, requests_of(world.draw(50, np.random.default_rng(9)), size=1))
    assert sketch.same_cell(0) == (0, 0)
    assert sketch.mean_request_rows(0) == 1.0
    mixed = sketch_of(layout, requests_of(world.draw(53, np.random.default_rng(9)), size=4))
    assert mixed.same_missing(0)[1] == 52
