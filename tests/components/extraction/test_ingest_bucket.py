"""A user's files become a lake in a bucket: what a folder would hold, whole, and nothing of it before all is up."""

from __future__ import annotations

import itertools

import pytest

from components.extraction.ingest import main
from components.storage.bucket import BucketObjects
from tests.support.lakes import URI, open_storage

NUM_DAYS = 4


@pytest.fixture
def data(tmp_path, criteo_rows, write_text):
    return write_text(tmp_path / "day_0.gz", criteo_rows(400))


@pytest.fixture
def ingest(tmp_path, data, capsys, cloud_storage):
    """Runs the tool; its exit code and stderr."""

    def run(lake=URI, fraction=0.8, days=NUM_DAYS):
        flags = {"data": data, "lake": lake, "last-day": "2026-03-10", "days": days, "lake-fraction": fraction}
        flags["replay"] = tmp_path / "replay" / "replay.parquet"
        code = main([f"--{name}={value}" for name, value in flags.items()])
        return code, capsys.readouterr().err

    return run


def held() -> dict[str, bytes]:
    objects = open_storage(URI)
    return {each.name: objects.read(each.name).content for each in objects.list()}


def in_folder(ingest, tmp_path, **settings) -> dict[str, bytes]:
    lake = tmp_path / "folder"
    assert ingest(lake, **settings)[0] == 0
    return {path.relative_to(lake).as_posix(): path.read_bytes() for path in sorted(lake.rglob("*.parquet"))}


def test_a_bucket_holds_what_a_folder_would_and_nothing_else(ingest, tmp_path):
    assert ingest()[0] == 0
    replay = (tmp_path / "replay" / "replay.parquet").read_bytes()
    found = held()
    assert found == in_folder(ingest, tmp_path)
    assert len(found) == NUM_DAYS
    assert (tmp_path / "replay" / "replay.parquet").read_bytes() == replay
    assert [path.name for path in (tmp_path / "replay").iterdir()] == ["replay.parquet"]


def test_ingesting_again_sends_nothing_and_other_settings_replace_what_was_there(ingest, tmp_path, cloud_storage):
    open_storage(URI).write("day=2026-03-07/part-other.parquet", b"another's")
    ingest()
    listed = open_storage(URI).list()
    cloud_storage.seen.clear()
    assert ingest()[0] == 0
    assert open_storage(URI).list() == listed
    assert not [request for request in cloud_storage.seen if request.is_upload]
    assert ingest(fraction=0.3)[0] == 0
    found = held()
    assert found.pop("day=2026-03-07/part-other.parquet") == b"another's"
    assert found == in_folder(ingest, tmp_path, fraction=0.3)
    assert len(found) == 2


def test_files_appear_in_the_order_of_their_rows(ingest, cloud_storage):
    ingest()
    copies = [
        request.path.partition("/rewriteTo/")[2] for request in cloud_storage.seen if "/rewriteTo/" in request.path
    ]
    assert [f"2026-03-{day:02d}" in copy for copy, day in zip(copies, range(7, 11))] == [True] * NUM_DAYS
    assert len(copies) == NUM_DAYS


class Killed(BaseException):
    pass


@pytest.mark.parametrize("call", ["write", "copy"])
def test_a_killed_ingest_shows_no_day_before_all_are_up_and_no_later_one_before_an_earlier(
    ingest, tmp_path, cloud_storage, monkeypatch, call
):
    calls, method = itertools.count(), getattr(BucketObjects, call)

    def killed(self, *arguments, **more):
        if next(calls) >= 2:
            raise Killed
        return method(self, *arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(BucketObjects, call, killed)
        with pytest.raises(Killed):
            ingest()
    whole, seen = in_folder(ingest, tmp_path), {n: c for n, c in held().items() if n.startswith("day=")}
    assert seen == ({} if call == "write" else dict(list(whole.items())[:2]))
    cloud_storage.seen.clear()
    assert ingest()[0] == 0
    assert held() == whole
    assert len([request for request in cloud_storage.seen if request.is_upload]) == (2 if call == "write" else 0)


def test_what_was_cut_off_is_not_mixed_with_an_ingest_of_other_settings(ingest, tmp_path, monkeypatch):
    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(BucketObjects, "copy", killed)
        with pytest.raises(Killed):
            ingest()
    assert ingest(days=2)[0] == 0
    assert held() == in_folder(ingest, tmp_path, days=2)


@pytest.mark.parametrize(("lake", "code"), [("gs://nowhere/lake", 3), ("gs://", 2), ("s3://bucket/lake", 2)])
def test_a_lake_that_cannot_be_is_told_before_a_row_is_read(ingest, data, lake, code):
    data.write_bytes(b"this would be refused, too")
    found, error = ingest(lake)
    assert (found, error.count("error: ")) == (code, 1)
    assert "day_0" not in error
