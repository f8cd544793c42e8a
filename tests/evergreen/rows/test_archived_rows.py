"""Tests that readers find an archive's served rows, and report unreadable files."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.rows.archived_rows import MovedAway, archived_files, parquet_file, reading_parquet
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import open_objects
from tests.support.errors import raises

FILES = [
    "day=2026-03-01/part-0.parquet",
    "day=2026-03-02/part-1.parquet",
    "day=2026-03-03/part-2.parquet",
]
NO_SERVED_ROWS = [
    "day=2026-03-02/.part-3.parquet",
    "day=2026-03-02/_metadata.parquet",
    "day=2026-03-02/notes.txt",
    "day=2026-03-02/version=1/part-0.parquet",
    "outcomes/day=2026-03-02/part-0.parquet",
    "part-0.parquet",
]


@pytest.fixture(params=["folder", "bucket"])
def archive(request, tmp_path):
    if request.param == "bucket":
        request.getfixturevalue("cloud_storage")
    objects = open_objects(
        str(tmp_path / "archive") if request.param == "folder" else "gs://models/an archive"
    )
    pq.write_table(pa.table({"label": [0, 1]}), tmp_path / "rows.parquet")
    for name in [*FILES, *NO_SERVED_ROWS]:
        if "/." not in name:
            objects.write(name, tmp_path / "rows.parquet")
        elif request.param == "folder":  # the archive ignores a hidden file
            (tmp_path / "archive" / name).write_bytes(b"half a file")
    return objects


def test_only_visible_parquet_files_of_day_folders_hold_served_rows(archive):
    assert [each.name for each in archived_files(archive)] == FILES
    assert [each.day for each in archived_files(archive)] == [
        "2026-03-01",
        "2026-03-02",
        "2026-03-03",
    ]


def test_days_and_first_day_select_rows(archive):
    assert [
        each.name
        for each in archived_files(archive, days=["2026-03-03", "2026-03-01", "2026-04-01"])
    ] == [
        FILES[0],
        FILES[2],
    ]
    assert [each.name for each in archived_files(archive, first_day="2026-03-02")] == FILES[1:]


def test_file_yields_its_rows_and_corrupt_or_absent_file_is_named(archive):
    archive.write(FILES[1], b"PAR1 and no more")
    whole, corrupt, moved = archived_files(archive)
    with whole.opened() as file:
        assert file.read().column("label").to_pylist() == [0, 1]
    with (
        raises(ContractError, "day=2026-03-02/part-1.parquet", "readable"),
        corrupt.opened(),
    ):
        pass
    archive.delete(moved.name)
    gone, words = (
        (ContractError, "is absent")
        if archive.uri.startswith("gs:")
        else (MovedAway, "has moved away")
    )
    with pytest.raises(gone, match=f"day=2026-03-03/part-2.parquet {words}"), moved.opened():
        pass


def test_column_name_that_is_no_text_is_corrupt_file(tmp_path):
    pq.write_table(
        pa.table({"label": [0, 1]}), path := tmp_path / "rows.parquet", store_schema=False
    )
    content = path.read_bytes()
    for byte in range(5):
        path.write_bytes(content)
        corrupt = bytearray(content)
        corrupt[content.index(b"label") + byte] ^= 0x80
        path.write_bytes(corrupt)
        with (
            raises(ContractError, "rows.parquet", "readable"),
            reading_parquet(path),
        ):
            parquet_file(path).read(columns=["label"]).column("label")
