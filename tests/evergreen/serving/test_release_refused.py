"""Tests of a failed release: the live version stays, and the next model can follow."""

import dataclasses
import fcntl
import os

import numpy as np
import pytest

from controller import deployment_target
from evergreen.registry.models import graph_folder, release_path
from evergreen.registry.promotion_journal import current, interrupted, read_entries, read_journal
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.servers import Timeouts, Triton
from testing.served_names import CANDIDATE_NAME, MODEL_NAME
from tests.support.deployments import release
from tests.support.real_servers import kill_stubs
from tests.support.triton_double import Altered


def remaining_files(deployment):
    return [path(deployment.settings.store, 2).exists() for path in (release_path, graph_folder)]


@pytest.mark.parametrize(
    "name", [CANDIDATE_NAME, MODEL_NAME], ids=["in rehearsal", "after publication"]
)
def test_wrong_answer_leaves_old_version_live_and_removes_new_version(deployment, name):
    deployment.release(1)
    config = deployment.repository.read_config()

    def wrong(server, requested_name, *rows, version=None):
        scores, answered = server.infer(requested_name, *rows, version=version)
        return (scores + 1e-4 if requested_name == name and answered == 2 else scores), answered

    with pytest.raises(
        PermanentError, match=rf"version 2 of {name} on .* differs from the training-side score"
    ):
        deployment.release(2, infer=wrong)
    deployment.check_all_is_well(1)
    assert deployment.repository.versions() == [1]
    assert deployment.repository.read_config() == config
    assert [entry.action for entry in deployment.entries()][2:] == ["intent", "withdrawn"]
    assert "differs from the training-side score" in deployment.entries()[-1].reason
    # If a version may have answered clients, its files are stored so that the answers can be
    # verified.
    assert remaining_files(deployment) == (
        [False, False] if name == CANDIDATE_NAME else [True, True]
    )
    assert deployment.release(3).version == 3, "the next release must succeed under a new number"


def test_failed_first_release_leaves_nothing_served(
    make_candidate, client, settings, raw_rows, repository
):
    def refuse(real, name, version):
        return name == CANDIDATE_NAME and real.is_ready(name, version)

    now = iter(range(10_000))
    timeouts = Timeouts(clock=lambda: next(now), sleep=lambda _: None)
    hasty = dataclasses.replace(settings, timeouts=timeouts)
    with pytest.raises(TemporaryError, match="version 1 of click_model .* is not ready after 60"):
        release(
            *make_candidate(settings.store, 1),
            settings=dataclasses.replace(
                hasty, connect=lambda url: Altered(Triton(url), is_ready=refuse)
            ),
        )
    assert repository.versions() == []
    assert repository.read_config() is None
    assert read_journal(settings.store) == []
    with pytest.raises((PermanentError, TemporaryError)):
        client.infer(MODEL_NAME, *raw_rows(1))


def failing_journal(monkeypatch, error, *, after):
    """Raise `error` when the journal line of a release is appended.

    If `after` is True, the line is written before the error is raised.
    """
    written = deployment_target.append_promotion

    def append(store, entry):
        if entry.action != "release":
            return written(store, entry)
        if after:
            written(store, entry)
        raise error

    monkeypatch.setattr(deployment_target, "append_promotion", append)


def test_journal_that_cannot_be_written_undoes_switch(deployment, monkeypatch):
    deployment.release(1)
    failing_journal(monkeypatch, OSError(28, "no space left on device"), after=False)
    with pytest.raises(OSError, match="no space"):
        deployment.release(2)
    monkeypatch.undo()
    deployment.check_all_is_well(1)
    assert deployment.repository.versions() == [1]
    assert deployment.release(3).version == 3, "a number from the journal must not be reused"


def test_line_whose_writing_failed_after_it_was_there_is_rolled_back(deployment, monkeypatch):
    deployment.release(1)
    failing_journal(monkeypatch, OSError(5, "input/output error"), after=True)
    with pytest.raises(OSError, match="input/output"):
        deployment.release(2)
    assert [entry.action for entry in deployment.entries()][-3:] == [
        "intent",
        "release",
        "withdrawn",
    ]
    deployment.check_all_is_well(1)


def wrong_as_2(server, name, *rows, version=None):
    """Make the live model's version 2 return wrong scores."""
    scores, answered = server.infer(name, *rows, version=version)
    return (scores + 1e-4 if (name, answered) == (MODEL_NAME, 2) else scores), answered


def test_callers_who_name_no_version_must_be_answered_by_new_one(deployment):
    deployment.release(1)

    def stuck(server, name, *rows, version=None):
        scores, answered = server.infer(name, *rows, version=version)
        return scores, 1 if name == MODEL_NAME and version is None else answered

    with pytest.raises(PermanentError, match="answered click_model from version 1, expected 2"):
        deployment.release(2, infer=stuck)
    deployment.check_all_is_well(1)
    assert remaining_files(deployment) == [True, True], (
        "the version may have answered clients, so its files must remain"
    )


def test_failed_parity_publishes_nothing_and_keeps_nothing(
    settings, make_candidate, with_scores, tmp_path, repository
):
    model, verdict, raw = make_candidate(settings.store, 1)
    wrong = with_scores(verdict, lambda scores: scores + np.float32(1e-3), tmp_path)
    with pytest.raises(ContractError, match="graph differs from the training-side score by 0.001"):
        release(model, wrong, raw, settings=settings)
    assert repository.versions() == []
    assert read_entries(settings.store) == []
    assert list((settings.store / "prepared").iterdir()) == []


def test_dead_python_stub_that_still_reports_ready_stops_retried_step(
    settings, make_candidate, triton, client
):
    candidate = make_candidate(settings.store, 1)
    release(*candidate, settings=settings)
    kill_stubs(triton)
    assert client.is_ready(MODEL_NAME, 1), "the server must report the dead stub as ready"
    with pytest.raises(PermanentError, match="not healthy"):
        release(*candidate, settings=settings)
    client.unload(MODEL_NAME)


def test_repository_that_cannot_be_written_is_named_before_any_work(
    make_candidate, unserved, tmp_path
):
    candidate = make_candidate(unserved.store, 1)
    (tmp_path / "file").write_text("not a folder")
    settings = dataclasses.replace(unserved, repository=str(tmp_path / "file" / "repository"))
    with pytest.raises(
        ContractError, match=r"model repository .*/file/repository is not writable: Not a directory"
    ):
        release(*candidate, settings=settings)


def test_without_answering_server_nothing_is_published(make_candidate, unserved, tmp_path):
    settings = dataclasses.replace(unserved, triton_urls=("127.0.0.1:9",))
    with pytest.raises(TemporaryError, match=r"triton 127.0.0.1:9: liveness failed"):
        release(*make_candidate(settings.store, 1), settings=settings)
    assert not (tmp_path / "repository" / MODEL_NAME / "config.pbtxt").exists()
    assert read_entries(settings.store) == []


@pytest.fixture
def lock_taken(tmp_path):
    """Lock the repository from another process. The returned function releases the lock."""
    (tmp_path / "repository").mkdir()
    descriptor = os.open(tmp_path / "repository" / f".{MODEL_NAME}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return lambda: os.close(descriptor)


def test_second_deployment_at_same_time_is_refused(make_candidate, unserved, lock_taken):
    now, waits = iter(range(1000)), []
    timeouts = Timeouts(lock_seconds=30, clock=lambda: next(now), sleep=waits.append)
    settings = dataclasses.replace(unserved, timeouts=timeouts)
    candidate = make_candidate(settings.store, 1)
    with pytest.raises(TemporaryError, match="another controller is at work"):
        release(*candidate, settings=settings)
    assert 25 <= len(waits) <= 30
    lock_taken()
    assert release(*candidate, settings=settings).version == 1, (
        "a release without servers must be published and recorded"
    )


def test_deployment_waits_little_for_whoever_has_lock(make_candidate, unserved, lock_taken):
    """For example, a watchdog repairs a server while a person wants to roll back."""
    timeouts = Timeouts(sleep=lambda _: lock_taken())
    settings = dataclasses.replace(unserved, timeouts=timeouts)
    assert release(*make_candidate(settings.store, 1), settings=settings).version == 1


def test_verdict_about_another_model_is_refused(make_candidate, unserved):
    model, _, raw = make_candidate(unserved.store, 1)
    _, verdict, _ = make_candidate(unserved.store, 2)
    with pytest.raises(ContractError, match="verdict is about model model-2, expected model-1"):
        release(model, verdict, raw, settings=unserved)


def test_server_that_could_not_be_restored_is_named_in_error_and_journal(deployment):
    deployment.release(1)

    def unresponsive(server, name):
        """Load version 2, but fail when the server must return to version 1."""
        if name == MODEL_NAME and server.loaded() == [2]:
            raise TemporaryError("triton does not respond")
        server.load(name)

    with pytest.raises(
        PermanentError,
        match=r"differs .*; triton triton-a:8001 could not be restored: triton does not respond",
    ):
        deployment.release(2, load=unresponsive, infer=wrong_as_2)
    assert (
        "triton triton-a:8001 could not be restored: triton does not respond"
        in deployment.entries()[-1].reason
    )
    assert current(deployment.settings.store).version == 1
    assert deployment.release(3).version == 3
    deployment.check_all_is_well(3)


def test_next_deployment_restores_configuration_after_failed_restore(deployment, monkeypatch):
    """The storage fails after the first of two writes.

    The next deployment rolls back, because the journal contains the intent.
    """
    deployment.release(1)
    written = ModelRepository.write_config

    def once(repository, text):
        monkeypatch.setattr(ModelRepository, "write_config", refuse)
        written(repository, text)

    def refuse(repository, text):
        raise TemporaryError("the storage is unreachable")

    monkeypatch.setattr(ModelRepository, "write_config", once)
    with pytest.raises(PermanentError, match="could not be restored: the storage is unreachable"):
        deployment.release(2, infer=wrong_as_2)
    monkeypatch.undo()
    assert interrupted(deployment.settings.store).version == 2
    assert deployment.rollback().version == 1
    deployment.check_all_is_well(1)
    assert deployment.repository.versions() == [1]
