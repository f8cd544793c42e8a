"""The command lines that the demo starts are ones that their programs take."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts.features import Features
from components.runtime.errors import ContractError
from pipelines.local.plan import columns_to_change, plan_for_data


def test_what_a_users_own_file_names_is_not_overwritten_and_each_column_that_drifts_must_be_one(services):
    own = services.plan.base.with_settings({"gate.min_auc": 0.7, "training.seed": 1})
    rows = {"replay_rows": 2_000, "lake_rows": 3_000, "clicks": 600}
    settings = plan_for_data(services.settings, own, **rows).recommender().settings
    assert (settings["gate"]["min_auc"], settings["training"]["seed"]) == (0.7, 1)
    with pytest.raises(ContractError, match="drift column 'I99' is no feature, expected I9"):
        plan_for_data(replace(services.settings, drift_columns=("I99",)), own, **rows)


def test_the_columns_that_change_are_numeric_or_have_few_categories(tmp_path):
    features = Features(numeric=("price",), categorical=("item", "user"))
    table = pa.table({"price": [0.5] * 400, "item": [1, 2] * 200, "user": list(range(400))})
    pq.write_table(table, tmp_path / "replay.parquet")
    assert columns_to_change(tmp_path / "replay.parquet", features) == ("price", "item")
    only = Features(numeric=(), categorical=("user",))
    assert columns_to_change(tmp_path / "replay.parquet", only) == ("user",)
