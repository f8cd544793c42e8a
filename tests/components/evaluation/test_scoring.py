"""Tests of the scored rows: they are aligned with the raw rows, and new values are marked."""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.evaluation.scoring import (
    UNKNOWN_ITEM,
    candidate_scorer,
    champion_scorer,
    encoded_batches,
    parquet_files,
    raw_batches,
    score_holdout,
)
from evergreen.config.data import ColumnNames
from evergreen.config.features import MISSING_CATEGORY, Features, ListOptions
from evergreen.contracts.raw_rows import EVENT_TIME, LABEL, POSITION, REQUEST_ID
from evergreen.storage.uris import local_path
from testing.recommenders import SHOP, shop_with
from tests.support.rounded import rounded


@pytest.fixture
def made(make_round):
    return make_round(900)


def score(made, **changes):
    arguments = {
        "counts": (len(made.labels), len(made.labels)),
        "score_candidate": candidate_scorer(made.model),
        "score_champion": None,
        "slot_sizes": made.training_set.slot_sizes,
        "named": ColumnNames(),
        "new_ids": [np.zeros(0, np.int64)] * 4,
        **changes,
    }
    return score_holdout(
        made.raw.holdout_uri, made.training_set.holdout_uri, features=SHOP.features, **arguments
    )


def test_rows_keep_their_order_labels_times_and_categories(made):
    rows = score(made)
    tables = [pq.read_table(file) for file in parquet_files(local_path(made.raw.holdout_uri))]
    times = np.concatenate(
        [[t.timestamp() for t in table[EVENT_TIME].to_pylist()] for table in tables]
    )
    np.testing.assert_allclose(rows.event_seconds, times, atol=1e-6)
    np.testing.assert_array_equal(rows.labels, made.labels)
    np.testing.assert_array_equal(rows.categories, made.categorical)
    names = np.concatenate([table[REQUEST_ID].to_pylist() for table in tables])
    assert rows.groups.tolist() == [list(dict.fromkeys(names)).index(name) for name in names]
    assert rows.champion is None


def test_rows_of_user_are_one_group_and_unknown_users_group_by_request(made):
    rows, by_request = score(made, named=ColumnNames(user="user")), score(made).requests
    users = made.categorical[:, 2]
    assert (users == MISSING_CATEGORY).any()
    expected = [
        ("request", by_request[i]) if user == MISSING_CATEGORY else user
        for i, user in enumerate(users)
    ]
    assert (
        len(set(zip(expected, rows.groups.tolist())))
        == len(set(expected))
        == len(set(rows.groups.tolist()))
    )


def test_row_is_new_if_it_holds_id_of_this_round(made):
    """The new ids include appended ids, the last ids of a vocabulary, and reused ids."""
    vocabularies = made.workflow.vocabularies
    new = [
        [len(v) + 2 - i % 3, 3 + (len(v) * i) // 40][: i % 3] for i, v in enumerate(vocabularies)
    ]
    rows = score(made, new_ids=[np.array(ids, np.int64) for ids in new])
    expected = np.zeros(900, dtype=bool)
    for values, slot in zip(made.categorical.T, SHOP.features.positions.slots):
        expected |= np.isin(values, [vocabularies[slot][i - 3] for i in new[slot]])
    np.testing.assert_array_equal(rows.has_new_category, expected)
    assert 0 < expected.sum() < 900


def test_row_whose_columns_got_no_id_is_not_new_even_in_empty_column(made):
    # A column without values has only the two reserved ids. Missing and unknown values are not new
    # categories.
    scored = score(made)
    assert not scored.has_new_category.any()
    assert not scored.has_unknown_category.any()


@pytest.mark.parametrize("batch_rows", [1, 64, 10_000])
def test_scores_do_not_depend_on_batches(made, batch_rows):
    champion = champion_scorer(made.release_champion(made.planted), SHOP.features)
    candidate = candidate_scorer(made.model)
    raw, encoded = local_path(made.raw.holdout_uri), local_path(made.training_set.holdout_uri)
    expected = made.scores(made.planted)
    by_graph = np.concatenate(
        [champion(batch) for batch in raw_batches(raw, SHOP.features, batch_rows)]
    )
    by_weights = np.concatenate(
        [candidate(batch) for batch in encoded_batches(encoded, SHOP.features, batch_rows)]
    )
    np.testing.assert_allclose(by_graph, expected, atol=1e-5)
    np.testing.assert_allclose(by_weights, expected, atol=1e-5)


@pytest.mark.parametrize("numbers", ["float16", "int8"])
def test_candidate_is_scored_with_its_table_as_it_would_be_served(make_round, numbers):
    made = make_round(900)
    model = replace(made.model, recommender=shop_with(release={"tables": numbers}))
    categories = tuple(rounded(each[:, None], numbers)[:, 0] for each in made.planted.categories)
    expected = made.scores(replace(made.planted, categories=categories))
    found = score(made, score_candidate=candidate_scorer(model)).candidate
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_missing_values_reach_graph_as_in_contract(made):
    (batch, *_) = raw_batches(local_path(made.raw.holdout_uri), SHOP.features)
    n = len(batch.labels)
    np.testing.assert_array_equal(batch.dense, made.dense[:n])  # NaN for a null in the log
    np.testing.assert_array_equal(batch.categorical, made.categorical[:n])  # -1 represents a null
    assert np.isnan(batch.dense).any()
    assert (batch.categorical == -1).any()


def test_rows_with_lists_are_marked_by_ids_of_every_position(tmp_path):
    features = Features(
        numeric=(),
        categorical=("item",),
        lists=("last", "tags"),
        list_options={
            "last": ListOptions(max=2, table="item"),
            "tags": ListOptions(max=2, keep="oldest"),
        },
    )
    raw = {
        LABEL: [0, 1, 0, 1],
        EVENT_TIME: [datetime(2026, 5, 1)] * 4,
        REQUEST_ID: [*"abcd"],
        POSITION: [1] * 4,
    }
    raw |= {
        "item": [9, None, 9, 8],
        "last": [[7, 8, 9], None, [8], []],
        "tags": [[1, 2, 3], [4], None, [5]],
    }
    ids = np.array([[3, 5, 0, 3, 0], [3, 0, 0, 4, 0], [3, 4, 3, 0, 2], [2, 0, 0, 3, 3]])
    for name, table in (
        ("raw", raw),
        ("encoded", {LABEL: raw[LABEL], **dict(zip(features.position_names, ids.T))}),
    ):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(table), tmp_path / name / "part.parquet")
    scored = score_holdout(
        *((tmp_path / name).as_uri() for name in ("raw", "encoded")),
        features=features,
        named=ColumnNames(item="item"),
        counts=(4, 4),
        score_candidate=lambda batch: batch.ids.sum(axis=1).astype(np.float32),
        score_champion=lambda batch: (
            (batch.categorical * [1, 10, 100, 1000, 10_000]).sum(axis=1).astype(np.float32)
        ),
        slot_sizes=[6, 5],
        new_ids=[np.array([5]), np.array([4])],
    )
    assert scored.item_newness.tolist() == [0, 0, 0, UNKNOWN_ITEM]
    assert scored.has_new_category.tolist() == [True, True, False, False]
    assert scored.has_unknown_category.tolist() == [False, False, True, True]
    elements = [[9, 8, 9, 1, 2], [-1, -1, -1, 4, -1], [9, 8, -1, -1, -1], [8, -1, -1, 5, -1]]
    assert (scored.categories.tolist(), scored.columns) == (
        elements,
        ("item", "last", "last", "tags", "tags"),
    )
    assert scored.candidate.tolist() == ids.sum(axis=1).tolist()
    assert scored.champion.tolist() == [21989, -6111, -11011, -5102]
