"""Tests of text lines: each line counts once, as a row, rejected, blank, a comment or a header."""

import codecs
import csv
import gzip
import io

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evergreen.rows import lines as lines_module
from evergreen.rows import text as text_module
from evergreen.rows.forms import open_rows
from evergreen.rows.lines import Dialect, LineCounts, read_blocks
from evergreen.rows.text import TextRows
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

NAMES = ("label", "user", "title")
HEADER = b"label,user,title"


def read(rows):
    """Read all rows.

    Returns:
        The accepted rows with their line numbers, the rejected lines, and the counts.
    """
    found, rejected, counts = [], [], LineCounts()
    for chunk in rows.chunks([name for name in rows.names if name]):
        found += zip(
            chunk.numbers.tolist(), map(tuple, (row.values() for row in chunk.rows.to_pylist()))
        )
        rejected += chunk.rejected
        counts.add(chunk.counts)
    assert (len(found), len(rejected)) == (counts.rows, counts.rejected)
    return found, rejected, counts


def written(path, content: bytes):
    path.write_bytes(content)
    return TextRows(
        path=path, names=NAMES, dialect=Dialect(delimiter=",", num_fields=3, header=HEADER)
    )


def num_lines(content: bytes) -> int:
    return content.count(b"\n") + (not content.endswith(b"\n") and bool(content))


PIECE = st.sampled_from(
    [
        b'"',
        b'""',
        b",",
        b"\n",
        b"\r\n",
        b"a",
        b"1",
        b"title",
        b"# c",
        b"\xff",
        b"\0",
        b" ",
        b"\n\n",
        HEADER + b"\n",
    ]
)


@given(content=st.lists(PIECE, max_size=60).map(b"".join), block_bytes=st.integers(1, 200))
@example(content=b'1,2,"a\n1,2,3\n1,2,b"\n', block_bytes=5)
@example(content=b'1,2,"a\nb\n\nc"\n1,2,3', block_bytes=5)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_line_of_any_bytes_is_counted_once(tmp_path, monkeypatch, content, block_bytes):
    monkeypatch.setattr(text_module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(lines_module, "_READ_BYTES", 7)
    rows = written(tmp_path / "rows.csv", content)
    if not content:
        return
    found, rejected, counts = read(rows)
    ends_by_cr = b"\r" in content[:7] and b"\n" not in content[:7]
    assert counts.lines == num_lines(content.replace(b"\r", b"\n") if ends_by_cr else content)
    numbers = [number for number, _ in found] + [each.line for each in rejected]
    assert len(set(numbers)) == len(numbers)
    assert sorted(number for number, _ in found) == [number for number, _ in found]


FIELD = st.text(
    st.characters(blacklist_characters="\r\n\0\ufffd", blacklist_categories=("Cs",)), max_size=8
)
LONG = st.text(st.sampled_from('ab ",\n'), max_size=12)


@given(
    rows=st.lists(st.tuples(st.sampled_from("01"), FIELD, FIELD | LONG), max_size=40),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    ends=st.sampled_from(["\n", "\r\n"]),
)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_output_of_standard_library_is_read_back(tmp_path, rows, quoting, ends):
    """A row that has a line break in a quoted field may be rejected."""
    stream = io.StringIO(newline="")
    csv.writer(stream, quoting=quoting, lineterminator=ends).writerows(rows)
    content = stream.getvalue().encode()
    if not content.strip():
        return
    found, rejected, counts = read(written(tmp_path / "rows.csv", HEADER + b"\n" + content))
    rows_read = [tuple(value or "" for value in row) for _, row in found]
    if not any("\n" in field for row in rows for field in row):
        assert (rows_read, rejected) == ([tuple(row) for row in rows], [])
    assert set(rows_read) <= {tuple(field.replace("\r\n", "\n") for field in row) for row in rows}
    assert counts.lines == 1 + num_lines(content)


def test_one_stray_quote_rejects_at_most_its_own_line_of_sixty_thousand(tmp_path):
    lines = [f"{i % 2},u{i},t{i}".encode() for i in range(60_000)]
    lines[7], lines[20_001] = b'1,u7,"The Big', b'0,u20001,"a, b'
    lines[30_000], lines[30_001] = b'1,u,"two', b'lines"'
    found, rejected, counts = read(
        written(tmp_path / "rows.csv", HEADER + b"\n" + b"\n".join(lines) + b"\n")
    )
    assert (counts.rows, counts.rejected, counts.continued, counts.header) == (59_998, 1, 1, 1)
    assert [(each.line, each.text, each.reason) for each in rejected] == [
        (20_003, '0,u20001,"a, b', "a quote is not closed")
    ]
    by_line = dict(found)
    assert by_line[9] == ("1", "u7", '"The Big')
    assert by_line[30_002] == ("1", "u", "two\nlines")
    assert by_line[60_001] == ("1", "u59999", "t59999")


def test_quotes_inside_field_are_text_and_ambiguous_one_rejects_its_lines(tmp_path):
    content = b'label,user,title\n1,5" tv,x\n0,u,"so" called\n1,"a,b\n0,1,c\n1,"d"\n0,u,z\n'
    found, rejected, _ = read(written(tmp_path / "rows.csv", content))
    assert [row for _, row in found] == [
        ("1", '5" tv', "x"),
        ("0", "u", '"so" called'),
        ("1", '"a', "b"),
        ("0", "1", "c"),
        ("0", "u", "z"),
    ]
    assert [(each.line, each.reason) for each in rejected] == [
        (6, "2 columns, expected 3, as in the header 'label,user,title'")
    ]


def test_every_line_ambiguous_quote_may_span_is_rejected_none_invented(tmp_path):
    lines = ["label,user,title", "0,a,b", '1,"pasted', "0,a,b", "0,c,d", "0,e,f", '0,y",c', "0,q,r"]
    found, rejected, counts = read(written(tmp_path / "rows.csv", "\n".join(lines).encode()))
    assert [number for number, _ in found] == [2, 8]
    assert [each.line for each in rejected] == [3, 4, 5, 6, 7]
    assert (counts.rejected, counts.continued) == (5, 0)
    assert rejected[0].reason == "a quote opens here, and its closing quote is ambiguous"
    assert rejected[2].reason == "in line 3 a quote opens, and its closing quote is ambiguous"


def test_files_joined_with_another_order_of_columns_are_refused(tmp_path):
    content = HEADER + b"\n1,a,b\nuser,label,title\nc,0,d\n"
    with raises(ContractError, "rows.csv", "line 3", "order", "line 1"):
        read(written(tmp_path / "rows.csv", content))


@pytest.mark.parametrize(
    "again",
    [b"label,user,title", b'"label","user","title"', b"LABEL,User,title", b"label, user ,title"],
)
def test_repeated_header_is_no_row(tmp_path, again):
    found, rejected, counts = read(
        written(tmp_path / "rows.csv", HEADER + b"\n1,a,b\n" + again + b"\n0,c,d\n")
    )
    assert ([row for _, row in found], rejected, counts.header) == (
        [("1", "a", "b"), ("0", "c", "d")],
        [],
        2,
    )


def test_line_with_hash_is_comment_only_if_it_cannot_be_part_of_row(tmp_path):
    found, rejected, counts = read(
        written(tmp_path / "rows.csv", HEADER + b"\n# end\n#sale, now,1,x\n#1,a,b\n")
    )
    assert (counts.comments, [each.line for each in rejected], found) == (
        1,
        [3],
        [(4, ("#1", "a", "b"))],
    )


def test_record_longer_than_block_is_one_record(tmp_path):
    long = "\n".join("x" * 700_000 for _ in range(9))
    content = HEADER + f'\n1,a,"{long}"\n0,b,c\n'.encode()
    found, rejected, counts = read(written(tmp_path / "rows.csv", content))
    assert ([number for number, _ in found], rejected, counts.continued) == ([2, 11], [], 8)
    assert found[0][1] == ("1", "a", long)


def test_keys_of_json_lines_may_occur_late(tmp_path):
    lines = ['{"a": 1}'] * 3_000 + ['{"a": 2, "late": 3}']
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    assert open_rows(tmp_path / "rows.jsonl").names == ("a", "late")


def test_many_unclosed_quotes_take_little_time(tmp_path):
    content = HEADER + b"\n" + b'1,u,"red shoes\n' * 20_000
    _, rejected, counts = read(written(tmp_path / "rows.csv", content))
    assert (counts.rows, rejected) == (20_000, [])


FORMS = {
    "Excel's own line": (b"sep=;\nlabel;user;title\n1;a;b\n", [("1", "a", "b")]),
    "semicolons": (b"label;user;title\n1;a;b,c\n0;d;e\n", [("1", "a", "b,c"), ("0", "d", "e")]),
    "tabs": (b"label\tuser\ttitle\n1\ta\tb,c\n", [("1", "a", "b,c")]),
    "bars": (b"label|user|title\n1|a|b\n", [("1", "a", "b")]),
    "carriage returns": (b"label,user,title\r1,a,b\r0,c,d\r", [("1", "a", "b"), ("0", "c", "d")]),
    "UTF-16": ("\ufefflabel,user,title\n1,ä,b\n".encode("utf-16-le"), [("1", "ä", "b")]),
    "UTF-16 without a mark": ("label,user,title\n1,x,b\n".encode("utf-16-be"), [("1", "x", "b")]),
    "UTF-8 with a mark": (codecs.BOM_UTF8 + b"label,user,title\n1,a,b\n", [("1", "a", "b")]),
    "comments": (b"# one\n# two, three\nlabel,user,title\n1,a,b\n# end\n", [("1", "a", "b")]),
    "a header behind #": (b"#label,user,title\n1,a,b\n", [("1", "a", "b")]),
    "delimiters behind rows": (
        b"label,user,title\n1,a,b,\n0,c,,\n",
        [("1", "a", "b"), ("0", "c", None)],
    ),
    "a delimiter behind the header": (
        b"label,user,title,\n1,a,b\n0,c,d\n",
        [("1", "a", "b"), ("0", "c", "d")],
    ),
    "backslashes": (b'label,user,title\n1,a,"say \\"hi\\", x"\n', [("1", "a", 'say "hi", x')]),
    "headers joined": (
        b"label,user,title\n1,a,b\nlabel,user,title\n0,c,d\n",
        [("1", "a", "b"), ("0", "c", "d")],
    ),
    "JSON lines": (
        b'{"label":1,"user":"a","title":["x"]}\n\n{"label":false}\n',
        [("1", "a", '["x"]'), ("false", None, None)],
    ),
}


@pytest.mark.parametrize(("content", "expected"), FORMS.values(), ids=FORMS.keys())
def test_export_formats_are_read(tmp_path, content, expected):
    (tmp_path / "rows").write_bytes(content)
    rows = open_rows(tmp_path / "rows")
    found, rejected, _ = read(rows)
    assert rows.names == NAMES
    assert ([row for _, row in found], rejected) == (expected, [])


NOT_TEXT = {
    "PDF": (b"%PDF-1.4\n1 0 obj\n", "a PDF, expected a table of it as CSV or Parquet"),
    "xz": (b"\xfd7zXZ\x00\x00\x04", "an xz file, expected it unpacked"),
    "Parquet in gzip": (gzip.compress(b"PAR1" + b"x" * 50), "holds Parquet inside another packing"),
    "tar": (
        b"rows.csv".ljust(257, b"\0") + b"ustar" + b"\0" * 300,
        "a tar archive, expected it unpacked",
    ),
    "a long line": (
        HEADER + b"\n1,a,b\n1,a," + b"x" * (2 << 20) + b"\n",
        "has a line longer than 1048576 bytes",
    ),
    "zip": (
        b"PK\x03\x04" + b"x" * 50,
        "a zip archive or a spreadsheet, expected it unpacked or saved as CSV",
    ),
    "binary": (
        bytes(range(256)) * 4 + b"\0" * 2000,
        "is binary, expected text, JSON lines or Parquet",
    ),
    "JSON array": (b'[{"label": 1}]\n', "expected JSON lines, one object in each"),
    "empty": (b"\n\n", "is empty, expected a header"),
}


@pytest.mark.parametrize(("content", "message"), NOT_TEXT.values(), ids=NOT_TEXT.keys())
def test_files_that_are_no_rows_are_named(tmp_path, content, message):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(ContractError, match=message):
        read(open_rows(tmp_path / "rows.csv"))


def test_blocks_contain_complete_lines_with_their_numbers(tmp_path):
    (tmp_path / "rows").write_bytes(b"a\nbb\n\nccc")
    blocks = list(read_blocks(tmp_path / "rows", block_bytes=3))
    assert b"".join(block.content for block in blocks) == b"a\nbb\n\nccc\n"
    assert [block.content.endswith(b"\n") for block in blocks if block.content] == [True] * len(
        [b for b in blocks if b.content]
    )
