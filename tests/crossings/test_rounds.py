"""Three rounds through the real steps: what each one learned and was judged by, counted where training reads it."""

from __future__ import annotations

from collections import Counter
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts.criteo import FEATURES
from components.contracts.raw_rows import EVENT_TIME, REQUEST_ID, ROW
from components.storage.uris import local_path
from components.training.rows import RowFolder, open_rows
from inference_client.simulation.lake import write_lake
from inference_client.simulation.world import World

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def three(chain, tmp_path_factory):
    """The chain's two rounds and a third one, which starts from scratch."""
    later = chain.copied_to(tmp_path_factory.mktemp("three rounds"))
    later.settings = {**later.settings, "extraction": {**later.settings["extraction"], "replay_share": 0}}
    write_lake(World.create(seed=3), str(later.root / "lake"), rows=1000, days=1, last_day=date(2026, 1, 6), seed=9)
    full = later.turn_to_training("full", parent="none")
    return later, [*chain.rounds, later.turn_to_training("round-3")], full


def _keys(uri):
    tables = [pq.ParquetFile(path).read([REQUEST_ID, ROW]) for path in sorted(local_path(uri).glob("*.parquet"))]
    return [key for table in tables for key in zip(*(table[name].to_pylist() for name in (REQUEST_ID, ROW)))]


def _learned(this, cache):
    """The identities of the rows that training reads of a round, which must be as many as it reads."""
    encoded = this.preprocessing
    features = encoded.recommender.features
    folder = RowFolder(path=local_path(encoded.train_uri), num_rows=encoded.num_train_rows, features=features)
    rows = open_rows([folder], encoded.slot_sizes, cache)
    keys = _keys(this.extraction.train_uri)
    raw = [pq.ParquetFile(path).read() for path in sorted(local_path(this.extraction.train_uri).glob("*.parquet"))]
    assert len(rows) == len(keys) == this.training.num_train_rows
    np.testing.assert_array_equal(rows.labels, pa.concat_tables(raw)["label"].to_numpy())
    return keys


def _lake(chain):
    table = pa.concat_tables([pq.ParquetFile(path).read() for path in sorted((chain.root / "lake").rglob("*.parquet"))])
    assert set(FEATURES) <= set(table.column_names)
    return dict(zip(zip(table[REQUEST_ID].to_pylist(), table[ROW].to_pylist()), table[EVENT_TIME].to_pylist()))


def test_a_line_learns_each_row_once_and_those_that_judged_a_round_in_the_next(three, tmp_path):
    chain, rounds, _ = three
    learned = [_learned(this, tmp_path) for this in rounds]
    judging = [_keys(this.extraction.holdout_uri) for this in rounds]
    assert set(Counter(key for keys in learned for key in keys).values()) == {1}
    for before, after in zip(judging, learned[1:]):
        assert len(before) > 100
        assert set(before) <= set(after)
    assert {key for keys in learned for key in keys} | set(judging[-1]) == _lake(chain).keys()


def test_a_run_from_scratch_learns_the_whole_lake_and_is_judged_by_rows_that_the_live_model_did_not_learn(
    three, tmp_path
):
    chain, rounds, full = three
    learned, judging, lake = _learned(full, tmp_path), _keys(full.extraction.holdout_uri), _lake(chain)
    assert full.training.parent_model_id is None
    assert full.extraction.champion_model_id == rounds[1].training.model_id
    assert full.extraction.window_start is None
    assert sorted([*learned, *judging]) == sorted(lake)
    live = {key for this in rounds[:2] for key in _learned(this, tmp_path)}
    assert judging
    assert not live & set(judging)
    assert min(lake[key] for key in judging) > max(lake[key] for key in live | set(learned))
