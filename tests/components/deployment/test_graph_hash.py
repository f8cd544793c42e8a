"""The hash table, looked up as its docstring says, against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.deployment.graph import encoding as graph_hash
from components.deployment.graph.encoding import CHOICES, EMPTY, build_table
from components.runtime.errors import ContractError


def look_up(table, key):
    cells = [start + key % prime for prime, start in zip(table.primes, table.starts)]
    return next((int(table.values[cell]) for cell in cells if table.keys[cell] == key), None)


def require_holds(table, keys, values):
    assert [look_up(table, key) for key in keys.tolist()] == values.tolist()
    taken = table.keys != EMPTY
    assert taken.sum() == len(keys)
    assert not table.values[~taken].any()
    assert table.keys[0] == EMPTY
    assert len(table.keys) == len(table.values) == 1 + sum(table.primes)


@settings(max_examples=50, deadline=None)
@given(keys=st.sets(st.integers(0, 2**40), max_size=400), strangers=st.sets(st.integers(0, 2**40), max_size=50))
def test_finds_every_key_and_nothing_else(keys, strangers):
    keys = np.array(sorted(keys, key=hash), np.int64)
    values = (np.arange(len(keys)) * 7 - 1).astype(np.int32)
    table = build_table(keys, values)
    require_holds(table, keys, values)
    assert {look_up(table, key) for key in strangers - set(keys.tolist())} <= {None}


@pytest.mark.parametrize("step", [1, 2**33, 9973, 2**33 + 1], ids="step {}".format)
def test_regular_keys_find_their_places_too(step):
    keys = (np.arange(26)[:, None] * 2**33 + np.arange(800) * step % 2**33).ravel()
    keys = np.unique(keys)
    values = np.arange(len(keys), dtype=np.int32) + 1
    table = build_table(keys, values)
    require_holds(table, keys, values)
    assert len(table.keys) < 3 * len(keys) + 30


def test_takes_no_more_cells_than_its_load_says_and_always_the_same():
    keys = np.unique(np.random.default_rng(0).integers(0, 2**40, 100_000))
    values = np.arange(len(keys), dtype=np.int32)
    first, again = build_table(keys, values), build_table(keys, values)
    assert len(keys) / len(first.keys) == pytest.approx(graph_hash.LOAD, rel=0.01)
    assert len(first.primes) == CHOICES
    np.testing.assert_array_equal(first.keys, again.keys)
    np.testing.assert_array_equal(first.values, again.values)


def test_grows_where_the_keys_do_not_fit(monkeypatch):
    monkeypatch.setattr(graph_hash, "LOAD", 3.0)
    keys = np.random.default_rng(1).permutation(500).astype(np.int64)
    require_holds(build_table(keys, keys.astype(np.int32)), keys, keys)


def test_more_keys_than_cells_can_be_numbered_are_refused(monkeypatch):
    monkeypatch.setattr(graph_hash, "MAX_KEYS", 9)
    with pytest.raises(ContractError, match="10 entries, expected at most 9"):
        build_table(np.arange(10), np.arange(10, dtype=np.int32))
