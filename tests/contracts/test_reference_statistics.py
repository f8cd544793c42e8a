import json

import numpy as np
import pytest

from components.contracts import criteo
from components.contracts.reference_statistics import (
    DENSE_EDGES,
    SCORE_EDGES,
    CategoryColumn,
    DenseColumn,
    ReferenceStatistics,
    ScoreHistogram,
    count_between,
    read_reference,
)
from components.runtime.errors import ContractError


def statistics(rows=5000, seed=0):
    random = np.random.default_rng(seed)
    dense = {}
    for i, name in enumerate(criteo.DENSE):
        present = rows - 100 * i
        values = np.floor(random.lognormal(i, 1, present))
        halves = [count_between(DENSE_EDGES, values[half::2]) for half in range(2)]
        dense[name] = DenseColumn.of(*halves, 100 * i)
    categorical = {}
    for i, name in enumerate(criteo.CATEGORICAL):
        values, counts = np.unique(random.zipf(1.5, rows - i) % 300, return_counts=True)
        order = np.lexsort((values, -counts))[:50]
        listed = counts[order]
        categorical[name] = CategoryColumn(
            values=values[order].astype(np.int64),
            counts=listed,
            others=rows - i - int(listed.sum()),
            fair_counts=listed // 2,
            fair_others=0,
            missing=i,
        )
    return ReferenceStatistics(rows=rows, dense_edges=DENSE_EDGES, dense=dense, categorical=categorical)


def test_what_is_written_is_read_back_and_the_bytes_depend_on_the_numbers_alone(tmp_path):
    written, scores = statistics(), ScoreHistogram.of(np.linspace(0, 1, 777))
    written.write(tmp_path / "a.json")
    statistics().write(tmp_path / "b.json")
    scores.write(tmp_path / "scores.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    found = read_reference(tmp_path / "a.json", scores=tmp_path / "scores.json")
    assert found.rows == 5000
    np.testing.assert_array_equal(found.dense_edges, DENSE_EDGES)
    for columns, read in ((written.dense, found.dense), (written.categorical, found.categorical)):
        assert columns.keys() == read.keys()
        for name, column in columns.items():
            for field, value in vars(column).items():
                np.testing.assert_array_equal(getattr(read[name], field), value, err_msg=f"{name} {field}")
    np.testing.assert_array_equal(found.scores.counts, scores.counts)
    np.testing.assert_array_equal(found.scores.edges, SCORE_EDGES)


def test_a_model_without_kept_scores_has_statistics_all_the_same(tmp_path):
    statistics().write(tmp_path / "a.json")
    assert read_reference(tmp_path / "a.json").scores is None
    assert read_reference(tmp_path / "a.json", scores=tmp_path / "absent.json").scores is None


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["format_version"], 1, "format_version 1, expected 2"),
        (["kind"], "Model", "is a Model manifest, expected ReferenceStatistics"),
        (["rows"], 4999, "I1 are not those of 4999 rows"),
        (["dense", "I3", "counts"], [1, 2], f"I3 has 2 counts, expected {len(DENSE_EDGES) - 1}"),
        (["categorical", "C2", "values"], [0], "C2 has 1 values, expected a count for each"),
        (["categorical", "C2", "missing"], 7, "C2 are not those of 5000 rows"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, keys, value, message):
    path = tmp_path / "reference.json"
    statistics().write(path)
    document = part = json.loads(path.read_text())
    del document["crc32"]
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(ContractError, match=message) as caught:
        read_reference(path)
    assert str(path) in str(caught.value)


def test_an_absent_file_and_one_that_is_no_json_are_refused(tmp_path):
    with pytest.raises(ContractError, match="cannot be read"):
        read_reference(tmp_path / "absent.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ContractError, match="not JSON"):
        read_reference(tmp_path / "a.json")


def test_outliers_are_at_most_a_thousandth_of_the_values_at_either_end():
    values = np.floor(np.random.default_rng(1).lognormal(4, 2, 100_000))
    none = np.zeros(len(DENSE_EDGES) - 1, np.int64)
    column = DenseColumn.of(count_between(DENSE_EDGES, values), none, 0)
    first, end = column.inner
    assert column.counts[:first].sum() <= 100
    assert column.counts[end:].sum() <= 100
    # One bucket more on either side would be too much.
    assert column.counts[: first + 1].sum() > 100
    assert column.counts[end - 1 :].sum() > 100
    assert DENSE_EDGES[end] > np.quantile(values, 0.99)


def test_a_column_without_values_has_an_empty_inner_range():
    none = np.zeros(len(DENSE_EDGES) - 1, np.int64)
    assert DenseColumn.of(none, none, 7).inner == (0, 0)


def test_buckets_are_those_of_numpys_histogram():
    random = np.random.default_rng(2)
    values = np.concatenate([np.floor(random.lognormal(3, 3, 10_000)), DENSE_EDGES[1:-1], [-5.0]])
    np.testing.assert_array_equal(count_between(DENSE_EDGES, values), np.histogram(values, DENSE_EDGES)[0])
    infinite = count_between(DENSE_EDGES, np.array([np.inf, -np.inf, np.nan]))
    assert (infinite[0], infinite[-1], infinite.sum()) == (1, 1, 2)
