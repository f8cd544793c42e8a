"""Tests of object storage in a folder: generations, leftover files, errors and full disks."""

import errno
import os
from pathlib import Path

import pytest

from evergreen.runtime.durable import whole_file
from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.storage import folder as module
from evergreen.storage.folder import FolderObjects
from evergreen.storage.objects import ABSENT, Changed
from tests.support.errors import raises
from tests.support.full_disk import files_of_at_most


def test_generations_differ_if_clock_stops_or_is_set_back(tmp_path, monkeypatch):
    objects, other = FolderObjects(tmp_path), FolderObjects(tmp_path)
    generations = set()
    for at, now in enumerate([10**18, 10**18, 10**18 - 10**9, 0, 10**18 + 5] * 4):
        monkeypatch.setattr(module.time, "time_ns", lambda now=now: now)
        generations.add((objects if at % 2 else other).write("config", b"same size"))
        if at % 3 == 0:
            objects.delete("config")
    assert len(generations) == 20


def test_object_written_by_other_program_has_generation_too(tmp_path):
    (tmp_path / "config").write_text("by hand")
    objects = FolderObjects(tmp_path)
    stored = objects.read("config")
    assert stored.content == b"by hand"
    with pytest.raises(Changed):
        objects.write("config", b"new", if_generation=ABSENT)
    objects.write("config", b"new", if_generation=stored.generation)


def test_file_of_killed_writer_is_no_object_and_is_removed_at_next_change(tmp_path):
    left = tmp_path / "click_model_candidate" / "4"
    with whole_file(left / "model.onnx") as file:
        # Leave a copy of the unfinished file, like a kill at this point.
        written = Path(file.name).name
        os.link(file.name, left / (written[:-1] + ("0" if written.endswith("f") else "f")))
    (left / "model.onnx").unlink()
    (left / ".gitignore").touch()
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / f".x.{'f' * 32}").touch()
    objects = FolderObjects(tmp_path)
    assert objects.list() == []
    objects.write("other", b"1")
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        ".gitignore",
        ".objects.lock",
        "4",
        "click_model_candidate",
        "other",
    ]


def test_folders_that_removal_empties_are_removed_too(tmp_path):
    objects = FolderObjects(tmp_path / "root")
    objects.write("a/b/c/1", b"1")
    objects.write("a/2", b"2")
    objects.delete("a/b/c/1")
    assert sorted(
        p.relative_to(tmp_path).as_posix()
        for p in tmp_path.rglob("*")
        if not p.name.startswith(".")
    ) == [
        "root",
        "root/a",
        "root/a/2",
    ]
    objects.delete("a/2")
    objects.write("d/e/1", b"1")
    objects.move("d/e", "f")
    objects.delete("f/1")
    assert [p.name for p in (tmp_path / "root").iterdir()] == [".objects.lock"]


def refuse_links(monkeypatch, code):
    def link(source, target):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, PermanentError), (errno.ESTALE, TemporaryError)]
)
def test_system_error_is_temporary_or_permanent(tmp_path, monkeypatch, code, kind):
    objects = FolderObjects(tmp_path)
    objects.write("a", b"content")
    refuse_links(monkeypatch, code)
    with pytest.raises(kind, match=os.strerror(code)):
        objects.copy("a", "b")
    assert [each.name for each in objects.list()] == ["a"]


def test_root_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with raises(PermanentError, "file", "Not a directory"):
        FolderObjects(tmp_path / "file" / "root").write("a", b"1")


def test_fetch_that_disk_refuses_or_corrupts_is_error(tmp_path, monkeypatch):
    objects = FolderObjects(tmp_path / "root")
    objects.write("a", b"content")
    (listed,) = objects.list()
    with files_of_at_most(3), raises(PermanentError, "File too large"):
        objects.fetch(listed, tmp_path / "part")
    monkeypatch.setattr(module, "_are_equal", lambda one, other: False)
    with raises(TemporaryError, "part", "does not match"):
        objects.fetch(listed, tmp_path / "part")


@pytest.mark.parametrize("code", [None, errno.EPERM, errno.EMLINK])
def test_copy_needs_no_space_if_file_system_has_links(tmp_path, monkeypatch, code):
    if code is not None:
        refuse_links(monkeypatch, code)
    objects = FolderObjects(tmp_path)
    objects.write("a", b"content")
    generation = objects.copy("a", "b/c")
    assert objects.read("b/c") == (b"content", generation)
    assert ((tmp_path / "a").stat().st_ino == (tmp_path / "b" / "c").stat().st_ino) == (
        code is None
    )


def test_full_disk_is_reported_and_leaves_existing_files(tmp_path):
    objects = FolderObjects(tmp_path / "root")
    generation = objects.write("model.onnx", b"before")
    for name in ("model.onnx", "new"):
        with (
            files_of_at_most(100_000),
            raises(PermanentError, f"{tmp_path}/root/{name}", "File too large"),
        ):
            objects.write(name, bytes(200_000))
    assert objects.read("model.onnx") == (b"before", generation)
    assert [each.name for each in objects.list()] == ["model.onnx"]
    assert sorted(p.name for p in (tmp_path / "root").iterdir()) == [".objects.lock", "model.onnx"]


def test_folder_instead_of_object_is_reported(tmp_path):
    objects = FolderObjects(tmp_path)
    objects.write("a/b", b"1")
    with pytest.raises(PermanentError, match=str(tmp_path)):
        objects.write("a", b"2")
    with pytest.raises(PermanentError, match=str(tmp_path)):
        objects.write("a/b/c", b"2")
    assert [each.name for each in objects.list()] == ["a/b"]


def test_unreadable_file_is_error_and_not_absent(tmp_path):
    objects = FolderObjects(tmp_path / "root")
    objects.write("a/b", b"1")
    os.symlink("turns", tmp_path / "root" / "a" / "turns")
    for call in (objects.list, lambda: objects.read("a/turns")):
        with raises(PermanentError, "turns", "symbolic links"):
            call()


def test_source_file_that_is_absent_is_named(tmp_path):
    with raises(PermanentError, "no such file", "No such file"):
        FolderObjects(tmp_path / "root").write("a", tmp_path / "no such file")
