"""Tests of files at unexpected paths of a lake.

Such files are refused, or skipped because of their names.
"""

import os
from datetime import datetime, timezone

import pytest

from components.extraction.lake_files import LakeFiles
from evergreen.runtime.errors import ContractError
from evergreen.storage.folder import FolderObjects
from tests.support.errors import raises
from tests.support.lakes import URI, extract_lake, open_storage, put

START = datetime(2026, 3, 1, tzinfo=timezone.utc)


@pytest.fixture
def lake(tmp_path, raw_table, write_lake):
    return write_lake(
        tmp_path / "la ke", raw_table(400, start=START.timestamp(), seconds=2 * 86_400)
    )


def opened(lake, ignore=()) -> LakeFiles:
    return LakeFiles(FolderObjects(lake), ignore=ignore)


PLACES = [
    ("dt=2026-03-03/part-0.parquet", "dt=2026-03-03/*"),
    ("2026/03/03/part-0.parquet", "2026/03/03/*"),
    ("part-0.parquet", "part-0.parquet"),
    ("day=2026-03-02/more.csv", "day=2026-03-02/more.csv"),
    ("day=2026-03-02/part-1", "day=2026-03-02/part-1"),
    ("day=2026-03-02/part-1.parquet.gz", "day=2026-03-02/part-1.parquet.gz"),
    ("day=2026-03-02/hour=1/part-1.parquet", "day=2026-03-02/hour=1/*"),
    ("day=2026-03-02/version=01/part-1.parquet", "day=2026-03-02/version=01/*"),
    ("version=1/part-1.parquet", "version=1/*"),
    ("outcomes/part-1.parquet", "outcomes/*"),
    ("outcomes/day=2026-03-02/part-1.csv", "outcomes/day=2026-03-02/part-1.csv"),
    ("archive/day=2026-03-02/part-1.parquet", "archive/day=2026-03-02/*"),
]


@pytest.mark.parametrize(("name", "pattern"), PLACES)
def test_file_without_place_is_named_and_refused_unless_passed_over(lake, name, pattern):
    before = opened(lake)
    path = lake / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((lake / "day=2026-03-01" / "part-0.parquet").read_bytes())
    with pytest.raises(ContractError) as caught:
        opened(lake)
    assert (
        f"has 1 unexpected files: {name}; expected only regular files "
        "day=YYYY-MM-DD/*.parquet" in str(caught.value)
    )
    assert f"""--set 'extraction.ignore=["{pattern}"]'""" in str(caught.value), (
        "the way out is the one that works"
    )
    after = opened(lake, [pattern])
    assert after.days == before.days
    assert [after.own_files(day) for day in after.days] == [
        before.own_files(day) for day in before.days
    ]


@pytest.mark.parametrize(
    "name", ["day=2026-3-1", "day=20260301", "day=9999-12-31", "day=2026-02-30", "day="]
)
def test_day_that_is_no_date_is_refused_and_never_another_days_folder(lake, name):
    (lake / name).mkdir()
    (lake / name / "part-0.parquet").write_bytes(
        (lake / "day=2026-03-01" / "part-0.parquet").read_bytes()
    )
    with raises(ContractError, "expected a date YYYY-MM-DD"):
        opened(lake)
    assert len(opened(lake, [f"{name}/*"]).days) == 2


@pytest.mark.parametrize(
    "name",
    [
        "_SUCCESS",
        "day=2026-03-01/_SUCCESS",
        "day=2026-03-01/.part-1.parquet.crc",
        "_temporary/0/part-1.parquet",
        "day=2026-03-01/version=3/_CLAIM",
        "day=2026-03-01/version=3/part-0.parquet",
        "day=2026-03-02/_notes/a.txt",
    ],
)
def test_hidden_files_and_those_of_versions_have_place(lake, name):
    path = lake / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    assert len(opened(lake).days) == 2


def test_many_files_are_counted_and_first_named(lake):
    (lake / "dt=2026-03-03").mkdir()
    for k in range(9):
        (lake / "dt=2026-03-03" / f"part-{k}.parquet").touch()
    with raises(ContractError, "9 unexpected files", "dt=2026-03-03/part-4.parquet and 4 more"):
        opened(lake)


def test_pipe_among_days_files_is_named_and_not_waited_for(lake):
    os.mkfifo(lake / "day=2026-03-01" / "part-9.parquet")
    with raises(
        ContractError, "1 unexpected files", "day=2026-03-01/part-9.parquet", "regular files"
    ):
        opened(lake)
    assert len(opened(lake, ["*/part-9.parquet"]).days) == 2


def test_run_passes_over_what_its_settings_name(flags, run_main, tmp_path, capsys):
    (tmp_path / "my lake" / "notes").mkdir()
    (tmp_path / "my lake" / "notes" / "readme.md").touch()
    assert run_main(flags) == 2
    assert "has 1 unexpected files: notes/readme.md" in capsys.readouterr().err
    assert run_main(flags, settings="'extraction.ignore=[\"notes/*\"]'") == 0


def test_bucket_is_evaluated_by_same_rules(tmp_path, lake, cloud_storage):
    (lake / "dt=2026-03-03").mkdir()
    (lake / "dt=2026-03-03" / "part-0.parquet").write_bytes(b"x")
    put(lake)
    with raises(ContractError, "dt=2026-03-03/part-0.parquet"):
        extract_lake(URI, tmp_path / "work", None)
    assert open_storage(URI).list()
