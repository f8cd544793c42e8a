"""Tests of category statistics: they are stored exactly, and values out of range are refused."""

import numpy as np
import pytest

from components.preprocessing.parent import ADMISSION_FILE, load_columns, save_columns
from components.preprocessing.vocabularies import Candidates, Column
from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts.workflow import TOMBSTONE
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises
from tests.support.workflows import workflow_of


def make_columns(seed=0):
    random = np.random.default_rng(seed)
    columns = []
    for size in (0, 1, 7, 25):
        values = random.choice(2**32, size=2 * size, replace=False)
        vocabulary, waiting = values[:size].copy(), np.sort(values[size:])
        vocabulary[::4] = TOMBSTONE
        times = random.integers(0, 2**51, (2, size))
        known = Candidates(
            categories=waiting, frequencies=random.integers(1, 2**40, size), last_seen=times[1]
        )
        columns.append(Column(vocabulary=vocabulary, last_seen=times[0], candidates=known))
    return columns


def same(left, right):
    arrays = [
        (
            c.vocabulary,
            c.last_seen,
            c.candidates.categories,
            c.candidates.frequencies,
            c.candidates.last_seen,
        )
        for c in (left, right)
    ]
    return all(np.array_equal(a, b) and a.dtype == b.dtype == np.int64 for a, b in zip(*arrays))


def test_columns_survive_disk(tmp_path):
    columns = make_columns()
    save_columns(columns, tmp_path)
    loaded = load_columns(tmp_path, workflow_of([column.vocabulary for column in columns]))
    assert [same(*pair) for pair in zip(columns, loaded, strict=True)] == [True] * 4


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn"], ids=["empty", "torn"])
def test_corrupt_file_is_refused_by_name(tmp_path, content):
    (tmp_path / ADMISSION_FILE).write_bytes(content)
    with raises(ContractError, "admission.npz", "read"):
        load_columns(tmp_path, workflow_of([column.vocabulary for column in make_columns()]))


def test_days_become_microseconds_and_short_life_is_not_for_ever():
    assert PreprocessingSettings(category_ttl_days=1.5).ttl == 129_600_000_000
    assert PreprocessingSettings(category_ttl_days=1e-12).ttl == 1
    assert PreprocessingSettings().ttl == 0
