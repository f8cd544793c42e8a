"""The command lines that the demo starts are ones that their programs take."""

from __future__ import annotations

import pytest

from components.deployment import rollback, verify
from inference_client import __main__ as client
from monitoring.flags import build_parser, read_settings
from monitoring.settings import InstallationSettings, with_rules
from monitoring.uploader import UploaderSettings
from pipelines.local.plan import DemoSettings, Services, plan_for_data, plan_for_world
from pipelines.local.runner import LocalFolders
from pipelines.recommender import check_settings
from tests.support.recommenders import accept_into


@pytest.fixture
def services(tmp_path):
    settings = DemoSettings(folder=tmp_path / "a demo")
    folders = LocalFolders(root=settings.folder)
    return Services(settings=settings, plan=plan_for_world(settings), folders=folders, triton_url="127.0.0.1:8001")


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
    data = plan_for_data(services.settings, replay_rows=2_000, lake_rows=3_000, clicks=600)
    check_settings(data.recommender())


def test_traffic_rollback_and_proof_take_their_flags(services):
    assert client.build_parser().parse_args(services.replay_command()[3:]).server == services.triton_url
    back = [*services.rollback_command("why"), "--to", "1"]
    assert rollback.build_parser().parse_args(back[3:]).to == 1
    assert verify.build_parser().parse_args(services.verify_command(2)[3:]).version == 2
