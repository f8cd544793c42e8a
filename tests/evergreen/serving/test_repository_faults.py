"""Tests of the model repository on failing storage: bad files, full disks and kills."""

import os

import pytest

from evergreen.contracts.serving import versions_of
from evergreen.registry.models import DATA_FILE, GRAPH_FILE
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.serving.repository.model_repository import ModelRepository
from evergreen.serving.repository.triton_config import warmup_files_of
from evergreen.storage.folder import FolderObjects
from testing.served_names import MODEL_NAME, NAMES
from tests.support.crashes import every_kill
from tests.support.errors import raises
from tests.support.full_disk import files_of_at_most
from tests.support.model_repository import OPTIONS, everything, named


@pytest.fixture
def repository(open_objects):
    return ModelRepository(open_objects(), NAMES)


@pytest.mark.parametrize("lost", ["version.json", "model.onnx", "golden.npz", "model.py"])
def test_half_copied_version_is_none_its_number_is_used_and_it_is_cleared(
    repository, make_version, put_live, lost
):
    with repository.locked():
        put_live(repository, 1)
        repository.stage(2, make_version(2), OPTIONS)
        repository.publish(2)
        repository.objects.delete(f"click_model/2/{lost}")
        assert repository.versions() == [1]
        assert repository.taken_numbers() == [1, 2]
        repository.stage(3, make_version(3), OPTIONS)
        assert repository.taken_numbers() == [1]
        assert named(repository) == [1]


def test_truncated_file_makes_version_none(repository, put_live):
    with repository.locked():
        put_live(repository, 1)
        graph = repository.objects.read("click_model/1/model.onnx").content
        repository.objects.write("click_model/1/model.onnx", graph[:-100])
        assert repository.versions() == []
        repository.prune(set(), num_kept=2)
    # The configuration names version 1, so servers load version 1. The file that version 1 lacks
    # must be reported.
    assert repository.taken_numbers() == [1]


@pytest.mark.parametrize(
    ("file", "at"),
    [("model.onnx", 0), ("golden.npz", 0), ("golden.npz", 60), ("golden.npz", -30)],
    ids=["graph", "head", "rows", "directory"],
)
def test_corrupt_graph_or_golden_row_is_found_by_its_hash(repository, put_live, file, at):
    with repository.locked():
        put_live(repository, 1)
        content = bytearray(repository.objects.read(f"click_model/1/{file}").content)
        content[at] ^= 255
        repository.objects.write(f"click_model/1/{file}", bytes(content))
        assert repository.versions() == [1]
        with pytest.raises(
            ContractError, match=rf"1/{file} has sha256 \w{{64}}, expected \w{{64}}"
        ):
            (
                repository.published.check
                if file == "model.onnx"
                else repository.published.golden_rows
            )(1)


def test_staging_detects_bytes_that_storage_changed(repository, make_version):
    real = repository.objects

    class Bitrot:
        """Storage that silently flips one bit."""

        def __getattr__(self, name):
            return getattr(real, name)

        def write(self, name, content, *, if_generation=None):
            if name.endswith(GRAPH_FILE):
                content = content.read_bytes()
                content = content[:100] + bytes([content[100] ^ 4]) + content[101:]
            return real.write(name, content, if_generation=if_generation)

    with repository.locked():
        repository.objects = Bitrot()
        with raises(PermanentError, "changed", "2/model.onnx", "sha256"):
            repository.stage(2, make_version(2), OPTIONS)
    assert (repository.versions(), repository.read_config()) == ([], None)


def test_corrupt_record_makes_version_none(repository, put_live):
    with repository.locked():
        put_live(repository, 1)
        record = repository.objects.read("click_model/1/version.json").content
        for content in (
            b"{",
            b"null",
            b"{}",
            record.replace(b'"format_version": 1', b'"format_version": 9'),
            record.replace(b"golden.npz", b"other.npz"),
        ):
            repository.objects.write("click_model/1/version.json", content)
            assert repository.versions() == []
        repository.objects.write("click_model/1/version.json", record)
        repository.objects.move("click_model/1", "click_model/7")
        assert repository.versions() == []


@pytest.mark.parametrize(
    "name",
    [
        "click_model/abc/x",
        "click_model/01/x",
        "click_model/1",
        "click_model/-1/x",
        "click_model/²/x",
    ],
)
def test_invalid_version_folder_is_skipped(open_objects, name):
    objects = open_objects()
    objects.write(name, b"1")
    assert ModelRepository(objects, NAMES).taken_numbers() == []


def test_disk_that_fills_up_while_staging_leaves_what_is_served(tmp_path, put_live, make_version):
    root = tmp_path / "model repository"
    repository = ModelRepository(FolderObjects(root), NAMES)
    with repository.locked():
        put_live(repository, 1)
    before = everything(repository.objects)
    graph = make_version(2)
    (graph / DATA_FILE).write_bytes(bytes(300_000))
    full = pytest.raises(PermanentError, match=f"^{root}/click_model_candidate/2/model.data: ")
    with repository.locked(), files_of_at_most(100_000), full:
        repository.stage(2, graph, OPTIONS)
    after = everything(repository.objects)
    assert {name: content for name, content in after.items() if "candidate" not in name} == before
    with repository.locked():
        put_live(repository, 2, beside=[1])
    assert named(repository) == [1, 2]


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


def test_release_killed_at_any_change_of_folder_leaves_whole_versions(tmp_path, make_version):
    for kill in every_kill():
        root = tmp_path / f"killed at {kill.at[0]}"
        release(ModelRepository(FolderObjects(root), NAMES), 1, make_version)
        with kill.watch(os, "replace", "rename", "link", "unlink", "rmdir"):
            release(ModelRepository(FolderObjects(root), NAMES), 2, make_version)
        repository = ModelRepository(FolderObjects(root), NAMES)
        check_what_is_published(repository, ([1], [2]))
        check_the_next_release(repository, make_version)
        assert sorted(p.name for p in root.rglob(".*")) == [f".{MODEL_NAME}.lock", ".objects.lock"]
    assert len(kill.steps) > 12


def break_off(server, make_version, step):
    """Return whether a release succeeds if the bucket fails after `step` requests."""
    from evergreen.storage.bucket import BucketObjects

    server.reset()

    def repository(now):
        return ModelRepository(BucketObjects("gs://models/triton"), NAMES, clock=lambda: now)

    release(repository(NOW), 1, make_version)
    seen, is_done = [], True
    fault = server.front.fail(
        lambda request: seen.append(1) or len(seen) > step,
        "status",
        status=403,
        message="gone",
        times=10**9,
    )
    try:
        release(repository(NOW), 2, make_version)
    except PermanentError:
        is_done = False
    server.front.faults.remove(fault)
    check_what_is_published(repository(NOW), ([1], [2]))
    # The lease of the interrupted release may still exist, but it has expired after 61 s.
    check_the_next_release(repository(NOW + 61.0), make_version)
    return is_done


@pytest.mark.parametrize(
    "steps",
    [
        (9, 25, 37, 200),
        pytest.param(range(999), marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_release_cut_off_from_bucket_at_any_request_leaves_whole_versions(
    cloud_storage, cloud_storage_server, make_version, steps
):
    assert next(step for step in steps if break_off(cloud_storage_server, make_version, step)) > 40
