"""Tests that compare the readers of Criteo TSV and of Kaggle's forms with csv and gzip."""

import gzip
import string
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evergreen.contracts import criteo
from evergreen.rows import criteo as criteo_forms
from evergreen.rows import forms, lines
from evergreen.rows import text as text_module
from evergreen.rows.criteo import parse_hex
from evergreen.rows.lines import Dialect, read_blocks
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

find_reader = partial(forms.find_reader, recommender=criteo.CRITEO_RECOMMENDER)


def criteo_file(path):
    """Return a reader that reads any file as Criteo's tab-separated values."""
    dialect = Dialect(delimiter="\t", num_fields=40, has_quotes=False)
    return forms.FileReader(
        rows=text_module.TextRows(path=path, names=criteo_forms.COLUMNS, dialect=dialect),
        recommender=criteo.CRITEO_RECOMMENDER,
        columns={name: name for name in criteo_forms.COLUMNS},
        rules=criteo_forms.RULES,
        now=0.0,
    )


HEADER = ("Label", *criteo.FEATURES)


@pytest.mark.parametrize("name", ["day_3", "a b.tsv.gz"])
def test_tsv_reads_what_standard_library_reads(
    tmp_path, criteo_rows, write_text, truth, read, name
):
    rows = criteo_rows(500)
    assert read(find_reader(write_text(tmp_path / name, rows))) == (truth(rows), [])


@pytest.mark.parametrize(
    ("name", "delimiter", "header"),
    [
        ("r.csv", ",", HEADER[::-1]),
        ("kaggle.csv", ",", ("Id", "Label", *criteo.FEATURES)),
        ("kaggle.csv.gz", ",", ("Id", "LABEL", *criteo.FEATURES)),
        ("kaggle.tsv", "\t", ("id", "label", *(f.lower() for f in criteo.FEATURES))),
    ],
)
def test_header_names_columns(
    tmp_path, criteo_rows, write_text, truth, read, name, delimiter, header
):
    rows = criteo_rows(200)
    columns = {"id": map(str, range(200)), **dict(zip(map(str.lower, HEADER), zip(*rows)))}
    written = list(zip(*(columns[name.lower()] for name in header)))
    path = write_text(tmp_path / name, written, delimiter=delimiter, header=delimiter.join(header))
    assert read(find_reader(path)) == (truth(rows), [])


def test_windows_line_ends_blank_lines_and_byte_order_mark_do_no_harm(
    tmp_path, criteo_rows, truth, read
):
    rows = criteo_rows(20)
    text = "\ufeff" + "\r\n\r\n".join("\t".join(row) for row in rows) + "\r\n\r\n"
    path = tmp_path / "day_0"
    path.write_bytes(text.encode())
    assert read(find_reader(path)) == (truth(rows), [])


def test_integers_that_pandas_wrote_as_floats_are_read(tmp_path, criteo_rows, write_text, read):
    rows = criteo_rows(1)
    rows[0][1:4] = ["3.0", "-2.0", ""]
    (row,), malformed = read(find_reader(write_text(tmp_path / "day_0", rows)))
    assert row[1:4] == (3.0, -2.0, None)
    assert not malformed


BAD_FIELDS = {
    "label 2": (0, "2", "label is '2', expected 0, 1, true or false"),
    "word for an integer": (3, "many", "I3 is 'many', expected an integer or nothing"),
    "infinite": (3, "inf", "I3 is 'inf', expected an integer or nothing"),
    "hex integer": (3, "0x1f", "I3 is '0x1f', expected an integer or nothing"),
    "category not hex": (14, "68fd1e6g", "C1 is '68fd1e6g', expected 1 to 8 hex digits or nothing"),
    "nine hex digits": (
        39,
        "168fd1e64",
        "C26 is '168fd1e64', expected 1 to 8 hex digits or nothing",
    ),
    "quoted category": (15, '"aa"', "C2 is '\"aa\"', expected 1 to 8 hex digits or nothing"),
    "1 column": (slice(1, 40), [], "1 columns, expected 40"),
    "38 columns": (slice(38, 40), [], "38 columns, expected 40"),
    "41 columns": (slice(40, 40), ["extra"], "41 columns, expected 40"),
}


@pytest.mark.parametrize(("column", "text", "reason"), BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_malformed_field_rejects_only_its_line(
    tmp_path, criteo_rows, write_text, truth, read, column, text, reason
):
    rows = criteo_rows(30)
    bad = list(rows[17])
    bad[column] = text
    path = write_text(tmp_path / "day_0.gz", [*rows[:17], bad, *rows[18:]])
    found, malformed = read(criteo_file(path))
    assert found == truth(rows[:17] + rows[18:])
    assert malformed == [{"file": str(path), "line": 18, "reason": reason, "text": "\t".join(bad)}]


def test_bytes_that_are_no_text_reject_only_their_line(tmp_path, criteo_rows, truth, read):
    rows = criteo_rows(10)
    lines = ["\t".join(row).encode() for row in rows]
    lines[4] = lines[4].replace(b"\t", b"\t\xff\x00", 1)
    lines[6] = lines[6].replace(b"\t", b"\r\t", 1)
    lines[8] = b"\xe9\xff\t1"
    (tmp_path / "day_0").write_bytes(b"\n".join(lines))
    found, malformed = read(find_reader(tmp_path / "day_0"))
    assert found == truth([*rows[:4], rows[5], rows[7], rows[9]])
    assert [m["line"] for m in malformed] == [5, 7, 9]


def test_line_numbers_count_header_and_blank_lines(tmp_path, criteo_rows, read):
    lines = [",".join(row) for row in criteo_rows(4)]
    text = "\n".join(
        [",".join(HEADER), lines[0], "", lines[1], "junk", lines[2], "2" + lines[3][1:]]
    )
    (tmp_path / "k.csv").write_text(text)
    found, malformed = read(find_reader(tmp_path / "k.csv"))
    assert len(found) == 3
    assert [m["line"] for m in malformed] == [5, 7]


@given(data=st.data(), block_bytes=st.integers(100, 5000))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_line_is_read_or_rejected_wherever_blocks_end(
    tmp_path, criteo_rows, truth, read, monkeypatch, data, block_bytes
):
    rows = criteo_rows(data.draw(st.integers(1, 60)), seed=data.draw(st.integers(0, 5)))
    junk = st.sampled_from(["", "x", "1\t2", "\t" * 39, "9" + "\t" * 39, "\t" * 40])
    noise = data.draw(st.dictionaries(st.integers(0, len(rows) - 1), junk, max_size=8))
    written = [noise.get(i, "\t".join(row)) for i, row in enumerate(rows)]
    path = tmp_path / "day_0.gz"
    path.write_bytes(gzip.compress("\n".join(written).encode()))
    monkeypatch.setattr(text_module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(lines, "_READ_BYTES", 64)
    found, malformed = read(criteo_file(path))
    assert found == truth([row for i, row in enumerate(rows) if i not in noise])
    assert [(m["line"], m["text"]) for m in malformed] == [
        (i + 1, t) for i, t in sorted(noise.items()) if t
    ]


NOT_HEX = ["xyz", "0x1f", "1_0", "+1", "-1", " 1", "1 ", "123456789", "\u0661", "1\n", "nan"]


@given(st.lists(st.text(max_size=10) | st.from_regex(r"[0-9a-fA-F]{1,9}", fullmatch=True)))
@example(NOT_HEX)
@settings(max_examples=100, deadline=None)
def test_hex_digits_have_their_value_and_other_texts_have_none(values):
    def one(value: str) -> int | None:
        return (
            int(value, 16) if 0 < len(value) <= 8 and set(value) <= set(string.hexdigits) else None
        )

    assert parse_hex(pa.array(values, pa.string())).to_pylist() == [one(v) for v in values]


@pytest.mark.parametrize("keep", [0.3, 0.98])
def test_file_truncated_mid_gzip_is_named_with_rows_read_before(
    tmp_path, criteo_rows, write_text, read, keep
):
    path = write_text(tmp_path / "day 0" / "day_0.gz", criteo_rows(3000))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(
        ContractError, match=r"day 0/day_0.gz is truncated after \d{3,4} complete lines"
    ) as caught:
        read(find_reader(path))
    num_lines = int(str(caught.value).split("truncated after ")[1].split()[0])
    assert abs(num_lines - 3000 * keep) < 200


def test_gzip_file_corrupt_inside_is_named(tmp_path, criteo_rows, write_text, read):
    path = write_text(tmp_path / "day_0.gz", criteo_rows(3000))
    corrupt = bytearray(path.read_bytes())
    corrupt[len(corrupt) // 2 : len(corrupt) // 2 + 50] = b"\0" * 50
    path.write_bytes(bytes(corrupt))
    with raises(ContractError, "day_0.gz", "corrupt"):
        read(find_reader(path))


def test_concatenated_gzip_members_are_one_file(tmp_path, criteo_rows, write_text, truth, read):
    rows = criteo_rows(60)
    first, second = (
        write_text(tmp_path / f"{i}.gz", part) for i, part in enumerate((rows[:20], rows[20:]))
    )
    (tmp_path / "day_0.gz").write_bytes(first.read_bytes() + second.read_bytes())
    assert read(find_reader(tmp_path / "day_0.gz")) == (truth(rows), [])


def test_file_without_lines_does_not_fill_memory(tmp_path):
    (tmp_path / "day_0").write_bytes(b"0" * (3 << 20))
    with raises(ContractError, "line longer than"):
        list(read_blocks(tmp_path / "day_0", block_bytes=1 << 16))
