"""The command lines that the demo starts are ones that their programs take."""

from __future__ import annotations

import pytest

from components.deployment import rollback, verify
from inference_client import __main__ as client
from monitoring.flags import build_parser, read_settings
from monitoring.settings import MonitorSettings
from monitoring.uploader import UploaderSettings
from pipelines.local.plan import DemoSettings, Services, plan_for_world
from pipelines.local.runner import LocalFolders


@pytest.fixture
def services(tmp_path):
    settings = DemoSettings(folder=tmp_path / "a demo")
    folders = LocalFolders(root=settings.folder)
    return Services(settings=settings, plan=plan_for_world(settings), folders=folders, triton_url="127.0.0.1:8001")


def test_monitor_and_uploader_take_their_flags_as_settings(services):
    def settings(kind, command):
        parser = build_parser(kind, prog="", description="")
        return read_settings(kind, parser, command[3:], environment={}, prefix="NONE_")

    monitor = settings(MonitorSettings, services.monitor_command())
    assert (monitor.acting.notify_only, monitor.store) == ("data_drift", services.folders.store)
    assert settings(UploaderSettings, services.uploader_command()).archive == services.archive


def test_traffic_rollback_and_proof_take_their_flags(services):
    assert client.build_parser().parse_args(services.replay_command()[3:]).server == services.triton_url
    back = [*services.rollback_command("why"), "--to", "1"]
    assert rollback.build_parser().parse_args(back[3:]).to == 1
    assert verify.build_parser().parse_args(services.verify_command(2)[3:]).version == 2
