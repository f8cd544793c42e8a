"""Rows of every form of file, against the table that they were written from and against what extraction reads."""

from __future__ import annotations

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts.criteo import CATEGORICAL, DENSE, FEATURES, LABEL
from components.extraction.malformed_rows import MalformedRows
from components.extraction.readers.forms import find_reader
from components.runtime.errors import ContractError
from inference_client.row_files import concatenated, first_rows, read_rows, row_files
from inference_client.rows import WrongValue, categories
from inference_client.traffic import FileTraffic


def texts(table):
    """The fields of each row as Criteo writes them: label, integers, 8 hex digits; nothing for missing."""
    columns = [[str(v) for v in table[LABEL].to_pylist()]]
    columns += [["" if v is None else str(int(v)) for v in table[name].to_pylist()] for name in DENSE]
    columns += [["" if v is None else f"{v:08x}" for v in table[name].to_pylist()] for name in CATEGORICAL]
    return [list(row) for row in zip(*columns)]


def write(path, lines, *, ending="\n"):
    content = "".join(line + ending for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path, labelled=True):
    batches = list(read_rows(row_files(path), labelled=labelled))
    features = concatenated([batch.features for batch in batches])
    return features.dense, features.categorical, np.concatenate([batch.label for batch in batches])


HEADER = ["Id", "Label", *FEATURES]


def tsv(table, path):
    return write(path, ["\t".join(row) for row in texts(table)])


def unlabelled_tsv(table, path):
    return write(path, ["\t".join(row[1:]) for row in texts(table)], ending="\r\n")


def kaggle(table, path):
    return write(path, [",".join(HEADER), *(",".join([str(i), *row]) for i, row in enumerate(texts(table)))])


def kaggle_test(table, path):
    names = [name for name in HEADER if name != "Label"]
    return write(path, [",".join(names), *(",".join([str(i), *row[1:]]) for i, row in enumerate(texts(table)))])


def headless_csv(table, path):
    return write(path, [",".join([str(i), *row]) for i, row in enumerate(texts(table))])


def turned_header(table, path):
    return write(
        path, ["\t".join(reversed([LABEL, *FEATURES])).upper(), *("\t".join(reversed(r)) for r in texts(table))]
    )


def raw_parquet(table, path):
    pq.write_table(table, path)
    return path


def hex_parquet(table, path):
    rows = list(zip(*texts(table)))
    columns = {LABEL: table[LABEL]} | {name: table[name] for name in DENSE}
    columns |= {name.lower(): pa.array([v or None for v in rows[14 + i]]) for i, name in enumerate(CATEGORICAL)}
    pq.write_table(pa.table(columns), path)
    return path


def signed_parquet(table, path):
    columns = {LABEL: table[LABEL]} | {name: table[name] for name in DENSE}
    for name in CATEGORICAL:
        unsigned = table[name].combine_chunks().cast(pa.uint32())
        columns[name] = pa.Array.from_buffers(pa.int32(), len(unsigned), unsigned.buffers())
    pq.write_table(pa.table(columns), path)
    return path


FORMS = [
    (tsv, "day_0"),
    (tsv, "day_0.gz"),
    (tsv, "train.txt"),
    (unlabelled_tsv, "test.txt"),
    (kaggle, "train.csv"),
    (kaggle, "train.csv.gz"),
    (kaggle_test, "test.csv"),
    (headless_csv, "rows.csv"),
    (turned_header, "turned.tsv"),
    (raw_parquet, "raw.parquet"),
    (hex_parquet, "hex.parquet"),
    (signed_parquet, "signed.parquet"),
]
UNLABELLED = (unlabelled_tsv, kaggle_test)


@pytest.mark.parametrize(("form", "name"), FORMS, ids=[f"{form.__name__}-{name}" for form, name in FORMS])
def test_every_form_gives_the_rows_that_were_written(tmp_path, raw_table, form, name):
    table = raw_table(150)
    labelled = form not in UNLABELLED
    dense, categorical, label = read(form(table, tmp_path / name), labelled=labelled)
    for i, column in enumerate(DENSE):
        np.testing.assert_array_equal(dense[:, i], table[column].to_numpy().astype(np.float32))
    for i, column in enumerate(CATEGORICAL):
        np.testing.assert_array_equal(categorical[:, i], table[column].fill_null(-1).to_numpy())
    np.testing.assert_array_equal(label, table[LABEL].to_numpy() if labelled else np.zeros(150))
    assert (dense.dtype, categorical.dtype, label.dtype) == (np.float32, np.int64, np.int32)


@pytest.mark.parametrize(("form", "name"), [pair for pair in FORMS if pair[0] not in UNLABELLED], ids=str)
def test_what_is_scored_is_what_extraction_would_train_on(tmp_path, raw_table, form, name):
    path = form(raw_table(150), tmp_path / name)
    found = pa.Table.from_batches(list(find_reader(path).batches(MalformedRows(tmp_path / "aside"))))
    dense, categorical, label = read(path)
    for i, column in enumerate(DENSE):
        np.testing.assert_array_equal(dense[:, i], found[column].to_numpy())
    for i, column in enumerate(CATEGORICAL):
        np.testing.assert_array_equal(categorical[:, i], found[column].fill_null(-1).to_numpy())
    np.testing.assert_array_equal(label, found[LABEL].to_numpy())


@pytest.mark.parametrize(
    ("field", "text", "reason"),
    [
        (0, "2", "label is '2', expected 0 or 1"),
        (3, "1.5", "I3 is '1.5', expected an integer or nothing"),
        (3, "1e3", "I3 is '1e3'"),
        (16, "0x12", "C3 is '0x12', expected 1 to 8 hex digits"),
        (16, "123456789", "C3 is '123456789'"),
        (16, "68fd1e6\N{LATIN SMALL LETTER E WITH ACUTE}", "C3 is "),
    ],
)
def test_a_bad_field_is_told_with_its_line(tmp_path, raw_table, field, text, reason):
    rows = texts(raw_table(5))
    rows[3][field] = text
    # An empty line is no row, but it is a line.
    path = write(tmp_path / "rows.tsv", ["\t".join(rows[0]), "", *("\t".join(row) for row in rows[1:])])
    with pytest.raises(ContractError, match=f"rows.tsv line 5: {reason}"):
        read(path)


def test_a_line_of_another_length_is_told(tmp_path, raw_table):
    lines = ["\t".join(row) for row in texts(raw_table(3))]
    with pytest.raises(ContractError, match="rows.tsv line 2: 41 columns, expected 40"):
        read(write(tmp_path / "rows.tsv", [lines[0], lines[1] + "\t", lines[2]]))


def test_pandas_integers_with_a_point_are_integers(tmp_path, raw_table):
    rows = texts(raw_table(2))
    rows[0][1], rows[1][1] = "7.0", "-2."
    dense, _, _ = read(write(tmp_path / "rows.tsv", ["\t".join(row) for row in rows]))
    assert dense[:, 0].tolist() == [7.0, -2.0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is empty"),
        (b"a,b,c\n", "no Criteo file: its first line has 1 tab-separated and 3 comma-separated"),
        (b"Label,I1,I2\n0,1,2\n", "names \\['I3'.*not exactly once"),
        (gzip.compress(b"0\t1\n" * 5000)[:-20], "no Criteo file|cannot be read"),
        (",".join(["Label", "label", *FEATURES]).encode(), "names \\['label'\\] not exactly once"),
    ],
    ids=["empty", "other", "header", "truncated", "labels"],
)
def test_what_is_no_criteo_file_is_told(tmp_path, content, text):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(ContractError, match=text):
        read(tmp_path / "rows.csv")


def test_a_truncated_gzip_file_is_not_taken_for_a_short_one(tmp_path, raw_table):
    path = tsv(raw_table(200), tmp_path / "day_0.gz")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ContractError, match="day_0.gz cannot be read: "):
        read(path)


def test_rows_without_labels_are_no_traffic(tmp_path, raw_table):
    path = unlabelled_tsv(raw_table(5), tmp_path / "test.txt")
    with pytest.raises(ContractError, match="test.txt lacks column label"):
        FileTraffic(path).take(1)


def test_a_hash_beyond_32_bits_is_refused(tmp_path, raw_table):
    table = raw_table(5)
    place = table.column_names.index("C4")
    wide = table.set_column(place, "C4", pa.array([1, 2, 2**32, 4, 5]))
    with pytest.raises(ContractError, match="row 2: C4 is 4294967296, expected 1 to 8 hex digits, an integer"):
        read(raw_parquet(wide, tmp_path / "x.parquet"))


def test_a_folder_of_text_is_read_in_the_order_of_its_numbers(tmp_path, raw_table):
    for day in (10, 2):
        tsv(raw_table(5, seed=day), tmp_path / f"day_{day}")
    (tmp_path / "readme.md").write_text("notes")
    _, _, label = read(tmp_path)
    expected = np.concatenate([raw_table(5, seed=day)[LABEL].to_numpy() for day in (2, 10)])
    np.testing.assert_array_equal(label, expected)


def test_the_first_rows_are_the_first(tmp_path, raw_table):
    table = raw_table(100)
    rows = first_rows(tsv(table, tmp_path / "day_0"), 7)
    np.testing.assert_array_equal(rows.dense[:, 0], table["I1"].to_numpy()[:7])
    assert len(rows) == 7


@pytest.mark.parametrize("text", ["+1", "-1", "0x1f", "1_0", " 1", "1 2", "ab  cd12", "1\n", "123456789", "\u0661"])
def test_a_text_that_resembles_hex_digits_is_no_category(text):
    for values in ([text], ["0123456789", text], ["1", None, text], ["1", 16, text], pa.array(["1", None, text])):
        with pytest.raises(WrongValue, match="expected 1 to 8 hex digits"):
            categories("C1", values)
