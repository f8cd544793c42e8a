"""Unusual raw rows for tests of encoders.

A workflow has every kind of vocabulary: empty, one category, evicted categories, consecutive
numbers, spread numbers, and the smallest and largest category.
"""

import numpy as np

from evergreen.config.features import MAX_CATEGORY, MISSING_CATEGORY, Features, ListOptions
from evergreen.contracts.workflow import TOMBSTONE, FeatureWorkflow
from tests.support.workflows import workflow_of

INT64 = np.iinfo(np.int64)
STRANGE_CATEGORIES = np.array(
    [
        MISSING_CATEGORY,
        TOMBSTONE,
        -3,
        INT64.min,
        INT64.min + 1,
        INT64.max,
        INT64.max - 1,
        0,
        1,
        2**31 - 1,
        2**31,
    ]
    + [MAX_CATEGORY, MAX_CATEGORY + 1, MAX_CATEGORY + 2, 2**53 + 1]
    + [
        sign * 2**power + off
        for sign in (-1, 1)
        for power in (31, 32, 33, 34, 38)
        for off in (-2, -1, 0, 1, 2**31, -(2**31))
    ]
)
STRANGE_DENSE = np.array(
    [
        np.nan,
        0,
        -0.0,
        -1,
        -2,
        -0.5,
        -3.4e38,
        3.4e38,
        1e-45,
        -1e-45,
        1.2e-38,
        2**24 + 2,
        2**31,
        1e9,
        0.1,
    ],
    np.float32,
)


STRANGE = Features(
    numeric=("price", "age"),
    categorical=("empty", "single", "evicted", "small", "spread", "extremes", "left", "falling"),
    lists=("shared", "own"),
    list_options={
        "shared": ListOptions(max=2, table="spread"),
        "own": ListOptions(max=3, pool="sum"),
    },
)


def strange_workflow(seed=0, num_keys=200) -> FeatureWorkflow:
    """Return a workflow of the features `STRANGE`. A feature's name describes its vocabulary."""
    random = np.random.default_rng(seed)
    spread = random.permutation(np.unique(random.integers(0, 2**32, num_keys)))
    evicted = spread.copy()
    evicted[::3] = TOMBSTONE
    return workflow_of(
        [
            np.zeros(0, np.int64),
            np.array([int(random.integers(0, 2**32))]),
            evicted,
            np.arange(num_keys),
            spread,
            np.array([0, MAX_CATEGORY, 1, MAX_CATEGORY - 1]),
            np.full(5, TOMBSTONE),
            np.arange(num_keys)[::-1] * 2**20 // num_keys * 4096,
            evicted[::-1],
        ],
        STRANGE,
        means=random.normal(1.5, 0.5, 2).astype(np.float32),
        stds=random.uniform(0.5, 2.0, 2).astype(np.float32),
        frequency_threshold=2,
    )


def nasty_rows(workflow, num_rows, seed=0, *, dense_up_to=1e7, strange_dense=True):
    """Return dense [n, d] and categorical [n, positions] rows.

    Every column has known, unseen, unusual and missing values.
    """
    random, features = np.random.default_rng(seed), workflow.features
    shape = num_rows, len(features.numeric)
    dense = np.floor(np.exp(random.uniform(0, np.log(dense_up_to), shape))).astype(np.float32)
    strange = random.random(dense.shape) < (0.3 if strange_dense else 0)
    dense[strange] = random.choice(STRANGE_DENSE, np.count_nonzero(strange))
    dense[random.random(dense.shape) < 0.1] = np.nan
    categorical = np.empty((num_rows, len(features.position_names)), np.int64)
    for position, slot in enumerate(features.positions.slots):
        known = random.choice(np.append(workflow.vocabularies[slot], 7), num_rows)
        # Some encodings add an offset to the keys of each slot. With such an encoding, a key in
        # `shifted` can collide with a key of another slot.
        shifted = known + random.integers(-3, 4, num_rows) * 2 ** random.integers(31, 36, num_rows)
        unseen = random.integers(0, 2**32, num_rows)
        kinds = np.stack(
            [known, known, known, shifted, unseen, random.choice(STRANGE_CATEGORIES, num_rows)]
        )
        categorical[:, position] = kinds[
            random.integers(0, len(kinds), num_rows), np.arange(num_rows)
        ]
    for start, stop, _ in features.positions.lists:
        categorical[:, start:stop][random.random((num_rows, stop - start)) < 0.3] = MISSING_CATEGORY
    return dense, categorical
