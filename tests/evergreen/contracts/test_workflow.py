"""Tests that the feature workflow is stored exactly and encodes categories correctly.

The expected ids are looked up in Python dicts.
"""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

from evergreen.config.features import MISSING_CATEGORY, Features, NumericOptions
from evergreen.contracts import workflow
from evergreen.contracts.workflow import TOMBSTONE, FeatureWorkflow
from evergreen.runtime.errors import ContractError
from testing.recommenders import SHOP, draw_arrays
from tests.support.workflows import workflow_of

FEATURES = SHOP.features
SLOTS = list(FEATURES.positions.slots)
SIZES = (0, 1, 25, 7)
"""Numbers of categories of item, shop, user and genres."""


def fitted(*, seed=0, **changes):
    random = np.random.default_rng(seed)
    vocabularies = tuple(
        random.permutation(random.choice(2**32, size=size, replace=False)).astype(np.int64)
        for size in SIZES
    )
    means, stds = (
        random.normal(2, 1, 2).astype(np.float32),
        random.uniform(0.1, 2, 2).astype(np.float32),
    )
    values = {"vocabularies": vocabularies, "means": means, "stds": stds, "frequency_threshold": 6}
    return workflow_of(**{**values, **changes})


def raw_rows(encoder, n=300, seed=1):
    random = np.random.default_rng(seed)
    dense, categorical = draw_arrays(FEATURES, n, random)
    for position, slot in enumerate(SLOTS):
        if len(vocabulary := encoder.vocabularies[slot]):
            known = (random.random(n) < 0.6) & (categorical[:, position] != MISSING_CATEGORY)
            categorical[known, position] = random.choice(vocabulary, known.sum())
    return dense - 3, categorical


def test_categories_are_encoded_as_by_dict():
    encoder = fitted()
    _, categorical = raw_rows(encoder)
    known = [{int(key): 3 + at for at, key in enumerate(v)} for v in encoder.vocabularies]
    absent = [1, 1, 1, *[0] * 5]
    tables = [{**known[slot], -1: of_missing} for slot, of_missing in zip(SLOTS, absent)]
    expected = [[table.get(int(key), 2) for key, table in zip(row, tables)] for row in categorical]
    ids = encoder.encode_categorical(categorical)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, expected)
    assert (ids < np.array(encoder.slot_sizes)[SLOTS]).all()
    assert {1, 2} < set(ids[:, 2])
    assert {0, 2} < set(ids[:, 3])


def test_dense_values_encode_by_stated_arithmetic():
    filled = dict.fromkeys(FEATURES.numeric, NumericOptions(fill=1.0))
    encoder = fitted(features=replace(FEATURES, numeric_options=filled))
    dense, _ = raw_rows(encoder)
    expected = [
        [
            (math.log1p(max(1.0 if math.isnan(x) else float(x), 0.0)) - float(mean)) / float(std)
            for x, mean, std in zip(row, encoder.means, encoder.stds)
        ]
        for row in dense
    ]
    encoded = encoder.encode_dense(dense)
    assert encoded.dtype == np.float32
    np.testing.assert_allclose(encoded, expected, rtol=2e-5, atol=2e-5)


def with_evicted(encoder, every=3):
    """Evict every third category of each column, and return the new workflow."""
    vocabularies = [v.copy() for v in encoder.vocabularies]
    for vocabulary in vocabularies:
        vocabulary[::every] = TOMBSTONE
    return fitted(vocabularies=tuple(vocabularies))


def test_tombstones_move_no_id_and_match_no_value():
    encoder = fitted()
    _, categorical = raw_rows(encoder)
    categorical[:5] = TOMBSTONE
    ids, later = (
        encoder.encode_categorical(categorical),
        with_evicted(encoder).encode_categorical(categorical),
    )
    evicted = (ids >= 3) & ((ids - 3) % 3 == 0)
    assert evicted.any()
    np.testing.assert_array_equal(later, np.where(evicted, 2, ids))
    assert (later[:5] == 2).all()
    assert with_evicted(encoder).slot_sizes == encoder.slot_sizes
    assert with_evicted(encoder).tombstones == [(size + 2) // 3 for size in SIZES]
    assert encoder.tombstones == [0] * 4


EXCLUDED = ("age", "user", "genres")


def without_columns(encoder, names=EXCLUDED):
    nothing = np.zeros(0, np.int64)
    vocabularies = [
        nothing if n in names else v for n, v in zip(FEATURES.slots, encoder.vocabularies)
    ]
    return replace(encoder, vocabularies=tuple(vocabularies), excluded=names)


def test_excluded_column_is_missing_for_all_rows_and_others_are_unchanged():
    encoder = fitted()
    dense, categorical = raw_rows(encoder)
    ids, values = encoder.encode_categorical(categorical), encoder.encode_dense(dense)
    excluding = without_columns(encoder)
    blanked_dense, blanked_categorical = dense.copy(), categorical.copy()
    blanked_dense[:, 1], blanked_categorical[:, 2:6] = np.nan, MISSING_CATEGORY
    np.testing.assert_array_equal(
        excluding.encode_dense(dense).view(np.int32),
        encoder.encode_dense(blanked_dense).view(np.int32),
    )
    np.testing.assert_array_equal(
        excluding.encode_categorical(categorical), encoder.encode_categorical(blanked_categorical)
    )
    assert (ids[:, 2] != 1).any()
    assert (values[:, 1] != excluding.encode_dense(dense)[:, 1]).any()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("size",), "expected names of features"),
        (("age", "age"), "without repetition"),
        (("user",), "have vocabularies"),
    ],
    ids=["unknown", "twice", "with a vocabulary"],
)
def test_columns_that_cannot_be_excluded_are_refused(names, message):
    with pytest.raises(ContractError, match=message):
        fitted(excluded=names)


@pytest.mark.parametrize(
    "features",
    [
        Features(numeric=(), categorical=("file", "x", "x.npy", "1", "0", "Größe in €", "order")),
        Features(numeric=("arr_0", "a.b", "a"), categorical=()),
    ],
    ids=["no numeric ones", "no categorical ones"],
)
def test_columns_of_any_name_and_number_survive_disk(tmp_path, features):
    num_numeric, num_categorical = len(features.numeric), len(features.categorical)
    vocabularies, means = (
        [np.arange(10 * i, 11 * i) for i in range(num_categorical)],
        np.arange(num_numeric),
    )
    encoder = workflow_of(
        vocabularies, features, means=means.astype(np.float32), excluded=features.names[:1]
    )
    encoder.save(tmp_path)
    loaded = FeatureWorkflow.load(tmp_path)
    assert loaded.features == features
    assert loaded.excluded == features.names[:1]
    for left, right in zip(encoder.vocabularies, loaded.vocabularies, strict=True):
        np.testing.assert_array_equal(left, right)
    categorical = np.array([[10 * i for i in range(num_categorical)]] * 2).reshape(
        2, num_categorical
    )
    expected = [[1] + [3] * (num_categorical - 1)] * 2 if num_categorical else [[], []]
    assert loaded.encode_categorical(categorical).tolist() == expected
    dense = loaded.encode_dense(np.full((2, num_numeric), math.e - 1, np.float32))
    np.testing.assert_allclose(dense, [[0.0, 0.0, -1.0][:num_numeric]] * 2, atol=1e-6)


def test_workflow_survives_disk_to_last_bit(tmp_path):
    encoder = without_columns(with_evicted(fitted()))
    (tmp_path / "other").write_text("stays")
    encoder.save(tmp_path)
    loaded = FeatureWorkflow.load(tmp_path)
    for left, right in zip(encoder.vocabularies, loaded.vocabularies):
        assert right.dtype == np.int64
        np.testing.assert_array_equal(left, right)
    for name in ("means", "stds"):
        assert getattr(encoder, name).tobytes() == getattr(loaded, name).tobytes()
    for name in ("frequency_threshold", "excluded", "features"):
        assert getattr(encoder, name) == getattr(loaded, name)
    assert (tmp_path / "other").read_text() == "stays"


def rewrite(folder, **changes):
    path = folder / workflow.SETTINGS_FILE
    document = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in document.items() if v != "absent"}))


def damage(folder):
    path = folder / workflow.VOCABULARIES_FILE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "No such file"),
        (damage, "cannot be read"),
        (lambda f: (f / workflow.SETTINGS_FILE).write_text("{"), "cannot be read"),
        (lambda f: rewrite(f, format_version=5), "format_version 5, expected 6"),
        (lambda f: rewrite(f, means="absent"), "means"),
        (lambda f: rewrite(f, means=[1.0]), "expected 2 finite"),
    ],
    ids=["no folder", "corrupt vocabularies", "torn settings", "version 5", "no means", "one mean"],
)
def test_corrupt_workflow_is_refused(tmp_path, spoil, message):
    folder = tmp_path / "workflow"
    fitted().save(folder)
    spoil(folder)
    with pytest.raises(ContractError, match=message):
        FeatureWorkflow.load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabularies": (np.arange(3),) * 3}, "3 vocabularies, expected 4"),
        (
            {"vocabularies": (np.arange(3),) * 3 + (np.array([4, 5, 4]),)},
            "genres holds a category twice",
        ),
        (
            {"vocabularies": (np.arange(3),) * 3 + (np.array([4, -1, 5]),)},
            "genres holds values from -1 to 5",
        ),
        (
            {"vocabularies": (np.array([4, 2**52]),) + (np.arange(3),) * 3},
            "item holds values from 4 to 450359962737",
        ),
        ({"means": np.full(2, np.nan, np.float32)}, "expected 2 finite"),
        ({"stds": np.array([1, -1], np.float32)}, "std of age is -1.0, expected > 0"),
    ],
    ids=["25 columns", "twice", "mark of missing", "beyond 52 bits", "mean NaN", "std below 0"],
)
def test_unfitted_columns_are_refused(changes, message):
    with pytest.raises(ContractError, match=message):
        fitted(**changes)
