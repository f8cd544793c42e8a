"""The uploader: whole files, markers, and a crash at any named point."""

from __future__ import annotations

import hashlib
import json

import pytest

from components.contracts.errors import ContractError, TemporaryError
from monitoring.settings import UploaderSettings
from monitoring.uploader import Uploader
from tests.monitoring.memory.test_archive import Crash, crash_at

NAME = "day=2025-11-13/part-1.parquet"
CONTENT = b"rows" * 100_000


@pytest.fixture
def folders(tmp_path):
    archive, lake = tmp_path / "an archive", tmp_path / "a lake"
    (archive / "day=2025-11-13").mkdir(parents=True)
    (archive / NAME).write_bytes(CONTENT)
    (archive / "day=2025-11-13" / ".part-2.parquet.aside").write_bytes(b"torn")
    return archive, lake


def expect_moved(archive, lake):
    assert sorted(p.relative_to(lake).as_posix() for p in lake.rglob("*") if p.is_file()) == [NAME]
    assert (lake / NAME).read_bytes() == CONTENT
    assert not (archive / NAME).exists()
    marker = json.loads((archive / "uploaded" / "part-1.parquet.json").read_text())
    assert marker["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert (marker["name"], marker["num_bytes"]) == (NAME, len(CONTENT))


def test_a_sealed_file_is_moved_and_leaves_a_marker(folders):
    assert Uploader(*folders).run_once() == [NAME]
    expect_moved(*folders)
    assert Uploader(*folders).run_once() == []


@pytest.mark.parametrize("point", ["uploader.copied", "uploader.renamed", "uploader.marked", "uploader.removed"])
def test_a_crash_at_any_point_is_finished_by_the_next_pass(folders, point):
    with pytest.raises(Crash):
        Uploader(*folders, checkpoint=crash_at(point)).run_once()
    Uploader(*folders).run_once()
    expect_moved(*folders)


def test_a_file_that_reads_back_otherwise_is_not_published(folders):
    archive, lake = folders

    def spoil(name: str) -> None:
        if name == "uploader.copied":
            (aside,) = lake.glob("day=*/.*")
            aside.write_bytes(CONTENT[:-1] + b"x")

    with pytest.raises(TemporaryError, match="reads back otherwise"):
        Uploader(*folders, checkpoint=spoil).run_once()
    assert (archive / NAME).exists()
    assert not (lake / NAME).exists()
    Uploader(*folders).run_once()
    expect_moved(*folders)


def test_a_lake_that_cannot_be_written_is_a_temporary_error(folders):
    archive, lake = folders
    lake.mkdir()
    (lake / "day=2025-11-13").write_text("a file where a folder belongs")
    with pytest.raises(TemporaryError, match="part-1.parquet was not moved"):
        Uploader(archive, lake).run_once()
    assert (archive / NAME).exists()


def test_archive_and_lake_must_differ(tmp_path):
    with pytest.raises(ContractError, match="expected another folder than the archive"):
        UploaderSettings(archive=tmp_path, lake=tmp_path / "x" / "..")
