"""Tests of rollbacks: their target versions, rollbacks under load, and refusals."""

import dataclasses
import shutil

import pytest

from controller.rollback import main, rollback
from evergreen.registry.models import champion, graph_folder
from evergreen.registry.promotion_journal import current
from evergreen.runtime.errors import ContractError
from evergreen.serving.repository.triton_config import ServingOptions, read_options
from evergreen.storage.uris import local_path
from testing.served_names import CANDIDATE_NAME
from tests.support.deployments import release
from tests.support.real_servers import live_version, under_load


def test_rollback_makes_previous_version_live_and_next_release_counts_on(deployment):
    deployment.release(1), deployment.release(2)
    entry = deployment.rollback()
    assert (entry.action, entry.version, entry.previous_version) == ("rollback", 1, 2)
    assert champion(deployment.settings.store, "current").model_id == "model-1"
    with pytest.raises(ContractError, match="version 1 is the first release"):
        deployment.rollback()
    deployment.check_all_is_well(1)
    done = deployment.release(3)
    assert (done.version, done.previous_version) == (3, 1)
    deployment.check_all_is_well(3)


@pytest.mark.parametrize("num_kept", [1, 2])
def test_copied_registry_rolls_back_by_its_own_files_without_original(
    deployment, tmp_path, num_kept
):
    deployment.settings = dataclasses.replace(deployment.settings, num_kept=num_kept)
    deployment.release(1), deployment.release(2)
    original, copy = deployment.settings.store, tmp_path / "a copy"
    shutil.copytree(original, copy)
    for path in [p for p in original.rglob("*") if p.is_file()]:
        path.write_bytes(b"another's")
    deployment.settings = dataclasses.replace(deployment.settings, store=copy)
    entry = deployment.rollback()
    assert (entry.version, local_path(entry.model_uri)) == (1, copy / "models" / "model-1")
    assert local_path(champion(copy, "current").graph_uri).parent == graph_folder(copy, 1)
    deployment.check_all_is_well(1)


def test_rollback_to_version_gone_from_repository_restores_it_under_load(
    make_candidate, settings, client, triton, raw_rows, repository
):
    for seed in (1, 2, 3):
        release(
            *make_candidate(settings.store, seed),
            settings=dataclasses.replace(settings, num_kept=2),
        )
    assert 1 not in repository.versions()
    with under_load([triton.grpc_url], raw_rows(8), until=1) as traffic:
        assert rollback(settings, to_version=1, reason="auc fell").version == 1
    assert traffic.failures == []
    assert traffic.answers[0] == sorted(traffic.answers[0], reverse=True), (
        "no request may get a newer version after the rollback"
    )
    assert live_version(client, raw_rows(3)) == 1
    assert not (triton.repository / CANDIDATE_NAME).exists()


def test_person_on_call_names_store_and_reason_and_nothing_else(
    deploy, client, settings, raw_rows, capsys, caplog
):
    deploy(1), deploy(2)
    flags = ["--store", settings.store.as_uri(), "--reason", "drill"]
    assert main(flags) == 0
    assert "version 1 is live again (was 2)" in capsys.readouterr().out
    assert live_version(client, raw_rows(3)) == 1
    assert main([*flags, "--to", "2", "--who", "anna"]) == 0
    assert (live_version(client, raw_rows(3)), current(settings.store).who) == (2, "anna")
    assert main([*flags, "--to", "9"]) == 2
    assert "error: version 9 was never released" in capsys.readouterr().err
    assert main([*flags, "--to", "2"]) == 2
    assert main([*flags, "--to", "1", "--triton-urls", ""]) == 0
    assert f"{settings.triton_urls[0]} answers but is not in --triton-urls" in caplog.text


def test_flags_override_what_last_release_recorded(make_candidate, unserved, capsys):
    settings = unserved
    for seed in (1, 2):
        release(*make_candidate(settings.store, seed), settings=settings)
    flags = ["--store", settings.store.as_uri(), "--reason", "drill"]
    assert main([*flags, "--triton-urls", "127.0.0.1:9"]) == 3
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert current(settings.store).version == 2
    (settings.store / "serving.json").unlink()
    assert main(flags) == 2
    assert "serving.json is absent" in capsys.readouterr().err
    assert main([*flags, "--repository", settings.repository, "--triton-urls", ""]) == 0


def test_rollback_to_version_without_copy_is_refused(deployment):
    for seed in (1, 2, 3):
        deployment.release(seed)
    shutil.rmtree(graph_folder(deployment.settings.store, 1))
    with pytest.raises(
        ContractError, match="version 1 is no longer in the repository, and .* contains no copy"
    ):
        deployment.rollback(to_version=1)
    assert deployment.entries()[-1].action == "withdrawn"
    deployment.check_all_is_well(3)


def test_rollback_to_corrupt_graph_that_left_repository_is_refused(deployment):
    for seed in (1, 2, 3):
        deployment.release(seed)
    graph = graph_folder(deployment.settings.store, 1) / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ContractError, match="graph .* has sha256"):
        deployment.rollback(to_version=1)
    assert [max(server.loaded()) for server in deployment.servers] == [3, 3]
    assert deployment.repository.versions() == [2, 3]


def test_rollback_restores_last_serving_options(deployment, make_candidate):
    deployment.release(1)
    wide = dataclasses.replace(deployment.settings, options=ServingOptions(instances=5))
    release(*make_candidate(deployment.settings.store, 2), settings=wide)
    deployment.rollback()
    assert read_options(deployment.repository.read_config()).instances == 5


def test_folder_of_unknown_origin_is_skipped(deployment):
    deployment.release(1)
    shutil.copytree(
        deployment.repository.objects.local("click_model/1"),
        deployment.repository.objects.local("click_model/2"),
    )
    left_over = local_path(deployment.repository.uri) / CANDIDATE_NAME / "2" / "model.onnx"
    left_over.parent.mkdir(parents=True)
    left_over.write_bytes(b"half")
    done = deployment.release(2)
    assert (done.version, done.previous_version) == (3, 1)
    deployment.check_all_is_well(3)
    assert [server.loaded() for server in deployment.servers] == [[3], [3]]
