"""Tests of file formats: detection of a format, the files of a folder, and Parquet."""

from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.contracts import criteo, raw_rows
from evergreen.rows import forms
from evergreen.rows.forms import FileReader, RawReader, click_log_files
from evergreen.rows.parquet import RawParquet
from evergreen.rows.times import TimeSpan
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises, says

find_reader = partial(forms.find_reader, recommender=criteo.CRITEO_RECOMMENDER)


def test_days_are_read_in_order_of_their_numbers(tmp_path):
    for name in (
        "day_10.gz",
        "day_2",
        "day_1.gz",
        ".day_0.gz.part",
        "_day_4",
        "readme.txt",
        "license.txt",
        "notes.md",
    ):
        (tmp_path / name).touch()
    assert [p.name for p in click_log_files(tmp_path)] == ["day_1.gz", "day_2", "day_10.gz"]


def test_file_that_exists_compressed_and_uncompressed_is_refused(tmp_path):
    for name in ("day_0", "day_0.gz", "day_1.gz"):
        (tmp_path / name).touch()
    with says(ContractError, "packed-and-unpacked", file=tmp_path / "day_0.gz"):
        click_log_files(tmp_path)


def test_folder_without_click_logs_is_refused(tmp_path):
    (tmp_path / "notes.md").touch()
    with raises(ContractError, "no file of rows", "day_N"):
        click_log_files(tmp_path)


REFUSED = {
    "empty": ("", "is empty"),
    "Criteo's unlabelled test file": (
        "\t".join("0" * 39) + "\n",
        "first line has 39 tab-separated",
    ),
    "prose": ("Dear all,\nplease find attached\n", "is not a Criteo file"),
    "header without C26": (
        ",".join(["Label", *criteo.FEATURES[:-1]]) + "\n",
        r"lacks the Criteo columns \['C26'\] or has them twice",
    ),
    "header with I1 twice": (
        ",".join(["Label", "i1", *criteo.FEATURES]) + "\n",
        r"lacks the Criteo columns \['I1'\] or has them twice",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_text_of_unknown_form_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "day_0").write_text(text)
    with pytest.raises(ContractError, match=message) as caught:
        find_reader(tmp_path / "day_0")
    assert str(tmp_path / "day_0") in str(caught.value)


def test_parquet_is_recognised_by_its_columns(tmp_path, raw_table):
    pq.write_table(raw_table(20), tmp_path / "raw.parquet")
    pq.write_table(raw_table(20).select([raw_rows.LABEL, *criteo.FEATURES]), tmp_path / "day_0")
    assert isinstance(find_reader(tmp_path / "raw.parquet"), RawReader)
    assert isinstance(find_reader(tmp_path / "day_0"), FileReader)


def test_raw_rows_without_identity_or_time_are_rejected(tmp_path, raw_table, read):
    table = raw_table(20)
    for name, at in ((raw_rows.REQUEST_ID, 3), (raw_rows.ROW, 5), (raw_rows.EVENT_TIME, 7)):
        values = table.column(name).to_pylist()
        values[at] = None
        field = table.schema.field(name)
        table = table.set_column(
            table.schema.get_field_index(name), field, pa.array(values, field.type)
        )
    pq.write_table(table, tmp_path / "part.parquet")
    found, malformed = read(RawParquet(path=tmp_path / "part.parquet", features=criteo.CRITEO))
    assert len(found) == 17
    assert [(m["line"], m["reason"].split(",")[0]) for m in malformed] == [
        (4, "request_id is None"),
        (6, "row is None"),
        (8, "event_time is None"),
    ]


def test_raw_columns_of_another_type_are_refused_by_name(tmp_path, raw_table, read):
    table = raw_table(50)
    index = table.schema.get_field_index(raw_rows.EVENT_TIME)
    table = table.set_column(
        index, raw_rows.EVENT_TIME, table.column(raw_rows.EVENT_TIME).cast(pa.int64())
    )
    pq.write_table(table, tmp_path / "part.parquet")
    with raises(ContractError, "part.parquet", "event_time", "int64", "expected a timestamp"):
        read(RawParquet(path=tmp_path / "part.parquet", features=criteo.CRITEO))


@pytest.mark.parametrize("unit", ["ms", "ns"])
def test_times_of_another_unit_are_converted(tmp_path, raw_table, read, clicks, unit):
    table = raw_table(50, seconds=50.0)
    index = table.schema.get_field_index(raw_rows.EVENT_TIME)
    times = table.column(raw_rows.EVENT_TIME).cast(pa.timestamp(unit, tz="UTC"))
    pq.write_table(table.set_column(index, raw_rows.EVENT_TIME, times), tmp_path / "part.parquet")
    start = table.column(raw_rows.EVENT_TIME)[10].cast(pa.int64()).as_py()
    reader = RawParquet(
        path=tmp_path / "part.parquet",
        features=criteo.CRITEO,
        span=TimeSpan(start, start + 5_000_000),
    )
    assert read(reader) == (clicks(table)[10:15], [])
