import json
from itertools import pairwise

import numpy as np
import pytest

from evergreen.config.features import MAX_CATEGORY, MISSING_CATEGORY
from evergreen.contracts import criteo
from evergreen.contracts.records import PredictionBatch, Predictions
from evergreen.statistics.column_profile import DENSE_EDGES
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


def test_every_row_is_counted_in_same_cell_as_by_numpy(layout, simulator):
    rows = simulator.draw(9000, np.random.default_rng(2))
    cells = sketch_of(layout, requests_of(rows)).cells
    reference = layout.reference
    for i, name in enumerate(criteo.DENSE):
        column, found = rows.dense[:, i], cells[layout.slice_of(name)]
        np.testing.assert_array_equal(
            found, np.histogram(column[~np.isnan(column)], DENSE_EDGES)[0]
        )
    for i, name in enumerate(criteo.CATEGORICAL):
        column, found = rows.categorical[:, i], cells[layout.slice_of(name)]
        listed = reference.profile.columns[name].values.tolist()
        expected = [np.count_nonzero(column == value) for value in listed]
        missing = np.count_nonzero(column == MISSING_CATEGORY)
        assert found.tolist() == [*expected, len(column) - sum(expected) - missing]
    expected = np.histogram(rows.probability.astype(np.float32), reference.scores.edges)[0]
    np.testing.assert_array_equal(cells[layout.slice_of(SCORE)], expected)


def test_extreme_values_fall_into_outer_buckets_and_nan_is_missing(layout):
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
    assert (found[0], found[-1], found.sum()) == (1, 2, 3)
    assert sketch.profile().columns["I1"].missing.rows == 1
    scores = sketch.cells[layout.slice_of(SCORE)]
    assert (scores[0], scores[-1]) == (1, 1)


def test_sums_over_requests_equal_those_of_table_of_requests(layout, simulator):
    """The requests have unequal sizes.

    In each request, half of the rows repeat the values of the first row.
    """
    random, rows = np.random.default_rng(8), simulator.draw(6000, np.random.default_rng(8))
    requests = [
        each for size in (1, 7, 40) for each in requests_of(rows, size=size, prefix=f"s{size}-")
    ]
    for each in requests:
        alike = random.random(len(each.scores)) < 0.5
        each.dense[alike], each.categorical[alike] = each.dense[0], each.categorical[0]
    profile = sketch_of(layout, [requests[i] for i in random.permutation(len(requests))]).profile()
    keys = np.repeat(np.arange(len(requests)), [len(each.scores) for each in requests])
    sizes = np.bincount(keys)
    assert (profile.rows, profile.requests, profile.sizes) == (
        len(keys),
        len(sizes),
        (sizes**2).sum(),
    )
    values = {"I2": np.concatenate([each.dense[:, 1] for each in requests])}
    values |= {"C3": np.concatenate([each.categorical[:, 2] for each in requests])}
    for name, column in values.items():
        missing = np.isnan(column) if name in criteo.DENSE else column == MISSING_CATEGORY
        present = np.bincount(keys[~missing], minlength=len(sizes))
        found, absent = profile.columns[name], sizes - present
        assert found.missing == (absent.sum(), (absent**2).sum(), (absent * sizes).sum())
        assert (found.present, found.present_sizes) == (present.sum(), (present**2).sum())
        assert found.present_requests == (present > 0).sum()
        if found.values is None:
            masks = [(column >= low) & (column < high) for low, high in pairwise(DENSE_EDGES)]
        else:
            masks = [column == value for value in found.values]
        of_cells = np.stack([np.bincount(keys[mask], minlength=len(sizes)) for mask in masks])
        expected = [of_cells.sum(axis=1), (of_cells**2).sum(axis=1), of_cells @ present]
        np.testing.assert_array_equal(found.sums, np.transpose(expected))


def test_merged_and_restored_parts_equal_profile_of_all_rows(layout, simulator):
    requests = requests_of(simulator.draw(5000, np.random.default_rng(9)), size=23)
    whole, first, second = (
        sketch_of(layout, each) for each in (requests, requests[:90], requests[90:])
    )
    first.merge(Sketch.restore(layout, json.loads(json.dumps(second.state_dict()))))
    assert first.state_dict() == whole.state_dict()
