"""The short way of reading a block against the careful one, and the threads that read ahead."""

from __future__ import annotations

import collections
import gzip
import io
import threading
from itertools import count

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from components.contracts import criteo
from components.extraction.readers.ahead import in_order
from components.extraction.readers.blocks import Block, unpacked
from components.extraction.readers.criteo_tsv import LAYOUT
from components.extraction.readers.fields import parse_block, parse_carefully, parse_sound
from components.extraction.readers.values import parse_hex_of_width

FIELD = st.sampled_from(
    ["", "0", "1", "-2", "7.0", "+1", " 1", "0x1f", "1e3", "nan", "9" * 18, "9" * 19, "00000012", "68fd1e64",
     "68FD1E64", "68fd1e6", "68fd1e640", "68fd1e6g", "\0" * 8, "0000000\0", "12345678 ", '"8fd1e64',
     "\xe9fd1e6", "#N/A", "null"]
)  # fmt: skip


@given(st.data(), st.lists(st.tuples(st.integers(0, 39), FIELD), max_size=4), st.sampled_from(["\n", "\r\n", "\n\n"]))
@settings(max_examples=300, deadline=None)
def test_the_short_way_gives_the_careful_ways_rows_or_nothing(data, spoilt, end):
    row = st.tuples(
        st.sampled_from("01"), *[st.sampled_from(["", "5", "-1"])] * 13, *[st.sampled_from(["", "0a1B2c3D"])] * 26
    )
    rows = [list(each) for each in data.draw(st.lists(row, min_size=1, max_size=5))]
    for column, text in spoilt:
        rows[column % len(rows)][column] = text
    if data.draw(st.booleans()):
        rows[0] = rows[0][: data.draw(st.integers(1, 40))]
    block = Block(1, end.join("\t".join(each) for each in rows).encode())
    assume(block.content.strip())
    careful, short = parse_carefully(block, LAYOUT), parse_sound(block, LAYOUT)
    if short is None:
        assert careful.malformed or any(0 < len(text) < 8 for each in rows for text in each[14:])
    else:
        assert not careful.malformed
        assert short.equals(careful.batch)


def test_sound_rows_go_the_short_way(criteo_rows, truth, clicks):
    rows = criteo_rows(500)
    batch = parse_sound(Block(1, "\n".join("\t".join(row) for row in rows).encode()), LAYOUT)
    assert clicks(batch) == truth(rows)


def test_a_malformed_line_costs_its_block_and_no_row(criteo_rows, truth, clicks):
    rows = criteo_rows(50)
    rows[7][20] = "no hex"
    parsed = parse_block(Block(101, "\n".join("\t".join(row) for row in rows).encode()), LAYOUT)
    assert clicks(parsed.batch) == truth(rows[:7] + rows[8:])
    assert [line for line, _, _ in parsed.malformed] == [108]


@given(
    st.lists(st.none() | st.binary(min_size=8, max_size=8) | st.from_regex(rb"[0-9a-fA-F]{8}", fullmatch=True)),
    st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_hex_of_fixed_width_agrees_with_the_contract(values, first):
    array = pa.array(values, pa.binary(8)).slice(first)
    values = values[first:]
    texts = [value.decode("latin-1") for value in values if value is not None]
    if any("\0" in text for text in texts):
        return
    if all(c in "0123456789abcdefABCDEF" for text in texts for c in text):
        expected = [None if v is None else criteo.parse_category(v.decode()) for v in values]
        assert parse_hex_of_width(array).to_pylist() == expected
    else:
        assert parse_hex_of_width(array) is None


MEMBER = gzip.compress(b"".join(b"%d\n" % i for i in range(20_000)))
PACKED = {
    "one member": MEMBER,
    "two members": MEMBER + MEMBER,
    "zeros between and after": MEMBER + b"\0" * 700 + MEMBER + b"\0" * 9,
    "an empty one": gzip.compress(b""),
    "cut in the middle": MEMBER[: len(MEMBER) // 2],
    "cut before its checksum": MEMBER[:-8],
    "cut in its checksum": MEMBER[:-3],
    "cut in a second header": MEMBER + MEMBER[:3],
    "junk behind": MEMBER + b"junk",
    "wrong checksum": MEMBER[:-8] + b"\1\2\3\4" + MEMBER[-4:],
    "wrong length": MEMBER[:-4] + b"\1\2\3\4",
    "zeros inside": MEMBER[:9000] + b"\0" * 40 + MEMBER[9040:],
}


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED.keys())
def test_unpacking_ends_as_the_standard_librarys_does(packed):
    def read(chunks) -> tuple[bytes, str]:
        found = b""
        try:
            for chunk in chunks:
                found += chunk
        except EOFError:
            return found, "cut"
        except Exception:
            return found, "damaged"
        return found, "whole"

    file = gzip.GzipFile(fileobj=io.BytesIO(packed))
    found, ending = read(unpacked(io.BytesIO(packed)))
    truth, true_ending = read(iter(lambda: file.read1(1 << 16), b""))
    assert ending == true_ending
    if ending == "whole":
        assert found == truth
    # Of bits that are cut off in their middle, the one unpacks a byte more; how much lies before damage depends on
    # the size of what is read at a time.
    elif ending == "cut":
        assert truth.startswith(found)
        assert len(truth) - len(found) <= 2


@given(st.integers(0, 40), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_work_done_ahead_comes_in_order(num_items, num_threads):
    assert list(in_order(iter(range(num_items)), lambda i: i * i, num_threads=num_threads)) == [
        i * i for i in range(num_items)
    ]


def test_no_more_than_a_few_items_are_drawn_ahead():
    drawn = []
    ahead = in_order((drawn.append(i) or i for i in count()), lambda i: i, num_threads=3)
    for i in range(10):
        assert next(ahead) == i
        assert len(drawn) <= i + 1 + 3 + 1
    ahead.close()


class Broken(Exception):
    pass


def _fail_at(place: int, *, while_drawing: bool):
    def items():
        for i in range(20):
            if while_drawing and i == place:
                raise Broken(i)
            yield i

    def work(i: int) -> int:
        if not while_drawing and i == place:
            raise Broken(i)
        return i

    return in_order(items(), work, num_threads=3)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", [0, 1, 7, 19])
@pytest.mark.parametrize("while_drawing", [True, False])
def test_a_failure_comes_after_all_that_lies_before_it_and_ends_every_thread(place, while_drawing):
    before, found = threading.active_count(), []
    ahead = _fail_at(place, while_drawing=while_drawing)
    with pytest.raises(Broken):
        collections.deque((found.append(item) for item in ahead), maxlen=0)
    assert found == list(range(place))
    assert threading.active_count() == before


@pytest.mark.timeout(60)
def test_a_caller_who_stops_early_leaves_no_thread_behind():
    before = threading.active_count()
    ahead = in_order(iter(range(1000)), lambda i: i, num_threads=3)
    next(ahead)
    assert threading.active_count() > before
    ahead.close()
    assert threading.active_count() == before


@pytest.mark.timeout(60)
def test_what_is_set_aside_does_not_run_ahead_of_the_caller(tmp_path, criteo_rows, write_text, monkeypatch):
    from components.extraction.readers import fields
    from components.extraction.readers.blocks import blocks
    from components.extraction.readers.criteo_tsv import CriteoTsv
    from components.extraction.set_aside import SetAside

    rows = criteo_rows(400)
    for i in range(0, 400, 20):
        rows[i] = ["junk"]
    monkeypatch.setattr(fields, "blocks", lambda path: blocks(path, block_bytes=4000))
    with SetAside(tmp_path / "aside", max_fraction=1.0) as set_aside:
        read = CriteoTsv(path=write_text(tmp_path / "day_0", rows)).batches(set_aside)
        batch = next(read)
        assert set_aside.num_rows == -(-(batch.num_rows + 1) // 20)
        read.close()
