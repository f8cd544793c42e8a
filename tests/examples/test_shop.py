"""The simulated shop: its log is the same in every run, holds what the file beside it names, and can be learned."""

import pyarrow.parquet as pq

from examples.shop.world import write_clicks
from pipelines.recommender_file.form import read_recommender
from tests.support.paths import REPOSITORY


def test_the_shops_log_is_what_its_recommender_describes(tmp_path):
    found = [write_clicks(tmp_path / name, rows=8000, seed=1) for name in ("one.parquet", "other.parquet")]
    assert found[0] == found[1]
    assert 0.75 < found[0]["best_auc"] < 0.9
    assert 0.15 < found[0]["clicks"] / found[0]["rows"] < 0.25
    table, other = (pq.read_table(tmp_path / name) for name in ("one.parquet", "other.parquet"))
    assert table.equals(other)
    shop = read_recommender(REPOSITORY / "examples/shop/recommender.yaml")
    assert {*shop.features.names, shop.data.label, shop.data.event_time} <= set(table.column_names)
    assert 0.03 < table["price"].null_count / table.num_rows < 0.07
