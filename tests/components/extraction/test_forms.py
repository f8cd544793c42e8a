"""Which form a file has, which files of a folder count, and in what order."""

from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo, raw_rows
from components.extraction.readers import forms
from components.extraction.readers.criteo import CriteoParquet
from components.extraction.readers.forms import click_log_files
from components.extraction.readers.parquet import RawParquet
from components.runtime.errors import ContractError

find_reader = partial(forms.find_reader, recommender=criteo.CRITEO_RECOMMENDER)


def test_days_are_read_in_the_order_of_their_numbers(tmp_path):
    for name in ("day_10.gz", "day_2", "day_1.gz", ".day_0.gz.part", "_day_4", "readme.txt", "license.txt", "notes.md"):
        (tmp_path / name).touch()
    assert [p.name for p in click_log_files(tmp_path)] == ["day_1.gz", "day_2", "day_10.gz"]


def test_a_folder_without_click_logs_is_refused(tmp_path):
    (tmp_path / "notes.md").touch()
    with pytest.raises(ContractError, match=r"holds no file of rows, expected day_N"):
        click_log_files(tmp_path)


REFUSED = {
    "empty": ("", "is empty"),
    "Criteo's unlabelled test file": ("\t".join("0" * 39) + "\n", "first line has 39 tab-separated"),
    "prose": ("Dear all,\nplease find attached\n", "is no Criteo file"),
    "header without C26": (",".join(["Label", *criteo.FEATURES[:-1]]) + "\n", r"names \['C26'\] not exactly once"),
    "header with I1 twice": (",".join(["Label", "i1", *criteo.FEATURES]) + "\n", r"names \['I1'\] not exactly once"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_text_of_no_known_form_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "day_0").write_text(text)
    with pytest.raises(ContractError, match=message) as caught:
        find_reader(tmp_path / "day_0")
    assert str(tmp_path / "day_0") in str(caught.value)


def test_parquet_is_recognised_by_its_columns(tmp_path, raw_table):
    pq.write_table(raw_table(20), tmp_path / "raw.parquet")
    pq.write_table(raw_table(20).select([raw_rows.LABEL, *criteo.FEATURES]), tmp_path / "day_0")
    assert isinstance(find_reader(tmp_path / "raw.parquet"), RawParquet)
    assert isinstance(find_reader(tmp_path / "day_0"), CriteoParquet)


def test_parquet_of_other_columns_is_refused(tmp_path):
    pq.write_table(pa.table({"label": [1], "I1": [2]}), tmp_path / "a.parquet")
    with pytest.raises(ContractError, match=r"a.parquet is no Criteo Parquet file: it lacks the columns \['I2'"):
        find_reader(tmp_path / "a.parquet")
