"""The command lines that the demo starts are ones that their programs take."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts.features import Features
from components.deployment import controller, promote, verify
from components.runtime.errors import ContractError
from inference_client import __main__ as client
from monitoring.flags import build_parser, read_settings
from monitoring.settings import InstallationSettings, with_rules
from monitoring.uploader import UploaderSettings
from pipelines.local.plan import columns_to_change, plan_for_data
from pipelines.recommender import check_settings
from tests.support.recommenders import accept_into


def test_monitor_and_uploader_take_their_flags_as_settings(services):
    def settings(kind, command):
        parser = build_parser(kind, prog="", description="")
        return read_settings(kind, parser, command[3:], environment={}, prefix="NONE_")

    installation = settings(InstallationSettings, services.monitor_command())
    assert installation.store == services.folders.store
    accept_into(services.folders.store, services.plan.recommender())
    assert with_rules(installation).judging.policies.notify_only == "data_drift"
    assert settings(UploaderSettings, services.uploader_command()).archive == services.archive


def test_every_room_reads_the_demos_recommender(services):
    check_settings(services.plan.recommender())
    data = plan_for_data(services.settings, services.plan.base, replay_rows=2_000, lake_rows=3_000, clicks=600)
    check_settings(data.recommender())


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


def test_traffic_controller_promotion_and_proof_take_their_flags(services):
    assert client.build_parser().parse_args(services.replay_command()[3:]).server == services.triton_url
    assert controller.build_parser().parse_args(services.controller_command()[3:]).metrics_urls == services.metrics_url
    assert promote.build_parser().parse_args(services.promote_command("m1", "why")[3:]).override == "why"
    assert verify.build_parser().parse_args(services.verify_command(2)[3:]).version == 2
