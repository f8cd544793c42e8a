"""Tests of the file order of an encoded folder, and of invalid lists."""

import pytest

from evergreen.contracts.hugectr_folder import FILE_LIST, listed_files, write_file_list
from evergreen.runtime.errors import ContractError

NAMES = ["part_9.parquet", "part_10.parquet"]


@pytest.fixture
def folder(tmp_path):
    for name in NAMES:
        (tmp_path / name).touch()
    return tmp_path


def test_files_come_in_order_of_list_wherever_folder_is(folder, tmp_path):
    write_file_list(folder, NAMES, final=tmp_path / "else where")
    assert listed_files(folder) == [folder / name for name in NAMES]
    assert (folder / FILE_LIST).read_text().splitlines() == [
        "2",
        *(f"{tmp_path}/else where/{n}" for n in NAMES),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("", "cannot be read"),
        ("7\n/a/part_9.parquet\n", "names 1 files, expected '7' as in"),
        ("two\n/a/part_9.parquet\n", "names 1 files, expected 'two' as in"),
        ("1\n/a/part_1.parquet\n", r"lacks the listed files \['part_1.parquet'\]"),
    ],
    ids=["no list", "empty", "wrong count", "no count", "absent file"],
)
def test_list_that_cannot_be_right_is_refused(folder, text, message):
    if text is not None:
        (folder / FILE_LIST).write_text(text)
    with pytest.raises(ContractError, match=message):
        listed_files(folder)
