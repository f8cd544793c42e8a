"""Tests of flipped bits in a version's files: the intact copy is used."""

import dataclasses
import os
import random

import pytest

from controller.__main__ import ReleaseController
from controller.baking import Baking
from controller.deployment_target import opened
from controller.inspection import DAY_SECONDS, RETRY_SECONDS, Inspection
from controller.watchdog import HEALTHY, SUSPECT, UNPROBED, Watchdog
from evergreen.contracts.serving import versions_of
from evergreen.registry.models import graph_folder, release_path
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.intact import find_corrupt, golden_rows
from evergreen.serving.repository.model_repository import ModelRepository, VersionFolders
from testing.controllers import run_now
from testing.served_names import MODEL_NAME, NAMES
from tests.support.deployments import release, start_canary
from tests.support.errors import raises
from tests.support.real_servers import live_version

FILES = ["golden.npz", "model.onnx", "model.py", "version.json"]


def flip(path, at=None):
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    at = len(content) // 2 if at is None else at
    content[at] ^= 4
    path.write_bytes(content)


def served(deployment, version, file):
    return deployment.repository.objects.root / MODEL_NAME / str(version) / file


def kept(deployment, version, file):
    return graph_folder(deployment.settings.store, version) / file


def is_intact(deployment, version):
    """Return whether both copies of the file are equal."""
    problems = find_corrupt(deployment.repository.published, deployment.settings.store, version)
    same = all(
        served(deployment, version, file).read_bytes()
        == kept(deployment, version, file).read_bytes()
        for file in FILES[:2]
    )
    return problems == [] and same


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(deployment):
    clock = Clock()
    timeouts = dataclasses.replace(
        deployment.settings.timeouts, clock=clock, sleep=lambda seconds: None
    )
    deployment.settings = dataclasses.replace(deployment.settings, timeouts=timeouts)
    return clock


@pytest.fixture
def inspection(deployment, clock):
    return Inspection(target=deployment.settings, start=run_now)


@pytest.mark.parametrize("file", FILES)
def test_corrupt_file_of_live_version_blocks_nothing_and_is_named(deployment, caplog, file):
    deployment.release(1), deployment.release(2)
    flip(served(deployment, 2, file))
    watchdog = Watchdog(target=deployment.settings)
    assert set(watchdog.check().values()) == {HEALTHY}
    if file == "golden.npz":
        assert f"{served(deployment, 2, file).as_uri()} has sha256" in caplog.text
        assert "another copy is used" in caplog.text
    assert deployment.rollback().version == 1
    deployment.check_all_is_well(1)
    deployment.release(3)
    deployment.check_all_is_well(3)


@pytest.mark.parametrize("file", FILES)
def test_corrupt_file_of_live_version_blocks_no_promotion(deployment, file):
    deployment.release(1)
    flip(served(deployment, 1, file))
    assert (
        release(*deployment.candidate(2), settings=deployment.settings, override="drill").version
        == 2
    )
    deployment.check_all_is_well(2)


@pytest.mark.parametrize("file", FILES)
def test_rollback_to_corrupt_version_replaces_file_from_store(deployment, caplog, file):
    deployment.release(1), deployment.release(2)
    flip(served(deployment, 1, file))
    assert deployment.rollback().version == 1
    deployment.check_all_is_well(1)
    assert is_intact(deployment, 1)
    assert "1" in caplog.text
    assert file in caplog.text


@pytest.mark.parametrize("file", FILES[:2])
def test_rollback_goes_on_where_stores_copy_is_corrupt_one(deployment, caplog, file):
    deployment.release(1), deployment.release(2)
    flip(kept(deployment, 1, file))
    assert deployment.rollback().version == 1
    deployment.check_all_is_well(1)
    assert is_intact(deployment, 1)
    assert str(kept(deployment, 1, "")).rstrip("/") in caplog.text


def test_damage_of_another_file_in_each_copy_is_mended_from_both(deployment):
    deployment.release(1), deployment.release(2)
    flip(served(deployment, 1, "golden.npz"))
    flip(kept(deployment, 1, "model.onnx"))
    assert deployment.rollback().version == 1
    deployment.check_all_is_well(1)
    assert is_intact(deployment, 1)


@pytest.mark.parametrize("file", FILES[:2])
def test_version_whose_two_copies_are_corrupt_is_refused_with_both_names(deployment, file):
    deployment.release(1), deployment.release(2)
    flip(served(deployment, 1, file))
    flip(kept(deployment, 1, file), at=40)
    with pytest.raises(ContractError) as caught:
        deployment.rollback()
    assert served(deployment, 1, file).as_uri() in str(caught.value)
    assert str(graph_folder(deployment.settings.store, 1)) in str(caught.value)
    deployment.check_all_is_well(2)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("version", [1, 2])
def test_inspection_mends_every_version_of_repository(deployment, inspection, version, file):
    deployment.release(1), deployment.release(2)
    inspection.step()
    assert inspection.healed == []
    flip(served(deployment, version, file))
    inspection.step()
    assert inspection.healed == [], "the next inspection is not due"
    inspection.target.timeouts.clock.now += DAY_SECONDS
    inspection.step()
    assert served(deployment, version, file).as_uri() in inspection.healed
    assert is_intact(deployment, version)
    deployment.check_all_is_well(2)


def test_inspection_mends_corrupt_copy_in_store(deployment, inspection):
    deployment.release(1)
    for file in FILES[:2]:
        flip(kept(deployment, 1, file))
    inspection.step()
    assert inspection.healed == [
        str(kept(deployment, 1, "model.onnx")),
        str(kept(deployment, 1, "golden.npz")),
    ]
    assert is_intact(deployment, 1)


def test_servers_load_mended_graph_of_live_version_again(deployment, inspection, raw_rows):
    deployment.release(1)
    right = deployment.servers[0].infer(MODEL_NAME, *raw_rows(5))[0]
    flip(
        served(deployment, 1, "model.onnx"),
        at=served(deployment, 1, "model.onnx").stat().st_size // 2,
    )
    for server in deployment.servers:
        # The server has read the corrupt graph, as after a restart.
        (server.graph(1)).write_bytes(served(deployment, 1, "model.onnx").read_bytes())
    inspection.step()
    for server in deployment.servers:
        assert server.graph(1).read_bytes() == kept(deployment, 1, "model.onnx").read_bytes()
        assert (server.infer(MODEL_NAME, *raw_rows(5))[0] == right).all()


def test_what_cannot_be_mended_is_said_at_each_round_and_looked_for_again(
    deployment, inspection, clock
):
    deployment.release(1)
    before = kept(deployment, 1, "golden.npz").read_bytes()
    flip(served(deployment, 1, "golden.npz"))
    flip(kept(deployment, 1, "golden.npz"), at=40)
    for _ in range(2):
        with raises(ContractError, "copy", "corrupt"):
            inspection.step()
    kept(deployment, 1, "golden.npz").write_bytes(
        before
    )  # a person restores the file from a backup
    with raises(ContractError, "copy", "corrupt"):
        inspection.step()
    clock.now += RETRY_SECONDS
    inspection.step()
    assert is_intact(deployment, 1)


def test_inspection_leaves_deployment_at_work_alone(deployment, inspection, clock):
    deployment.release(1)
    flip(served(deployment, 1, "golden.npz"))
    with (
        deployment.repository.locked(),
        raises(TemporaryError, "another controller", "at work"),
    ):
        inspection.step()
    clock.now += RETRY_SECONDS
    inspection.step()
    assert is_intact(deployment, 1)


@pytest.mark.parametrize("old", ["versions: 2", "backend", "max_batch_size"])
def test_corrupt_configuration_blocks_no_rollback_and_is_written_anew(deployment, inspection, old):
    deployment.release(1), deployment.release(2)
    path = deployment.repository.objects.root / MODEL_NAME / "config.pbtxt"
    right, config = path.read_bytes(), deployment.repository.read_config()
    path.write_bytes(right.replace(old.encode(), b"\xf2" + old.encode()[1:]))
    controller = ReleaseController(
        watchdog=Watchdog(target=deployment.settings),
        baking=Baking(target=deployment.settings),
        inspection=inspection,
    )
    controller.round()
    assert deployment.repository.read_config() == config
    path.write_bytes(right.replace(old.encode(), b"\xf2" + old.encode()[1:]))
    assert deployment.rollback().version == 1
    assert versions_of(path.read_text()) == [1]
    deployment.check_all_is_well(1)


def test_inspection_removes_prepared_versions_of_killed_steps_after_a_day(deployment, inspection):
    deployment.release(1)
    old, new = (deployment.settings.store / "prepared" / name for name in ("old", "new"))
    old.mkdir(), new.mkdir()
    os.utime(old, (0, 0))
    inspection.step()
    assert (old.exists(), new.exists()) == (False, True)


def test_golden_rows_of_another_version_are_no_copy(deployment):
    deployment.release(1), deployment.release(2)
    assert golden_rows(deployment.repository, deployment.settings.store, 2).expected.size
    flip(served(deployment, 2, "golden.npz"))
    kept(deployment, 2, "golden.npz").write_bytes(kept(deployment, 1, "golden.npz").read_bytes())
    with raises(ContractError, "golden rows", "version 2") as caught:
        golden_rows(deployment.repository, deployment.settings.store, 2)
    assert served(deployment, 2, "golden.npz").as_uri() in str(caught.value)
    assert str(kept(deployment, 2, "golden.npz")) in str(caught.value)


def test_corrupt_manifest_of_live_version_keeps_nobody_from_leaving_it(deployment):
    deployment.release(1), deployment.release(2), deployment.release(3)
    flip(release_path(deployment.settings.store, 3))
    assert deployment.rollback().version == 2
    assert deployment.rollback().version == 1, "a second rollback must restore an older version"
    deployment.check_all_is_well(1)


def test_release_manifest_that_is_corrupt_is_named(deployment, inspection):
    deployment.release(1)
    flip(release_path(deployment.settings.store, 1))
    with raises(ContractError, "releases/1.json"):
        inspection.step()


def test_corrupt_manifest_of_one_version_keeps_others_inspected(deployment, inspection):
    deployment.release(1), deployment.release(2)
    flip(release_path(deployment.settings.store, 1))
    flip(served(deployment, 2, "model.onnx"))
    with raises(ContractError, "releases/1.json"):
        inspection.step()
    assert inspection.healed == [served(deployment, 2, "model.onnx").as_uri()]
    assert is_intact(deployment, 2)


def test_inspection_of_holder_with_an_old_lease_replaces_nothing(deployment):
    deployment.release(1)
    flip(served(deployment, 1, "model.onnx"))
    corrupt = served(deployment, 1, "model.onnx").read_bytes()
    with opened(deployment.settings) as stale:
        (deployment.repository.objects.root / f".{MODEL_NAME}.lock").unlink()
        heir = ModelRepository(deployment.repository.objects, NAMES, holder="heir")
        with heir.locked(), raises(TemporaryError, "no longer holds"):
            Inspection(target=stale.settings, start=run_now).step()
    assert served(deployment, 1, "model.onnx").read_bytes() == corrupt


def test_corrupt_golden_rows_of_the_live_version_leave_the_canary_watched(deployment):
    deployment.release(1)
    start_canary(*deployment.candidate(2), settings=deployment.settings)
    for path in (served(deployment, 1, "golden.npz"), kept(deployment, 1, "golden.npz")):
        flip(path)
    found = Watchdog(target=deployment.settings).check()
    assert found == {
        f"{server.url} {name}": finding
        for server in deployment.servers
        for name, finding in ((NAMES.model, UNPROBED), (NAMES.canary, HEALTHY))
    }


def test_golden_rows_that_disk_cannot_read_are_read_from_other_copy(deployment, monkeypatch):
    deployment.release(1)

    def unreadable(folders, version):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(VersionFolders, "golden_rows", unreadable)
    assert golden_rows(deployment.repository, deployment.settings.store, 1).expected.size


def test_real_server_refuses_to_load_flipped_weights(
    deploy, settings, client, raw_rows, repository, triton
):
    """A comparison of golden rows would detect few flipped bits in weights."""
    if not triton.alive():
        triton.start()
    deploy(1)
    before = client.infer(MODEL_NAME, *raw_rows(5))[0]
    path = repository.objects.root / MODEL_NAME / "1" / "model.onnx"
    random_, content = random.Random(3), path.read_bytes()
    for _ in range(3):
        path.write_bytes(content)
        flip(path, at=random_.randrange(len(content)))
        client.unload(MODEL_NAME)
        with pytest.raises(PermanentError, match=r"model.onnx has sha256 \w{64}, expected"):
            client.load(MODEL_NAME)
    assert set(Watchdog(target=settings).check().values()) == {SUSPECT}
    Inspection(target=settings, start=run_now).step()
    assert live_version(client, raw_rows(5)) == 1
    assert (client.infer(MODEL_NAME, *raw_rows(5))[0] == before).all()


def test_inspection_that_ends_by_a_defect_is_reported_and_tried_again(
    deployment, inspection, clock, monkeypatch
):
    deployment.release(1), deployment.release(2)
    with monkeypatch.context() as patched:
        patched.setattr("controller.inspection.find_corrupt", lambda *_: {}["graph"])
        with raises(PermanentError, "the inspection failed", "KeyError"):
            inspection.step()
    flip(served(deployment, 2, "model.onnx"))
    clock.now += DAY_SECONDS
    inspection.step()
    assert len(inspection.healed) == 1
