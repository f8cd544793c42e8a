"""A release that succeeds: what is served, recorded and kept once it is done."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from components.contracts.manifests import Release
from components.contracts.serving import MODEL_NAME, versions_of
from components.deployment.graph.files import graph_sha256
from components.deployment.release import ReleaseSettings, release
from components.deployment.repository.triton_config import ServingOptions, read_options
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.store.models import champion, graph_folder, read_serving_place, release_path
from components.store.promotion_journal import read_journal
from tests.support.file_triton import FileTriton
from tests.support.real_servers import live_version, under_load


@pytest.mark.e2e
def test_first_release_is_served_recorded_and_is_the_next_runs_champion(deploy, client, raw_rows, settings, triton):
    done = deploy(1)
    assert (done.version, done.previous_version, done.parity_rows) == (1, None, 60)
    assert done.parity_max_abs_diff <= 1e-5
    assert live_version(client, raw_rows(5)) == 1
    assert Release.read(release_path(settings.store, 1)) == done == champion(settings.store, "current")
    [entry] = read_journal(settings.store)
    assert (entry.action, entry.version, entry.trigger_id, entry.model_id) == ("release", 1, "drift-7", "model-1")
    assert sorted(p.name for p in triton.repository.iterdir() if p.is_dir()) == [MODEL_NAME]


def test_the_journal_names_who_why_and_every_hash_before_a_server_is_told(world):
    told = []

    class Watched(FileTriton):
        """Notes how the journal looked whenever a server was told to load something."""

        def load(self, name):
            told.append([entry.action for entry in world.entries()])
            super().load(name)

    settings = dataclasses.replace(world.settings, who="run-7", triton_urls=world.settings.triton_urls[:1])
    done = release(
        *world.candidate(1),
        dataclasses.replace(
            settings, connect=lambda url: Watched(url, repository=settings.repository, state=world.state)
        ),
    )
    assert told == [["intent"], ["intent"]], "the rehearsal and the switch"
    intent, line = world.entries()
    assert intent.sha256 == line.sha256 == done.sha256
    assert sorted(done.sha256) == ["data", "graph", "weights", "workflow"]
    assert done.sha256["graph"] == graph_sha256(local_path(done.graph_uri).parent)
    assert done.sha256["data"] == done.raw_digest
    assert (line.who, line.decision, line.reason) == ("run-7", "pass", "auc is high enough")


def test_graph_and_golden_rows_are_kept_in_the_store_apart_from_what_is_served(world):
    done = world.release(1)
    kept, served = graph_folder(world.settings.store, 1), world.repository.objects.local("click_model/1")
    assert local_path(done.graph_uri) == kept / "model.onnx"
    assert (kept / "golden.npz").exists()
    assert (kept / "model.onnx").read_bytes() == (served / "model.onnx").read_bytes()
    assert (kept / "model.onnx").stat().st_ino != (served / "model.onnx").stat().st_ino


def test_where_it_went_is_noted_for_whoever_comes_next(world):
    world.release(1)
    place = read_serving_place(world.settings.store)
    assert (place.repository_uri, place.triton_urls) == (world.repository.uri, list(world.settings.triton_urls))


@pytest.mark.e2e
def test_served_scores_are_the_second_opinions(deploy, client, raw_rows, make_parts):
    deploy(1)
    workflow, toy = make_parts(1)
    dense, categorical = raw_rows(300, 9)
    served, _ = client.infer(MODEL_NAME, dense, categorical)
    np.testing.assert_allclose(served, toy.scores(workflow, dense, categorical), atol=1e-5)


@pytest.mark.e2e
def test_second_release_under_load_fails_no_request_and_never_goes_back(deploy, client, raw_rows, triton):
    deploy(1)
    rows, log = raw_rows(8), triton.log_path.read_text()
    with under_load([triton.grpc_url] * 2, rows, until=2) as traffic:
        done = deploy(2)
    assert traffic.failures == []
    for answers in traffic.answers:
        assert set(answers) == {1, 2}
        assert answers == sorted(answers), "no request went back to the old version"
    assert (done.version, done.previous_version) == (2, 1)
    loads = triton.log_path.read_text()[len(log) :]
    assert f'"loading: {MODEL_NAME}:2"' in loads
    assert f'"loading: {MODEL_NAME}:1"' not in loads, "the previous version was loaded anew"


def test_old_versions_leave_the_repository_and_as_many_as_asked_for_stay(world, make_candidate):
    settings = dataclasses.replace(world.settings, num_kept=3)
    for seed in range(1, 5):
        release(*make_candidate(settings.store, seed), settings)
    assert world.repository.versions() == [2, 3, 4]
    assert [server.loaded() for server in world.servers] == [[4], [4]], "servers hold only the live version"
    assert [p.version for p in read_journal(settings.store)] == [1, 2, 3, 4]


def test_a_retried_step_does_not_release_the_same_model_twice(world):
    assert world.release(1) == world.release(1)
    assert [entry.action for entry in world.entries()] == ["intent", "release"]


def test_how_it_is_served_is_what_the_run_asked_for(make_candidate, tmp_path):
    settings = ReleaseSettings(
        store=tmp_path / "store",
        repository=str(tmp_path / "repository"),
        options=ServingOptions(server="onnxruntime", device="gpu", instances=3, response_cache=True),
    )
    release(*make_candidate(settings.store, 1), settings)
    text = (tmp_path / "repository" / MODEL_NAME / "config.pbtxt").read_text()
    options = read_options(text)
    assert (options.server, options.device, options.instances, options.response_cache) == (
        "onnxruntime",
        "gpu",
        3,
        True,
    )
    assert versions_of(text) == [1]


def test_a_repository_written_for_another_server_is_refused(make_candidate, tmp_path):
    store, repository = tmp_path / "store", tmp_path / "repository"
    release(
        *make_candidate(store, 1),
        ReleaseSettings(store=store, repository=str(repository), options=ServingOptions(server="onnxruntime")),
    )
    with pytest.raises(ContractError, match="server is 'python', expected 'onnxruntime'"):
        release(*make_candidate(store, 2), ReleaseSettings(store=store, repository=str(repository)))
