"""Tests of the file of a training profile: a round trip, and corrupt files that are refused."""

import io
import json
import zipfile

import numpy as np
import pyarrow as pa
import pytest

from evergreen.config.features import Features, ListOptions
from evergreen.runtime.errors import ContractError
from evergreen.statistics.column_profile import DENSE_EDGES, SCORE_EDGES, count_between
from evergreen.statistics.profile_counter import ProfileCounter
from evergreen.statistics.reference import (
    OUTLIER_SHARE,
    ScoreHistogram,
    inner_buckets,
    read_reference,
)
from tests.support.errors import raises

FEATURES = Features(
    numeric=("price", "age"),
    categorical=("item", "shop"),
    lists=("tags",),
    list_options={"tags": ListOptions(max=3)},
)


def reference(*, excluded=("age",)):
    random, rows = np.random.default_rng(0), 5000
    columns = {
        "label": [0] * rows,
        "price": pa.array(np.floor(random.lognormal(3, 1, rows)), pa.float32()),
        "age": pa.array([None, 30.0] * (rows // 2), pa.float32()),
        "item": random.zipf(1.5, rows) % 300,
        "shop": [None, 7] * (rows // 2),
        "tags": [random.integers(0, 9, size).tolist() for size in random.integers(0, 4, rows)],
        "request_id": [f"q{i // 8}" for i in range(rows)],
    }
    counter = ProfileCounter(FEATURES, excluded)
    counter.add(pa.RecordBatch.from_pydict(columns))
    return counter.reference()


def test_written_data_is_read_back_and_bytes_depend_on_numbers_alone(tmp_path):
    written, scores = reference(), ScoreHistogram.of(np.linspace(0, 1, 777))
    written.write(tmp_path / "a.npz")
    reference().write(tmp_path / "b.npz")
    scores.write(tmp_path / "scores.json")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    found = read_reference(tmp_path / "a.npz", scores=tmp_path / "scores.json")
    for name in ("rows", "bounds", "numeric", "categorical", "lists", "features", "compared"):
        assert getattr(found, name) == getattr(written, name)
    assert (found.rows, found.profile.rows) == (5000, 2048)
    assert list(found.profile.columns) == list(written.profile.columns)
    for name, column in written.profile.columns.items():
        for field, value in vars(column).items():
            np.testing.assert_array_equal(
                getattr(found.profile.columns[name], field), value, err_msg=f"{name} {field}"
            )
    np.testing.assert_array_equal(found.scores.counts, scores.counts)
    np.testing.assert_array_equal(found.scores.edges, SCORE_EDGES)


def test_feature_that_model_does_not_use_has_no_profile_but_is_in_rows():
    found = reference(excluded=("age", "tags"))
    assert list(found.profile.columns) == ["price", "item", "shop"]
    assert (found.features.names, found.compared.names) == (
        FEATURES.names,
        ("price", "item", "shop"),
    )


def test_model_without_stored_scores_has_same_profile(tmp_path):
    reference().write(tmp_path / "a.npz")
    assert read_reference(tmp_path / "a.npz").scores is None
    assert read_reference(tmp_path / "a.npz", scores=tmp_path / "absent.json").scores is None


def rewritten(path, change):
    """Apply `change` to the file's header and arrays, and write the file again."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    head = json.loads(arrays["head"].tobytes())
    change(head, arrays)
    np.savez(path, **{**arrays, "head": np.frombuffer(json.dumps(head).encode(), np.uint8)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda head, _: head.update(format_version=9),
            "version 9, expected TrainingReference version 1",
        ),
        (lambda head, _: head.update(kind="TrainingWindows"), "is TrainingWindows version 1"),
        (lambda head, _: head["bounds"].pop("price"), "price has no bounds"),
        (lambda head, _: head.update(numeric=[]), "price is not a feature"),
        (
            lambda head, _: head["windows"][0].update(rows=4999),
            "price has 2048 rows, expected 4999",
        ),
        (
            lambda _, arrays: arrays.update({"0/item/sums": arrays["0/item/sums"][1:]}),
            "sums of item have shape",
        ),
        (lambda head, _: head["windows"].append(head["windows"][0]), "holds no TrainingReference"),
    ],
)
def test_file_with_inconsistent_parts_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "reference.npz"
    reference().write(path)
    rewritten(path, change)
    with pytest.raises(ContractError, match=message) as caught:
        read_reference(path)
    assert str(path) in str(caught.value)


def test_absent_truncated_and_corrupt_files_are_refused(tmp_path):
    path = tmp_path / "reference.npz"
    with raises(ContractError, "cannot be read"):
        read_reference(path)
    reference().write(path)
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    with raises(ContractError, "no TrainingReference"):
        read_reference(path)
    with zipfile.ZipFile(io.BytesIO(content)) as parts:
        at = parts.getinfo("0/price/sums.npy").header_offset + 80
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with raises(ContractError, "no TrainingReference"):
        read_reference(path)


def test_scores_of_another_form_are_refused(tmp_path):
    reference().write(tmp_path / "a.npz")
    (tmp_path / "scores.json").write_text("{")
    with raises(ContractError, "JSON"):
        read_reference(tmp_path / "a.npz", scores=tmp_path / "scores.json")


def test_outliers_are_at_most_thousandth_of_values_at_either_end():
    values = np.floor(np.random.default_rng(1).lognormal(4, 2, 100_000))
    counts = count_between(DENSE_EDGES, values)
    first, end = inner_buckets(counts)
    most = OUTLIER_SHARE * len(values)
    assert counts[:first].sum() <= most
    assert counts[end:].sum() <= most
    # With one more bucket, the share of outliers on each side would exceed the limit.
    assert counts[: first + 1].sum() > most
    assert counts[end - 1 :].sum() > most
    assert DENSE_EDGES[end] > np.quantile(values, 0.99)


def test_column_without_values_has_empty_inner_range():
    assert inner_buckets(np.zeros(len(DENSE_EDGES) - 1, np.int64)) == (0, 0)


def test_buckets_equal_numpy_histogram():
    random = np.random.default_rng(2)
    values = np.concatenate([np.floor(random.lognormal(3, 3, 10_000)), DENSE_EDGES[1:-1], [-5.0]])
    np.testing.assert_array_equal(
        count_between(DENSE_EDGES, values), np.histogram(values, DENSE_EDGES)[0]
    )
    infinite = count_between(DENSE_EDGES, np.array([np.inf, -np.inf, np.nan]))
    assert (infinite[0], infinite[-1], infinite.sum()) == (1, 1, 2)
