"""Tests of the uploader: uploads are complete and verified before local files are deleted."""

import base64
import hashlib
import json
import os
import random
import signal
import subprocess
import sys

import google_crc32c
import pytest

from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.storage import folder as folder_storage
from evergreen.storage.bucket import BucketObjects
from evergreen.storage.folder import FolderObjects
from evergreen.storage.objects import Differs
from monitoring.uploader import MAX_PAUSE_SECONDS, Uploader, UploaderSettings, main, run
from testing.paths import REPOSITORY
from testing.processes import at_once, wait_for
from tests.support.errors import raises
from tests.support.power_cut import Disk

NAME = "day=2025-11-13/part-1.parquet"
OUTCOMES = "outcomes/day=2025-11-13/part-2.parquet"
CONTENT = {NAME: b"rows" * 100_000, OUTCOMES: b"late clicks"}
URI = "gs://models/a lake"


def open_bucket(**settings):
    timeouts = {"retry_seconds": 10.0, "first_delay_seconds": 0.001, "chunk_bytes": 2 << 20}
    return BucketObjects(URI, **{**timeouts, **settings})


@pytest.fixture
def archive(tmp_path):
    folder = tmp_path / "an archive"
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(content)
    (folder / "day=2025-11-13" / ".part-2.parquet.aside").write_bytes(b"torn")
    (folder / "day=2025-11-13" / "notes.txt").write_bytes(b"somebody's")
    return folder


@pytest.fixture(params=["folder", "bucket"])
def open_lake(request, tmp_path):
    """Opens the lake. Every call returns a new handle on the same lake."""
    if request.param == "folder":
        return lambda: FolderObjects(tmp_path / "a lake")
    request.getfixturevalue("cloud_storage")
    return open_bucket


@pytest.fixture
def bucket(cloud_storage):
    """The double of the bucket, which can inject faults."""
    return cloud_storage


@pytest.fixture(autouse=True)
def signals():
    """Restores this process's signal handlers, because `main` sets its own."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


def remaining(archive) -> list[str]:
    return sorted(name for name in CONTENT if (archive / name).exists())


def expect_moved(archive, lake, names=tuple(CONTENT)):
    """Assert that the bucket and the markers have the same names, sizes and hashes of files.

    No local file may be left.
    """
    assert [each.name for each in lake.list()] == sorted(names)
    assert {name: lake.read(name).content for name in names} == {
        name: CONTENT[name] for name in names
    }
    markers = [json.loads(path.read_text()) for path in (archive / "uploaded").glob("*.json")]
    assert sorted((m["name"], m["num_bytes"], m["sha256"]) for m in markers) == sorted(
        (name, len(CONTENT[name]), hashlib.sha256(CONTENT[name]).hexdigest()) for name in names
    )
    assert not set(remaining(archive)) & set(names)


def test_rows_and_late_outcomes_are_moved_and_leave_markers(archive, open_lake):
    assert Uploader(archive, open_lake()).run_once() == [NAME, OUTCOMES]
    expect_moved(archive, open_lake())
    assert Uploader(archive, open_lake()).run_once() == []
    assert sorted(path.name for path in (archive / "day=2025-11-13").iterdir()) == [
        ".part-2.parquet.aside",
        "notes.txt",
    ]


def test_files_of_day_are_moved_in_order_of_sealing(archive, open_lake):
    """The names of archive files are random.

    In the order of names, newer rows could be read before older rows, and the watermark would skip
    the older rows.
    """
    names = [f"day=2025-11-13/part-{letter}.parquet" for letter in "dacb"]
    (archive / NAME).unlink()
    (archive / OUTCOMES).unlink()
    for age, name in enumerate(names):
        (archive / name).write_bytes(b"rows")
        os.utime(archive / name, (1e9 + age, 1e9 + age))
    (archive / "day=2025-11-12").mkdir()
    # The last sealed file has rows of the previous day.
    (archive / "day=2025-11-12" / "part-z.parquet").write_bytes(b"rows")
    assert Uploader(archive, open_lake()).run_once() == ["day=2025-11-12/part-z.parquet", *names]


def test_buckets_marker_names_object(archive, bucket):
    Uploader(archive, open_bucket()).run_once()
    marker = json.loads((archive / "uploaded" / "part-1.parquet.json").read_text())
    assert marker["lake_uri"] == f"{URI}/{NAME}"


def test_power_cut_at_any_moment_loses_neither_rows_nor_proof_of_upload(tmp_path):
    def make(case, moment):
        archive, lake = tmp_path / f"{case}" / "archive", tmp_path / f"{case}" / "lake"
        for name, content in CONTENT.items():
            (archive / name).parent.mkdir(parents=True)
            (archive / name).write_bytes(content)
        lake.mkdir()
        return archive, lake, Disk(tmp_path, moment)

    archive, lake, disk = make("clean", None)
    with disk:
        Uploader(archive, lake).run_once()
    for moment in range(len(disk.steps) + 1):
        for seed in range(2):
            archive, lake, broken = make(f"{moment} {seed}", moment)
            with broken:
                Uploader(archive, lake).run_once()
            broken.cut_power(random.Random(seed))
            for name, content in CONTENT.items():
                stored = lake / name
                assert not stored.exists() or stored.read_bytes() == content, (
                    f"incomplete file after {moment}"
                )
                marker = archive / "uploaded" / f"{stored.name}.json"
                assert (archive / name).exists() or (stored.exists() and marker.exists()), (
                    f"lost after {moment}"
                )
            Uploader(archive, lake).run_once()
            expect_moved(archive, FolderObjects(lake))


def test_file_that_differs_when_read_back_is_not_published(archive, tmp_path, monkeypatch):
    lake, fsync = tmp_path / "a lake", folder_storage.os.fsync

    def spoil(descriptor):
        for aside in lake.glob("day=*/.part*"):
            aside.write_bytes(CONTENT[NAME][:-1] + b"x")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(folder_storage.os, "fsync", spoil)
        with raises(TemporaryError, "part-1.parquet", "not moved", "does not match"):
            Uploader(archive, lake).run_once()
    assert remaining(archive) == [NAME, OUTCOMES]
    assert FolderObjects(lake).list() == []
    Uploader(archive, lake).run_once()
    expect_moved(archive, FolderObjects(lake))


def test_local_file_stays_if_service_reports_another_checksum(archive, bucket):
    """The service reports another checksum, as if the stored bytes were corrupt."""
    true = base64.b64encode(google_crc32c.Checksum(CONTENT[NAME]).digest())
    fault = bucket.fail(
        lambda r: r.method == "GET" and r.name.endswith(NAME),
        "damage",
        times=2,
        change=lambda body: body.replace(true, b"AAAAAA=="),
    )
    with raises(Differs, "CRC32C AAAAAA==", "expected", f"({true.decode()}"):
        Uploader(archive, open_bucket()).run_once()
    assert fault.met == 2, "the checksum must be requested before and after the upload"
    assert remaining(archive) == [NAME]
    Uploader(archive, open_bucket()).run_once()
    expect_moved(archive, open_bucket())


@pytest.mark.parametrize(("do", "status"), [("status", 503), ("cut", 0)])
def test_outage_keeps_every_file_and_first_pass_after_it_moves_them(archive, bucket, do, status):
    bucket.fail(
        lambda request: True,
        do,
        status=status,
        message="Quota exceeded for the moment",
        times=10**6,
    )
    with raises(TemporaryError, "part-1.parquet", "not moved"):
        Uploader(archive, open_bucket(retry_seconds=0.05)).run_once()
    assert remaining(archive) == [NAME, OUTCOMES]
    bucket.faults.clear()
    Uploader(archive, open_bucket()).run_once()
    expect_moved(archive, open_bucket())


def test_passes_back_off_while_lake_is_unavailable_and_are_frequent_afterwards(archive, bucket):
    bucket.fail(lambda request: True, "status", times=10**6)
    waits = []

    class Stop:
        def wait(self, seconds):
            waits.append(seconds)
            if len(waits) == 12:
                bucket.faults.clear()
            return len(waits) == 14

    run(Uploader(archive, open_bucket(retry_seconds=0.01)), Stop(), 0.5)
    assert waits == [min(0.5 * 2**n, MAX_PAUSE_SECONDS) for n in range(12)] + [0.5, 0.5]
    expect_moved(archive, open_bucket())


@pytest.mark.parametrize(
    ("status", "message"), [(403, "The bucket's quota is exceeded"), (401, "Invalid credentials")]
)
def test_full_disk_or_missing_permission_stops_process_and_keeps_files(
    archive, bucket, capsys, status, message
):
    bucket.fail(
        lambda request: request.is_upload, "status", status=status, message=message, times=10**6
    )
    argv = ["--archive", str(archive), "--lake", URI, "--interval-seconds", "0.01"]
    assert main(argv, {}) == 3
    error = capsys.readouterr().err
    assert f"refused ({status} {message})" in error
    assert "roles/storage.objectUser on bucket models" in error
    assert remaining(archive) == [NAME, OUTCOMES]
    assert not list((archive / "uploaded").iterdir())


def test_same_name_with_other_bytes_is_refused_while_others_move(archive, open_lake, capsys):
    generation = open_lake().write(NAME, b"somebody else's")
    uploader = Uploader(archive, open_lake())
    with raises(Differs, "part-1.parquet", "other bytes"):
        uploader.run_once()
    assert (remaining(archive), list(uploader.refused)) == ([NAME], [NAME])
    assert open_lake().read(NAME) == (b"somebody else's", generation)
    assert open_lake().read(OUTCOMES).content == CONTENT[OUTCOMES]
    assert not (archive / "uploaded" / "part-1.parquet.json").exists()
    assert uploader.run_once() == [], "the file must not be tried again"
    assert (
        main(
            ["--archive", str(archive), "--lake", open_lake().uri.replace("%20", " "), "--once"], {}
        )
        == 1
    )
    assert "part-1.parquet stays in the archive: " in capsys.readouterr().err


def test_failing_file_does_not_delay_others_of_next_pass(archive, bucket):
    bucket.fail(lambda r: r.is_upload and r.name.endswith(NAME), "status", times=10**6)
    uploader = Uploader(archive, open_bucket(retry_seconds=0.05))
    for _ in range(2):
        with raises(TemporaryError, "part-1.parquet", "not moved"):
            uploader.run_once()
    assert remaining(archive) == [NAME]


def test_two_uploaders_at_once_do_no_harm(tmp_path, open_lake):
    archive, contents = tmp_path / "an archive", {}
    (archive / "day=2025-11-13").mkdir(parents=True)
    for turn in range(12):
        name = f"day=2025-11-13/part-{turn}.parquet"
        contents[name] = f"rows of {turn}".encode() * 1000
        (archive / name).write_bytes(contents[name])
    uploaders, moved = [Uploader(archive, open_lake()) for _ in range(3)], []
    at_once(3, lambda me: moved.append(uploaders[me].run_once()))
    assert len(moved) == 3, "each file must be moved once"
    assert {name for names in moved for name in names} == set(contents)
    assert {
        each.name: open_lake().read(each.name).content for each in open_lake().list()
    } == contents
    assert len(list((archive / "uploaded").glob("part-*.json"))) == len(contents)
    assert not list(archive.glob("day=*/part-*"))


def test_once_moves_existing_files_and_ends(archive, open_lake, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lake = URI if open_lake().uri.startswith("gs://") else "a lake"
    assert main(["--archive", "an archive", "--lake", lake, "--once"], {}) == 0
    expect_moved(archive, open_lake())


def test_process_moves_sealed_files_to_bucket_while_running_until_sigterm(
    archive, bucket, tmp_path
):
    late = archive / "day=2025-11-14" / "part-3.parquet"
    late.parent.mkdir()
    argv = ["--archive", str(archive), "--lake", URI, "--interval-seconds", "0.05"]
    process = subprocess.Popen(
        [sys.executable, "-m", "monitoring.uploader", *argv],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        wait_for(lambda: not remaining(archive) or process.poll() is not None, "the upload")
        (tmp_path / "aside").write_bytes(b"sealed later")
        os.rename(tmp_path / "aside", late)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert not late.exists(), "the file must be moved after the signal"
    assert open_bucket().read("day=2025-11-14/part-3.parquet").content == b"sealed later"


def test_lake_that_cannot_be_written_stops_with_its_name_and_keeps_file(archive, tmp_path, capsys):
    lake = tmp_path / "a lake"
    lake.mkdir()
    (lake / "day=2025-11-13").write_text("a file where a folder belongs")
    assert main(["--archive", str(archive), "--lake", str(lake), "--once"], {}) == 3
    assert "part-1.parquet and the files sealed after it were not moved" in capsys.readouterr().err
    assert remaining(archive) == [NAME, OUTCOMES]


def test_unreadable_file_is_named_and_all_others_are_moved(archive, tmp_path, capsys):
    unreadable = [archive / "day=2025-11-12" / f"part-{number}.parquet" for number in range(2)]
    for path in unreadable:
        path.mkdir(parents=True)
    assert main(["--archive", str(archive), "--lake", str(tmp_path / "a lake"), "--once"], {}) == 3
    error = capsys.readouterr().err
    assert "2 unreadable files were not moved" in error
    assert all(f"{path} cannot be read: Is a directory" in error for path in unreadable)
    assert remaining(archive) == []
    assert all(path.exists() for path in unreadable)
    assert {path.name for path in (tmp_path / "a lake").rglob("part-*")} == {
        "part-1.parquet",
        "part-2.parquet",
    }


def test_archive_and_lake_must_differ(tmp_path):
    with raises(ContractError, "another folder"):
        UploaderSettings(archive=tmp_path, lake=str(tmp_path / "x" / ".."))


@pytest.mark.parametrize("lake", ["s3://bucket/lake", "ftp://host/x"])
def test_lake_of_another_kind_is_invalid_input(tmp_path, capsys, lake):
    assert main(["--archive", str(tmp_path), "--lake", lake], {}) == 2
    assert f"lake is '{lake}', expected a folder or gs://bucket/prefix" in capsys.readouterr().err
