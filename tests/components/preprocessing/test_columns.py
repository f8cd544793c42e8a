"""Tests of columns that the default recommender lacks: their names, kinds and options."""

from collections import Counter
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.config.data import WEIGHT, ColumnNames
from evergreen.config.features import Features, ListOptions, NumericOptions
from evergreen.config.spec import Recommender
from evergreen.storage.uris import local_path
from tests.support.numeric_columns import EVERY_KIND, scaling_of, unscaled, values_of


def table_of(features, n=400):
    """Return rows with the categories 0 to 8. Some values are missing.

    The category 8 occurs exactly once in each column.
    """
    random = np.random.default_rng(3)
    categories = np.append(np.arange(n - 1) % 8, 8)
    return pa.table(
        {"label": pa.array(np.arange(n) % 3 == 0).cast(pa.int32())}
        | {
            name: pa.array(random.lognormal(size=n), pa.float32(), mask=np.arange(n) % 9 == 1)
            for name in features.numeric
        }
        | {
            name: pa.array(random.permutation(categories), pa.int64(), mask=random.random(n) < 0.1)
            for name in features.categorical
        }
    )


@pytest.mark.parametrize(
    "features",
    [
        Features(numeric=("item id",), categorical=("order", "labels", "encoded", "C1")),
        Features(numeric=(), categorical=("item",)),
        Features(numeric=("price",), categorical=()),
    ],
    ids=["names that libraries use", "no numeric ones", "no categorical ones"],
)
def test_rows_of_any_columns_are_encoded_like_workflow(write_raw, run_step, reading, features):
    table = table_of(features)
    path = write_raw(table)
    reading.change(path, recommender=Recommender(name="shop", features=features))
    encoded_set = run_step(path)
    assert encoded_set.recommender.features == features
    workflow = reading.workflow(encoded_set)
    assert workflow.features == features
    for size, name in zip(encoded_set.slot_sizes, features.categorical, strict=True):
        counts = {each["values"]: each["counts"] for each in table[name].value_counts().to_pylist()}
        assert size == 3 + sum(
            count >= 2 for category, count in counts.items() if category is not None
        )
    (written,) = local_path(encoded_set.train_uri).glob("*.parquet")
    found = pq.read_table(written)
    assert found.column_names == ["label", *features.names]
    for name, mean, std in zip(features.numeric, workflow.means, workflow.stds, strict=True):
        logged = np.log1p(np.nan_to_num(table[name].to_numpy(), nan=0.0).astype(np.float64))
        assert (mean, std) == pytest.approx((logged.mean(), logged.std(ddof=1)), rel=1e-5)
        np.testing.assert_allclose(found[name].to_numpy(), (logged - mean) / std, rtol=0, atol=1e-5)
    for name, vocabulary in zip(features.categorical, workflow.vocabularies, strict=True):
        ids = {category: 3 + i for i, category in enumerate(vocabulary.tolist())} | {None: 1}
        assert found[name].to_pylist() == [
            ids.get(category, 2) for category in table[name].to_pylist()
        ]


@pytest.mark.parametrize(("count", "excluded"), [(700, []), (1, []), (700, ["standard", "range"])])
def test_numeric_columns_are_transformed_by_their_options(
    count, excluded, write_raw, run_step, reading
):
    values = {name: values_of(name, count) for name in EVERY_KIND.numeric}
    table = pa.table(
        {"label": pa.array(np.arange(count) % 3 == 0).cast(pa.int32())}
        | {name: pa.array(each, pa.float32(), from_pandas=True) for name, each in values.items()}
        | {"item": pa.array(np.arange(count) % 5)}
    )
    path = write_raw(table)
    shop = Recommender(name="shop", features=EVERY_KIND)
    reading.change(path, recommender=shop, excluded_columns=excluded)
    encoded_set = run_step(path, partition_rows=100, processes=2)
    values |= dict.fromkeys(excluded, np.full(count, np.nan))
    workflow = reading.workflow(encoded_set)
    found = reading.table(encoded_set.train_uri)
    assert found.column_names == ["label", *values, "standard/missing", "constant/missing", "item"]
    for name, centre, scale in zip(values, workflow.means, workflow.stds, strict=True):
        before = unscaled(name, values[name])
        expected = scaling_of(name, before)
        assert (centre, scale) == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(
            found[name].to_numpy(), (before - expected[0]) / expected[1], rtol=1e-4, atol=1e-5
        )
    for name in ("standard", "constant"):
        np.testing.assert_array_equal(found[f"{name}/missing"].to_numpy(), np.isnan(values[name]))


def test_round_with_other_options_than_its_parents_is_refused(
    write_raw, run_step, reading, keep_as_model, capsys
):
    features = Features(numeric=("price",), categorical=("item",))
    path = write_raw(table_of(features))
    first = run_step(reading.change(path, recommender=Recommender(name="shop", features=features)))
    keep_as_model(local_path(first.workflow_uri), first.slot_sizes, "m1")
    changed = replace(features, numeric_options={"price": NumericOptions(fill=1.0)})
    reading.change(path, recommender=Recommender(name="shop", features=changed))
    run_step(path, run="run-2", parent="m1", expect=2)
    assert "change the options of ['price']" in capsys.readouterr().err


BUCKETED = {
    "spread": ("quantile_buckets(16)", 15),
    "few values": ("quantile_buckets(16)", 2),
    "one value": ("quantile_buckets(4)", 0),
    "clipped": ("quantile_buckets(8)", 3),
    "no value": ("quantile_buckets(4)", 0),
    "left out": ("quantile_buckets(4)", 0),
}
"""The transform of each column, and its number of boundaries."""


def bucketed_values(count, seed):
    random = np.random.default_rng(seed)
    spread = random.normal(size=count) * 10.0 ** random.integers(-30, 30, count)
    spread[:8] = np.array([1, -1]).repeat(4) * np.finfo(np.float32).max
    values = np.stack(
        [
            spread,
            random.choice([-1.0, -0.0, 0.0, 7.5], count),
            np.full(count, 3.25),
            random.normal(0, 5, count),
            np.full(count, np.nan),
            random.normal(size=count),
        ]
    ).astype(np.float32)
    values[:, 20::10] = np.nan
    return dict(zip(BUCKETED, values))


@pytest.mark.parametrize("others", [(), ("item",)], ids=["alone", "beside others"])
def test_bucketed_columns_get_numpys_quantiles_and_later_runs_keep_them(
    others, write_raw, run_step, reading, keep_as_model
):
    options = {name: NumericOptions(transform=(step,)) for name, (step, _) in BUCKETED.items()}
    options["clipped"] = NumericOptions(transform=("clip(-1..2)", *options["clipped"].transform))
    numeric = (*BUCKETED, *(("price",) if others else ()))
    features = Features(numeric=numeric, categorical=others, numeric_options=options)
    first, boundaries = None, {}
    for number, parent in enumerate((None, "m1")):
        values = bucketed_values(1000, number)
        table = table_of(Features(numeric=("price",), categorical=others), 1000).drop(
            [] if others else ["price"]
        )
        for name, column in values.items():
            table = table.append_column(name, pa.array(column, from_pandas=True))
        path = write_raw(table, name=f"raw {number}")
        shop = Recommender(name="shop", features=features)
        reading.change(path, recommender=shop, excluded_columns=["left out"])
        encoded = run_step(path, run=f"r{number}", parent=parent, partition_rows=150, processes=2)
        workflow = reading.workflow(encoded)
        found = reading.table(encoded.train_uri)
        assert found.column_names == ["label", *features.dense_inputs, *others, *BUCKETED]
        assert encoded.slot_sizes[len(others) :] == [19, 19, 7, 11, 7, 3]
        values["left out"][:] = np.nan
        values["clipped"] = np.clip(values["clipped"], -1, 2)
        for name, (step, num_boundaries) in BUCKETED.items():
            known = values[name][~np.isnan(values[name])].astype(np.float64)
            if first is None:
                n = int(step[17:-1])
                quantiles = (
                    np.quantile(known, np.arange(1, n) / n, method="higher")
                    if len(known)
                    else known
                )
                boundaries[name] = np.unique(quantiles[quantiles > known.min(initial=np.inf)])
                assert len(boundaries[name]) >= num_boundaries
            np.testing.assert_array_equal(workflow.boundaries[name], boundaries[name])
            ids = 3 + np.searchsorted(
                boundaries[name], values[name].astype(np.float64), side="right"
            )
            np.testing.assert_array_equal(
                found[name].to_numpy(), np.where(np.isnan(values[name]), 1, ids)
            )
        if first is None:
            first = encoded
            keep_as_model(local_path(first.workflow_uri), first.slot_sizes, "m1")
    assert encoded.new_categories[len(others) :] == [0] * len(BUCKETED)


LISTS = Features(
    numeric=("price",),
    categorical=("item",),
    lists=("last", "tags"),
    list_options={
        "last": ListOptions(max=2, keep="oldest", table="item"),
        "tags": ListOptions(max=3, pool="sum"),
    },
)


@pytest.mark.parametrize(
    "left_out", [["tags"], ["item", "last"]], ids=["own table", "shared table"]
)
def test_list_elements_count_and_are_encoded_by_vocabulary_of_their_table(
    write_raw, run_step, reading, left_out
):
    random = np.random.default_rng(1)
    lists = [
        [random.integers(0, 30, random.integers(0, 6)).tolist() or None for _ in range(400)]
        for _ in range(2)
    ]
    table = table_of(Features(numeric=("price",), categorical=("item",)))
    for name, values in zip(LISTS.lists, lists):
        table = table.append_column(name, pa.array(values, pa.list_(pa.int64())))
    weights = random.random(400).astype(np.float32)
    path = write_raw(table.append_column(WEIGHT, pa.array(weights)))
    described = Recommender(name="shop", features=LISTS, data=ColumnNames(weight="w"))
    reading.change(path, recommender=described, excluded_columns=left_out)
    encoded_set = run_step(path, partition_rows=90, processes=2)
    last, tags = ([each or [] for each in values] for values in lists)
    positions = [
        [[each] for each in table["item"].to_pylist()],
        [each[:2] for each in last],
        [each[-3:] for each in tags],
    ]
    seen = [
        Counter(e for row in chain(*of) for e in row if e is not None)
        for of in (positions[:2], positions[2:])
    ]
    vocabularies = [
        [] if name in left_out else frequent(counts) for name, counts in zip(("item", "tags"), seen)
    ]
    assert [each.tolist() for each in reading.workflow(encoded_set).vocabularies] == vocabularies
    found = reading.table(encoded_set.train_uri)
    assert found.column_names == [
        "label",
        "price",
        "item",
        "last/0",
        "last/1",
        "tags/0",
        "tags/1",
        "tags/2",
        WEIGHT,
    ]
    np.testing.assert_array_equal(found[WEIGHT].to_numpy(), weights)
    for name, rows, slot, width in zip(("item", *LISTS.lists), positions, (0, 0, 1), (1, 2, 3)):
        known = {category: 3 + position for position, category in enumerate(vocabularies[slot])}
        absent = 1 if name == "item" else 0
        ids = [
            [absent if e is None or name in left_out else known.get(e, 2) for e in row]
            for row in rows
        ]
        expected = [row + [absent] * (width - len(row)) for row in ids]
        columns = [found[each].to_pylist() for each in LISTS.positions_of(name)]
        assert [list(row) for row in zip(*columns)] == expected


def frequent(counts):
    return sorted(
        (each for each, count in counts.items() if count >= 2),
        key=lambda each: (-counts[each], each),
    )
