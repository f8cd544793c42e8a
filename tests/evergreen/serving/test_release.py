"""Tests of a successful release: what is served, recorded and stored."""

import dataclasses
import threading
from contextlib import ExitStack, closing

import numpy as np
import pytest

from controller.release import ReleaseSettings
from demo.triton import TritonServer, TritonSettings
from evergreen.contracts.manifests import Release
from evergreen.contracts.serving import MAX_BATCH_ROWS
from evergreen.registry.models import champion, graph_folder, graph_sha256, release_path
from evergreen.registry.promotion_journal import read_entries, read_journal
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from evergreen.storage.uris import local_path, open_objects
from testing.served_names import MODEL_NAME, NAMES
from tests.support.deployments import release
from tests.support.real_servers import live_version, under_load
from tests.support.triton_double import Altered, TritonDouble


def test_first_release_is_served_recorded_and_is_next_runs_champion(
    deploy, client, raw_rows, settings, triton
):
    done = deploy(1)
    assert (done.version, done.previous_version, done.parity_rows) == (1, None, 60)
    assert done.parity_max_abs_diff <= 1e-5
    assert live_version(client, raw_rows(5)) == 1
    assert (
        Release.read(release_path(settings.store, 1)) == done == champion(settings.store, "current")
    )
    [entry] = read_journal(settings.store)
    assert (entry.action, entry.version, entry.trigger_id, entry.model_id) == (
        "release",
        1,
        "drift-7",
        "model-1",
    )
    assert sorted(p.name for p in triton.repository.iterdir() if p.is_dir()) == [MODEL_NAME]


def test_journal_names_who_why_and_every_hash_before_server_is_notified(deployment):
    actions = []

    class Watched(TritonDouble):
        """Records the journal whenever a server gets a load request."""

        def load(self, name):
            actions.append([entry.action for entry in deployment.entries()])
            super().load(name)

    settings = dataclasses.replace(
        deployment.settings, who="run-7", triton_urls=deployment.settings.triton_urls[:1]
    )
    done = release(
        *deployment.candidate(1),
        settings=dataclasses.replace(
            settings,
            connect=lambda url: Watched(
                url, repository=settings.repository, state=deployment.state
            ),
        ),
    )
    assert actions == [["intent"], ["intent"]], "both loads must follow the intent in the journal"
    intent, line = deployment.entries()
    assert intent.sha256 == line.sha256 == done.sha256
    assert sorted(done.sha256) == ["data", "golden", "graph", "weights", "workflow"]
    assert done.sha256["graph"] == graph_sha256(local_path(done.graph_uri).parent)
    assert done.sha256["data"] == done.raw_digest
    assert (line.who, line.decision, line.reason) == ("run-7", "pass", "auc is high enough")


def test_store_has_own_copy_of_graph_and_golden_rows(deployment):
    done = deployment.release(1)
    stored_folder, served = (
        graph_folder(deployment.settings.store, 1),
        deployment.repository.objects.local("click_model/1"),
    )
    assert local_path(done.graph_uri) == stored_folder / "model.onnx"
    assert (stored_folder / "golden.npz").exists()
    assert (stored_folder / "model.onnx").read_bytes() == (served / "model.onnx").read_bytes()
    assert (stored_folder / "model.onnx").stat().st_ino != (served / "model.onnx").stat().st_ino


def test_local_server_with_model_leaves_no_telemetry_in_home_folder(deploy, triton):
    deploy(1)
    assert list(triton.log_path.with_name("home").rglob("*")) == []


def test_second_release_under_load_fails_no_request_and_never_reverts(
    deploy, client, raw_rows, triton
):
    deploy(1)
    rows, log = raw_rows(8), triton.log_path.read_text()
    with under_load([triton.grpc_url] * 2, rows, until=2) as traffic:
        done = deploy(2)
    assert traffic.failures == []
    for answers in traffic.answers:
        assert set(answers) == {1, 2}
        assert answers == sorted(answers), "a request got the old version after the new one"
    assert (done.version, done.previous_version) == (2, 1)
    loads = triton.log_path.read_text()[len(log) :]
    assert f'"loading: {MODEL_NAME}:2"' in loads
    assert f'"loading: {MODEL_NAME}:1"' not in loads, "the previous version was loaded again"


def test_old_versions_leave_repository_and_as_many_as_asked_for_stay(deployment, make_candidate):
    settings = dataclasses.replace(deployment.settings, num_kept=3)
    for seed in range(1, 5):
        release(*make_candidate(settings.store, seed), settings=settings)
    assert deployment.repository.versions() == [2, 3, 4]
    assert [server.loaded() for server in deployment.servers] == [[4], [4]], (
        "servers must load only the live version"
    )
    assert [p.version for p in read_journal(settings.store)] == [1, 2, 3, 4]


def test_retried_step_does_not_release_same_model_twice(deployment):
    assert deployment.release(1) == deployment.release(1)
    assert [entry.action for entry in deployment.entries()] == ["intent", "release"]


def test_repository_written_for_another_server_is_refused(make_candidate, tmp_path):
    store, repository = tmp_path / "store", tmp_path / "repository"
    release(
        *make_candidate(store, 1),
        settings=ReleaseSettings(
            store=store, repository=str(repository), options=ServingOptions(server="onnxruntime")
        ),
    )
    with pytest.raises(ContractError, match="server is 'python', expected 'onnxruntime'"):
        release(
            *make_candidate(store, 2),
            settings=ReleaseSettings(store=store, repository=str(repository)),
        )


def test_largest_request_is_answered_and_larger_one_refused(deploy, client, raw_rows):
    deploy(1)
    dense, categorical = (np.repeat(rows, 64, axis=0) for rows in raw_rows(65))
    scores, _ = client.infer(MODEL_NAME, dense[:MAX_BATCH_ROWS], categorical[:MAX_BATCH_ROWS])
    assert len(scores) == MAX_BATCH_ROWS
    with pytest.raises(PermanentError, match="batch-size must be <= 4096"):
        client.infer(MODEL_NAME, dense, categorical)


def test_one_bad_request_does_not_fail_batch_it_is_in(deploy, client, raw_rows, triton):
    deploy(1)
    dense, categorical = raw_rows(4)
    bad = dense.copy()
    bad[2, 1] = np.inf
    refusals, answers, others = [], [], []

    def send(rows, count):
        mine = Triton(triton.grpc_url)
        for _ in range(count):
            try:
                answers.append(mine.infer(MODEL_NAME, rows, categorical)[0])
            except PermanentError as error:
                (refusals if rows is bad else others).append(str(error))
        mine.close()

    threads = [threading.Thread(target=send, args=(rows, 40)) for rows in (dense, bad, dense, bad)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert others == []
    assert len(answers) == len(refusals) == 80
    assert all(
        "dense[2, 1] is inf, expected a finite value, or NaN for missing" in text
        for text in refusals
    )


def test_any_failing_replica_rolls_all_back_and_no_request_fails(
    tmp_path, make_candidate, raw_rows
):
    rows = raw_rows(8)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                TritonServer(
                    tmp_path / "repository",
                    log=tmp_path / f"{number}.log",
                    runtime=tmp_path / "runtime",
                    settings=TritonSettings(stop_seconds=0.2),
                )
            )
            for number in range(2)
        ]
        urls = tuple(server.grpc_url for server in servers)
        settings = ReleaseSettings(
            store=tmp_path / "store",
            repository=str(tmp_path / "repository"),
            triton_urls=urls,
            options=ServingOptions(instances=1),
        )
        release(*make_candidate(settings.store, 1), settings=settings)

        def wrong_on_the_last(real, requested_name, *rows, version=None):
            scores, answered = real.infer(requested_name, *rows, version=version)
            return (
                scores + 1e-4
                if (real.url, requested_name, answered) == (urls[1], MODEL_NAME, 2)
                else scores
            ), answered

        with (
            under_load(urls, rows, until=1) as traffic,
            pytest.raises(PermanentError, match=urls[1]),
        ):
            release(
                *make_candidate(settings.store, 2),
                settings=dataclasses.replace(
                    settings, connect=lambda url: Altered(Triton(url), infer=wrong_on_the_last)
                ),
            )
        assert traffic.failures == []
        assert {answers[-1] for answers in traffic.answers} == {1}
        clients = [stack.enter_context(closing(Triton(url))) for url in urls]
        assert [live_version(client, rows) for client in clients] == [1, 1]
        assert read_entries(settings.store)[-1].action == "withdrawn"
        assert ModelRepository(open_objects(settings.repository), NAMES).versions() == [1]
