"""A release broken off at each of its steps: what is published stays whole, and the next release goes through."""

from __future__ import annotations

import os

import pytest

from components.contracts.serving import versions_of
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.repository.triton_config import warmup_files_of
from components.runtime.errors import PermanentError
from components.storage.folder import FolderObjects
from tests.support.crashes import Killed
from tests.support.model_repository import OPTIONS

NOW = 1_760_000_000.0


def release(repository, number, make_version):
    with repository.locked():
        repository.stage(number, make_version(number), OPTIONS)
        repository.publish(number)
        repository.write_config(repository.config_for(number, OPTIONS))
        repository.prune({number}, num_kept=2)


def check_what_is_published(repository, allowed):
    config = repository.read_config()
    named = versions_of(config)
    assert named in allowed
    assert set(named) <= set(repository.versions())
    for version in named:
        repository.published.check(version)
    rows = {each.name.rpartition("/")[2] for each in repository.objects.list("click_model/warmup/")}
    assert warmup_files_of(config) <= rows


def check_the_next_release(repository, make_version):
    number = max(repository.taken_numbers()) + 1
    release(repository, number, make_version)
    assert versions_of(repository.read_config())[-1] == number
    assert repository.taken_numbers() == repository.versions()
    assert repository.objects.list("click_model_candidate/") == []
    for version in repository.versions():
        repository.published.check(version)


def test_a_release_killed_at_any_change_of_the_folder_leaves_whole_versions(tmp_path, make_version, monkeypatch):
    names = ("replace", "rename", "link", "unlink", "rmdir")
    real = {name: getattr(os, name) for name in names}
    left = [10**9]

    def counted(name):
        def call(*arguments, **more):
            if left[0] <= 0:
                raise Killed
            left[0] -= 1
            return real[name](*arguments, **more)

        return call

    for name in names:
        monkeypatch.setattr(os, name, counted(name))
    step, is_done = 0, False
    while not is_done:
        left[0] = 10**9
        root = tmp_path / f"killed after {step}"
        release(ModelRepository(FolderObjects(root)), 1, make_version)
        left[0] = step
        try:
            release(ModelRepository(FolderObjects(root)), 2, make_version)
            is_done = True
        except Killed:
            pass
        left[0] = 10**9
        repository = ModelRepository(FolderObjects(root))
        check_what_is_published(repository, ([1], [2]))
        check_the_next_release(repository, make_version)
        assert sorted(p.name for p in root.rglob(".*")) == [".deployment.lock", ".objects.lock"]
        step += 1
    assert step > 12


def break_off(server, make_version, step):
    """Whether a release came to its end although the bucket refuses everything after `step` requests of it."""
    from components.storage.bucket import BucketObjects

    server.reset()

    def repository(now):
        return ModelRepository(BucketObjects("gs://models/triton"), clock=lambda: now)

    release(repository(NOW), 1, make_version)
    seen, is_done = [], True
    fault = server.front.fail(
        lambda request: seen.append(1) or len(seen) > step, "status", status=403, message="gone", times=10**9
    )
    try:
        release(repository(NOW), 2, make_version)
    except PermanentError:
        is_done = False
    server.front.faults.remove(fault)
    check_what_is_published(repository(NOW), ([1], [2]))
    # The lease of the broken release may still lie there; it ends.
    check_the_next_release(repository(NOW + 61.0), make_version)
    return is_done


def test_a_release_cut_off_from_its_bucket_leaves_whole_versions(cloud_storage, cloud_storage_server, make_version):
    steps = (9, 25, 37, 200)
    assert [break_off(cloud_storage_server, make_version, step) for step in steps] == [False, False, False, True]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_release_cut_off_from_its_bucket_at_any_request_leaves_whole_versions(
    cloud_storage, cloud_storage_server, make_version
):
    step = 0
    while not break_off(cloud_storage_server, make_version, step):
        step += 1
    assert step > 40
