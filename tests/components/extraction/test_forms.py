"""Which form a file has, which files of a folder count, and what rows of Parquet in each form become."""

import struct
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo, raw_rows
from components.extraction.readers import forms
from components.extraction.readers.criteo import CriteoParquet
from components.extraction.readers.forms import click_log_files
from components.extraction.readers.parquet import RawParquet
from components.extraction.times import TimeSpan
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


def nvidia_table(rows: list[tuple]) -> pa.Table:
    """Rows as NVIDIA stores them: everything int32, a hash by its bits."""
    columns = {}
    for name, values in zip((raw_rows.LABEL, *criteo.FEATURES), zip(*rows)):
        if name in criteo.CATEGORICAL:
            values = [None if v is None else struct.unpack("<i", struct.pack("<I", v))[0] for v in values]
        columns[name] = pa.array([None if v is None else int(v) for v in values], pa.int32())
    return pa.table(columns)


def test_int32_hashes_are_read_as_unsigned(tmp_path, criteo_rows, truth, read):
    rows = truth(criteo_rows(300))
    table = nvidia_table(rows)
    assert min(v for v in table.column("C1").to_pylist() if v is not None) < 0
    pq.write_table(table, tmp_path / "day_0.parquet")
    assert read(find_reader(tmp_path / "day_0.parquet")) == (rows, [])


@pytest.mark.parametrize("as_dictionary", [False, True])
def test_hex_strings_are_read(tmp_path, criteo_rows, truth, read, as_dictionary):
    texts, rows = criteo_rows(300), truth(criteo_rows(300))
    table = nvidia_table(rows)
    for i, name in enumerate(table.column_names):
        if name in criteo.CATEGORICAL:
            values = pa.array([row[i] for row in texts])
            table = table.set_column(i, name, values.dictionary_encode() if as_dictionary else values)
    pq.write_table(table.rename_columns(["Label", *criteo.FEATURES]), tmp_path / "day_0.parquet")
    assert read(find_reader(tmp_path / "day_0.parquet")) == (rows, [])


def test_malformed_rows_are_set_aside_by_row_number(tmp_path, criteo_rows, truth, read):
    rows = truth(criteo_rows(20))
    table = nvidia_table(rows)
    labels = [row[0] for row in rows]
    labels[3], labels[7] = 5, None
    hexes = ["aa"] * 20
    hexes[9] = "xyz"
    floats = [1.0] * 20
    floats[11], floats[12] = float("inf"), float("nan")
    table = table.set_column(0, "label", pa.array(labels, pa.int32()))
    table = table.set_column(1, "I1", pa.array(floats, pa.float64()))
    table = table.set_column(14, "C1", pa.array(hexes))
    pq.write_table(table, tmp_path / "day_0.parquet")
    found, malformed = read(find_reader(tmp_path / "day_0.parquet"))
    assert [(m["line"], m["reason"]) for m in malformed] == [
        (4, "label is 5, expected 0 or 1"),
        (8, "label is None, expected 0 or 1"),
        (10, "C1 is 'xyz', expected 1 to 8 hex digits or nothing"),
        (12, "I1 is inf, expected a finite number"),
    ]
    assert len(found) == 16
    assert found[8][1] is None  # row 13's NaN is a missing value


def test_a_column_of_another_type_is_refused_by_name(tmp_path, criteo_rows, truth, read):
    table = nvidia_table(truth(criteo_rows(20))).set_column(14, "C1", pa.array([0.5] * 20))
    pq.write_table(table, tmp_path / "day_0.parquet")
    with pytest.raises(ContractError, match=r"day_0.parquet has C1 of type double, expected integers or hex strings"):
        read(find_reader(tmp_path / "day_0.parquet"))


def test_raw_rows_without_identity_or_time_are_set_aside(tmp_path, raw_table, read):
    table = raw_table(20)
    for name, at in ((raw_rows.REQUEST_ID, 3), (raw_rows.ROW, 5), (raw_rows.EVENT_TIME, 7)):
        values = table.column(name).to_pylist()
        values[at] = None
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
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
    table = table.set_column(index, raw_rows.EVENT_TIME, table.column(raw_rows.EVENT_TIME).cast(pa.int64()))
    pq.write_table(table, tmp_path / "part.parquet")
    with pytest.raises(ContractError, match="part.parquet has event_time of type int64, expected a timestamp"):
        read(RawParquet(path=tmp_path / "part.parquet", features=criteo.CRITEO))


@pytest.mark.parametrize("unit", ["ms", "ns"])
def test_times_of_another_unit_are_converted(tmp_path, raw_table, read, clicks, unit):
    table = raw_table(50, seconds=50.0)
    index = table.schema.get_field_index(raw_rows.EVENT_TIME)
    times = table.column(raw_rows.EVENT_TIME).cast(pa.timestamp(unit, tz="UTC"))
    pq.write_table(table.set_column(index, raw_rows.EVENT_TIME, times), tmp_path / "part.parquet")
    start = table.column(raw_rows.EVENT_TIME)[10].cast(pa.int64()).as_py()
    reader = RawParquet(path=tmp_path / "part.parquet", features=criteo.CRITEO, span=TimeSpan(start, start + 5_000_000))
    assert read(reader) == (clicks(table)[10:15], [])
