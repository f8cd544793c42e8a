"""The release protocol against the real tritonserver: what is served, recorded and on disk after each outcome."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from components.contracts import run_notes
from components.contracts.durable import sha256_file
from components.contracts.errors import ContractError, PermanentError, TemporaryError
from components.contracts.manifests import Release, Verdict
from components.contracts.model_store import champion, release_path
from components.contracts.promotion_journal import current, read_journal
from components.contracts.serving import CANDIDATE_NAME, MAX_BATCH_ROWS, MODEL_NAME
from components.contracts.uris import local_path
from components.deployment.__main__ import main
from components.deployment.release import ReleaseSettings, release
from components.deployment.repository import ModelRepository
from components.deployment.rollback import main as rollback_main
from components.deployment.rollback import rollback
from components.deployment.switch import Patience
from components.deployment.triton_client import Triton
from components.storage.locations import open_objects
from pipelines.local.triton import TritonServer, TritonSettings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def triton(tmp_path_factory):
    root = tmp_path_factory.mktemp("triton with space")
    # After a stub was killed, this Triton uses up whatever time it is given to stop.
    settings = TritonSettings(stop_seconds=3)
    with TritonServer(root / "repository", log=root / "triton.log", settings=settings) as server:
        yield server


@pytest.fixture
def client(triton):
    client = Triton(triton.grpc_url)
    yield client
    client.unload(MODEL_NAME)
    client.close()
    shutil.rmtree(triton.repository / MODEL_NAME, ignore_errors=True)


@pytest.fixture
def settings(triton, client, tmp_path):
    return ReleaseSettings(
        store=tmp_path / "store",
        repository=triton.repository.as_uri(),
        triton_urls=(triton.grpc_url,),
        trigger_id="drift-7",
    )


@pytest.fixture
def deploy(settings, make_candidate):
    """Releases the model of `seed`; keyword arguments go to `release`."""
    return lambda seed, **other: release(*make_candidate(settings.store, seed), settings, **other)


def live_version(client, rows):
    return client.infer(MODEL_NAME, *rows)[1]


class Altered:
    """A real connection of which the test changes one method."""

    def __init__(self, url, **methods):
        self._real = Triton(url)
        for name, method in methods.items():
            setattr(self, name, lambda *a, method=method, **k: method(self._real, *a, **k))

    def __getattr__(self, name):
        return getattr(self._real, name)


def test_first_release_is_served_recorded_and_is_the_next_runs_champion(deploy, client, raw_rows, settings, triton):
    done = deploy(1)
    assert (done.version, done.previous_version, done.parity_rows) == (1, None, 60)
    assert done.parity_max_abs_diff <= 1e-5
    assert live_version(client, raw_rows(5)) == 1
    assert Release.read(release_path(settings.store, 1)) == done == champion(settings.store, "current")
    [entry] = read_journal(settings.store)
    assert (entry.action, entry.version, entry.trigger_id, entry.model_id) == ("release", 1, "drift-7", "model-1")
    assert sha256_file(local_path(done.graph_uri)) == done.sha256["graph"]
    assert sorted(p.name for p in triton.repository.iterdir() if p.is_dir()) == [MODEL_NAME]


def test_served_scores_are_the_second_opinions(deploy, client, raw_rows, make_parts, reference_scores, make_candidate):
    from components.contracts.dcn import DcnConfig

    deploy(1)
    workflow, weights = make_parts(1)
    config = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8))
    dense, categorical = raw_rows(300, 9)
    served, _ = client.infer(MODEL_NAME, dense, categorical)
    np.testing.assert_allclose(served, reference_scores(workflow, weights, config, dense, categorical), atol=1e-5)


def test_second_release_under_load_fails_no_request_and_never_goes_back(deploy, client, raw_rows, triton):
    deploy(1)
    rows, answers, failures, stop = raw_rows(8), ([], []), [], threading.Event()

    def traffic(mine, own_answers):
        while not stop.is_set() and own_answers.count(2) < 30:
            try:
                own_answers.append(live_version(mine, rows))
            except Exception as error:
                failures.append(error)
                return

    clients = [Triton(triton.grpc_url) for _ in answers]
    threads = [threading.Thread(target=traffic, args=pair, daemon=True) for pair in zip(clients, answers)]
    for thread in threads:
        thread.start()
    try:
        done = deploy(2)
        for thread in threads:
            thread.join(30)
    finally:
        stop.set()
    assert failures == []
    for own_answers in answers:
        assert set(own_answers) == {1, 2}
        assert own_answers == sorted(own_answers), "no request went back to the old version"
    assert (done.version, done.previous_version) == (2, 1)
    assert client.infer(MODEL_NAME, *rows, version=1)[1] == 1, "the previous version stays loaded"


def test_old_versions_leave_the_repository_and_the_last_three_stay(deploy, client, settings, raw_rows):
    for seed in range(1, 5):
        deploy(seed)
    assert ModelRepository(open_objects(settings.repository)).versions() == [2, 3, 4]
    assert [p.version for p in read_journal(settings.store)] == [1, 2, 3, 4]
    with pytest.raises(TemporaryError, match="not at ready state"):
        client.infer(MODEL_NAME, *raw_rows(1), version=2)


def test_a_retried_step_does_not_release_the_same_model_twice(settings, make_candidate):
    candidate = make_candidate(settings.store, 1)
    assert release(*candidate, settings) == release(*candidate, settings)
    assert len(read_journal(settings.store)) == 1


@pytest.mark.parametrize("name", [CANDIDATE_NAME, MODEL_NAME], ids=["in rehearsal", "after publication"])
def test_a_wrong_answer_leaves_the_old_version_live_and_the_new_one_gone(deploy, client, settings, raw_rows, name):
    deploy(1)
    config = ModelRepository(open_objects(settings.repository)).read_config()

    def wrong(real, asked, *rows, version=None):
        scores, answered = real.infer(asked, *rows, version=version)
        return (scores + 1e-4 if asked == name and answered == 2 else scores), answered

    with pytest.raises(PermanentError, match=rf"version 2 of {name} on .* differs from the training-side score"):
        deploy(2, connect=lambda url: Altered(url, infer=wrong))
    assert live_version(client, raw_rows(3)) == 1
    repository = ModelRepository(open_objects(settings.repository))
    assert repository.versions() == [1]
    assert repository.read_config() == config
    assert current(settings.store).version == 1
    assert not release_path(settings.store, 2).exists()
    assert not (local_path(settings.repository) / CANDIDATE_NAME).exists()
    assert deploy(3).version == 2, "the way is free for the next model"


def test_a_failed_first_release_leaves_nothing_served(make_candidate, client, settings, raw_rows):
    def refuse(real, name, version):
        return name == CANDIDATE_NAME and real.is_ready(name, version)

    now = iter(range(10_000))
    patience = Patience(clock=lambda: next(now), sleep=lambda _: None)
    hasty = dataclasses.replace(settings, patience=patience)
    with pytest.raises(TemporaryError, match="version 1 of click_model .* is not ready after 60"):
        release(*make_candidate(settings.store, 1), hasty, connect=lambda url: Altered(url, is_ready=refuse))
    assert ModelRepository(open_objects(settings.repository)).versions() == []
    assert ModelRepository(open_objects(settings.repository)).read_config() is None
    assert read_journal(settings.store) == []
    with pytest.raises((PermanentError, TemporaryError)):
        client.infer(MODEL_NAME, *raw_rows(1))


def test_a_journal_that_cannot_be_written_undoes_the_switch(deploy, client, settings, raw_rows, monkeypatch):
    deploy(1)

    def full(*_):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("components.deployment.release.append_promotion", full)
    with pytest.raises(OSError, match="no space"):
        deploy(2)
    assert live_version(client, raw_rows(3)) == 1
    assert ModelRepository(open_objects(settings.repository)).versions() == [1]
    monkeypatch.undo()
    assert deploy(3).version == 3, "a number that a manifest bore is not given again"


def test_failed_parity_publishes_nothing(settings, make_candidate, with_scores, tmp_path):
    model, verdict, raw = make_candidate(settings.store, 1)
    wrong = with_scores(verdict, lambda scores: scores + np.float32(1e-3), tmp_path)
    with pytest.raises(ContractError, match="graph differs from the training-side score by 0.001"):
        release(model, wrong, raw, settings)
    assert ModelRepository(open_objects(settings.repository)).versions() == []
    assert read_journal(settings.store) == []


def test_rollback_makes_the_previous_version_live_and_the_next_release_counts_on(deploy, client, settings, raw_rows):
    deploy(1), deploy(2)
    entry = rollback(settings.store, settings.repository, list(settings.triton_urls), reason="auc fell")
    assert live_version(client, raw_rows(3)) == 1
    assert (entry.action, entry.version, entry.previous_version) == ("rollback", 1, 2)
    assert champion(settings.store, "current").model_id == "model-1"
    with pytest.raises(ContractError, match="version 1 is the first release"):
        rollback(settings.store, settings.repository, [], reason="again")
    done = deploy(3)
    assert (done.version, done.previous_version) == (3, 1)
    assert live_version(client, raw_rows(3)) == 3


def test_rollback_under_load_fails_no_request(deploy, triton, settings, raw_rows):
    deploy(1), deploy(2)
    rows, answers, stop = raw_rows(8), [], threading.Event()
    failures = []

    def traffic():
        mine = Triton(triton.grpc_url)
        while not stop.is_set() and answers.count(1) < 30:
            try:
                answers.append(live_version(mine, rows))
            except Exception as error:
                failures.append(error)
                stop.set()
        mine.close()

    thread = threading.Thread(target=traffic, daemon=True)
    thread.start()
    rollback(settings.store, settings.repository, list(settings.triton_urls), reason="drill")
    thread.join(30)
    stop.set()
    assert failures == []
    assert answers[-1] == 1


def test_rollback_on_the_command_line_says_what_it_did_or_why_not(deploy, client, settings, raw_rows, capsys):
    deploy(1), deploy(2), deploy(3)
    flags = ["--store", settings.store.as_uri(), "--repository", settings.repository, "--reason", "drill"]
    flags += ["--triton-urls", settings.triton_urls[0]]
    assert rollback_main([*flags, "--to", "1"]) == 0
    assert "version 1 is live again (was 3)" in capsys.readouterr().out
    assert live_version(client, raw_rows(3)) == 1
    assert rollback_main([*flags, "--to", "9"]) == 2
    assert "error: version 9 was never released" in capsys.readouterr().err
    assert rollback_main([*flags, "--to", "1"]) == 2


def test_a_damaged_graph_is_not_rolled_back_to(deploy, client, settings, raw_rows):
    deploy(1), deploy(2)
    graph = ModelRepository(open_objects(settings.repository)).version_path(1) / "model.onnx"
    graph.write_bytes(graph.read_bytes() + b"\0")
    with pytest.raises(ContractError, match="graph of version 1 has sha256"):
        rollback(settings.store, settings.repository, list(settings.triton_urls), reason="drill")
    assert live_version(client, raw_rows(3)) == 2


def test_a_version_that_a_killed_deployment_left_is_passed_over(deploy, client, settings, raw_rows):
    deploy(1)
    repository = ModelRepository(open_objects(settings.repository))
    shutil.copytree(repository.version_path(1), repository.version_path(2))
    (local_path(settings.repository) / CANDIDATE_NAME / "2").mkdir(parents=True)
    done = deploy(2)
    assert (done.version, done.previous_version) == (3, 1)
    assert "versions: [ 1, 3 ]" in repository.read_config()
    assert live_version(client, raw_rows(3)) == 3


def test_a_dead_python_stub_that_still_says_ready_stops_a_retried_step(settings, make_candidate, triton, client):
    candidate = make_candidate(settings.store, 1)
    release(*candidate, settings)
    for stub in stubs_of(triton.pid):
        os.kill(stub, 9)
    assert client.is_ready(MODEL_NAME, 1), "the server's word alone would have been believed"
    with pytest.raises(PermanentError, match="not healthy"):
        release(*candidate, settings)
    client.unload(MODEL_NAME)


def stubs_of(pid):
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in children for child in file.read_text().split()}


def test_a_repository_that_cannot_be_written_is_named_before_any_work(make_candidate, tmp_path):
    store = tmp_path / "store"
    candidate = make_candidate(store, 1)
    (tmp_path / "file").write_text("not a folder")
    settings = ReleaseSettings(store=store, repository=str(tmp_path / "file" / "repository"))
    with pytest.raises(ContractError, match=r"model repository .*/file/repository is not writable: Not a directory"):
        release(*candidate, settings)


def test_without_an_answering_server_nothing_is_published(make_candidate, tmp_path):
    settings = ReleaseSettings(
        store=tmp_path / "store", repository=str(tmp_path / "repository"), triton_urls=("127.0.0.1:9",)
    )
    with pytest.raises(TemporaryError, match=r"triton 127.0.0.1:9: liveness failed"):
        release(*make_candidate(settings.store, 1), settings)
    assert ModelRepository(open_objects(settings.repository)).versions() == []
    assert read_journal(settings.store) == []


def test_a_second_deployment_at_the_same_time_is_told_so(make_candidate, tmp_path):
    settings = ReleaseSettings(store=tmp_path / "store", repository=str(tmp_path / "repository"))
    candidate = make_candidate(settings.store, 1)
    (local_path(settings.repository) / MODEL_NAME).mkdir(parents=True)
    descriptor = os.open(local_path(settings.repository) / ".deployment.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(TemporaryError, match="another deployment is at work"):
        release(*candidate, settings)
    os.close(descriptor)
    assert release(*candidate, settings).version == 1, "without servers it is published and recorded"


def test_a_verdict_about_another_model_is_refused(make_candidate, tmp_path):
    settings = ReleaseSettings(store=tmp_path / "store", repository=str(tmp_path / "repository"))
    model, _, raw = make_candidate(settings.store, 1)
    _, verdict, _ = make_candidate(settings.store, 2)
    with pytest.raises(ContractError, match="verdict is about model model-2, expected model-1"):
        release(model, verdict, raw, settings)


def test_a_repository_written_for_another_server_is_refused(make_candidate, tmp_path):
    store, repository = tmp_path / "store", tmp_path / "repository"
    first = release(
        *make_candidate(store, 1), ReleaseSettings(store=store, repository=str(repository), server="onnxruntime")
    )
    assert sorted(p.name for p in local_path(first.graph_uri).parent.iterdir()) == ["golden.npz", "model.onnx"]
    with pytest.raises(ContractError, match="server is 'python', expected 'onnxruntime'"):
        release(*make_candidate(store, 2), ReleaseSettings(store=store, repository=str(repository)))


def test_the_step_as_a_command_writes_its_manifest_and_notes(make_candidate, tmp_path, capsys):
    store = tmp_path / "store"
    paths = {}
    for accepted, seed in ((True, 1), (False, 2)):
        for kind, manifest in zip(("model", "verdict", "raw-dataset"), make_candidate(store, seed, accepted=accepted)):
            paths[accepted, kind] = tmp_path / f"{kind}-{seed}.json"
            manifest.write(paths[accepted, kind])

    def step(accepted, run, **other):
        flags = {"run": run, "store": store, "work": tmp_path, "repository": tmp_path / "repository", "triton-urls": ""}
        flags |= {kind: path for (a, kind), path in paths.items() if a == accepted}
        return main([f"--{k}={v}" for k, v in {**flags, "output": tmp_path / "release.json", **other}.items()])

    assert step(True, "run-1") == 0
    assert Release.read(tmp_path / "release.json").version == 1
    (note,) = run_notes.read_notes(store, "run-1")
    assert note.facts["version"] == 1
    assert note.reason == f"version 1 is published; {Verdict.read(paths[True, 'verdict']).reason}"
    assert step(False, "run-2") == 1
    assert '"state": "refused"' in (store / "runs" / "run-2" / "deployment.json").read_text()
    assert step(True, "run-3", **{"triton-urls": "http://localhost:8001"}) == 2
    assert "error: triton url is 'http://localhost:8001', expected host:grpc_port" in capsys.readouterr().err
    assert step(True, "run-4", **{"triton-urls": "127.0.0.1:9"}) == 3


def test_the_largest_request_is_answered_and_a_larger_one_refused(deploy, client, raw_rows):
    deploy(1)
    dense, categorical = (np.repeat(rows, 64, axis=0) for rows in raw_rows(65))
    scores, _ = client.infer(MODEL_NAME, dense[:MAX_BATCH_ROWS], categorical[:MAX_BATCH_ROWS])
    assert len(scores) == MAX_BATCH_ROWS
    with pytest.raises(PermanentError, match="batch-size must be <= 4096"):
        client.infer(MODEL_NAME, dense, categorical)


def test_one_bad_request_does_not_fail_the_batch_it_is_in(deploy, client, raw_rows, triton):
    deploy(1)
    dense, categorical = raw_rows(4)
    bad = dense.copy()
    bad[2, 5] = np.inf
    refusals, answers, others = [], [], []

    def ask(rows, count):
        mine = Triton(triton.grpc_url)
        for _ in range(count):
            try:
                answers.append(mine.infer(MODEL_NAME, rows, categorical)[0])
            except PermanentError as error:
                (refusals if rows is bad else others).append(str(error))
        mine.close()

    threads = [threading.Thread(target=ask, args=(rows, 40)) for rows in (dense, bad, dense, bad)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert others == []
    assert len(answers) == len(refusals) == 80
    assert all("dense[2, 5] is inf, expected a finite value, or NaN for missing" in text for text in refusals)
