"""Choosing columns copies nothing, and is otherwise what pandas does."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from components.preprocessing.raw_partitions import LooseFrame


@pytest.fixture
def plain():
    random = np.random.default_rng(0)
    columns = {name: random.random(50) for name in "abc"} | {"d": np.arange(50), "e": np.arange(50, dtype=np.float32)}
    return pd.DataFrame(columns)


@pytest.fixture
def loose(plain):
    return LooseFrame({name: plain[name].to_numpy(copy=True) for name in plain}, copy=False)


@pytest.mark.parametrize("names", [["c", "a"], list("edcba")])
def test_chosen_columns_are_pandas_but_the_same_memory(plain, loose, names):
    chosen = loose[names]
    pd.testing.assert_frame_equal(pd.DataFrame(chosen), plain[names])
    assert isinstance(chosen, LooseFrame)
    assert all(np.shares_memory(chosen[name].to_numpy(), loose[name].to_numpy()) for name in names)
    again = chosen.reset_index(drop=True)
    assert all(np.shares_memory(again[name].to_numpy(), loose[name].to_numpy()) for name in names)
