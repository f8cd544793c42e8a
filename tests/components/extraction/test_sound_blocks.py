"""The short way of reading a block against the careful one, and the threads that read ahead."""

from __future__ import annotations

import collections
import gzip
import io
import math
import platform
import subprocess
import sys
import threading
from itertools import count

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from components.contracts import criteo
from components.extraction.raw_schema import CLICK_COLUMNS
from components.extraction.readers.ahead import in_order
from components.extraction.readers.blocks import Block, unpacked
from components.extraction.readers.criteo_tsv import LAYOUT
from components.extraction.readers.fields import Layout, lines_of, parse_block, parse_carefully
from components.extraction.readers.sound import parse_sound
from components.extraction.readers.words import WIDTH, decimal_values, hex_values, words_at

FIELD = st.sampled_from(
    [b"", b"0", b"1", b"-2", b"7.0", b"+1", b" 1", b"0x1f", b"1e3", b"nan", b"9" * 18, b"9" * 19, b"00000012",
     b"68fd1e64", b"68FD1E64", b"68fd1e6", b"68fd1e640", b"68fd1e6g", b"\0" * 8, b"0000000\0", b"12345678 ",
     b'"8fd1e64', b"\xe9fd1e6", b"#N/A", b"null", b"-", b"--1", b"-0", b"-00", b"12345678", b"123456789", b"-1234567",
     b"-12345678", b"1-234", b"16777217", b"5.", b"-5.00", b".0", b"5.01", b"f", b"-f"]
) | st.binary(max_size=9).map(lambda field: field.translate(None, b"\t,\r\n"))  # fmt: skip
LAYOUTS = {
    "Criteo's": LAYOUT,
    "another order": Layout(delimiter=",", columns=("id", *reversed(CLICK_COLUMNS), "more"), has_header=False),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@given(
    st.data(), st.lists(st.tuples(st.integers(0, 39), FIELD), max_size=4), st.sampled_from([b"\n", b"\r\n", b"\n\n"])
)
@settings(max_examples=300, deadline=None)
def test_the_short_way_gives_the_careful_ways_rows_or_nothing(layout, data, spoilt, end):
    kinds = {"label": [b"0", b"1"], **dict.fromkeys(criteo.CATEGORICAL, [b"", b"0a1B2c3D", b"ff"])}
    # Sound fields of no interest by one seed: drawn each by hypothesis, they took most of the time.
    random, num_rows = np.random.default_rng(data.draw(st.integers(0, 999))), data.draw(st.integers(1, 5))
    choices = [kinds.get(name, [b"", b"5", b"-1", b"1048576"]) for name in layout.columns]
    rows = [[choice[random.integers(len(choice))] for choice in choices] for _ in range(num_rows)]
    for column, text in spoilt:
        rows[column % len(rows)][column] = text
    if data.draw(st.booleans()):
        rows[0] = rows[0][: data.draw(st.integers(1, 40))]
    content = end.join(layout.delimiter.encode().join(each) for each in rows)
    assume(content.strip(b"\r\n"))
    careful = parse_carefully(Block(1, content), layout)
    short = parse_sound(lines_of(content), layout.delimiter, layout.columns)
    if short is None:
        assert careful.malformed or b"" in lines_of(content).split(b"\n")[:-1]
    else:
        assert not careful.malformed
        assert short.equals(careful.batch)
        short.validate(full=True)


def test_sound_rows_go_the_short_way(criteo_rows, truth, clicks):
    rows = criteo_rows(500)
    content = "".join("\t".join(row) + "\n" for row in rows).encode()
    batch = parse_sound(content, LAYOUT.delimiter, LAYOUT.columns)
    assert clicks(batch) == truth(rows)


def test_a_malformed_line_costs_its_block_and_no_row(criteo_rows, truth, clicks):
    rows = criteo_rows(50)
    rows[7][20] = "no hex"
    parsed = parse_block(Block(101, "\n".join("\t".join(row) for row in rows).encode()), LAYOUT)
    assert clicks(parsed.batch) == truth(rows[:7] + rows[8:])
    assert [line for line, _, _ in parsed.malformed] == [108]


def test_a_torn_line_that_is_no_utf8_is_set_aside_alone(criteo_rows, truth, clicks):
    rows = criteo_rows(20)
    lines = ["\t".join(row).encode() for row in rows]
    lines[5] = b"\xe9\xff\t1"
    parsed = parse_block(Block(1, b"\n".join(lines)), LAYOUT)
    assert clicks(parsed.batch) == truth(rows[:5] + rows[6:])
    assert parsed.malformed == [(6, "2 columns, expected 40", r"\xe9\xff" + "\t1")]


def test_a_field_that_slid_into_the_next_line_makes_both_malformed(criteo_rows):
    first, second = criteo_rows(2)
    content = "\t".join(first[:-1]) + "\n" + "\t".join(["0", *second]) + "\n"
    parsed = parse_block(Block(1, content.encode()), LAYOUT)
    assert [(line, reason) for line, reason, _ in parsed.malformed] == [
        (1, "39 columns, expected 40"),
        (2, "41 columns, expected 40"),
    ]


def test_a_block_of_torn_lines_alone_has_no_rows():
    parsed = parse_block(Block(7, b"1\t2\n\n\xff\n"), LAYOUT)
    assert parsed.batch.num_rows == 0
    assert [line for line, _, _ in parsed.malformed] == [7, 9]


def word_of(text: bytes) -> np.ndarray:
    return np.frombuffer(text, "<u8").astype(np.uint64)


@pytest.mark.parametrize("position", range(WIDTH))
def test_every_byte_at_every_place_of_a_word_counts_as_the_contract_has_it(position):
    for byte in range(256):
        word = bytearray(b"12345678")
        word[position] = byte
        for length in {max(position, 1), position + 1, WIDTH}:
            text = word[:length].decode("latin-1")
            hashes = hex_values(word_of(word), np.array([length]))
            numbers, odd = decimal_values(word_of(word), np.array([length]))
            if all(c in "0123456789abcdefABCDEF" for c in text):
                assert hashes is not None
                assert hashes.tolist() == [criteo.parse_category(text)]
            else:
                assert hashes is None
            assert odd.tolist() == [not all(c in "0123456789" for c in text)]
            if not odd[0]:
                assert numbers.tolist() == [criteo.parse_integer(text)]


@given(st.lists(st.from_regex(r"[0-9a-fA-F]{0,8}", fullmatch=True), min_size=1, max_size=9), st.binary(max_size=3))
@settings(max_examples=200, deadline=None)
def test_words_hold_the_characters_from_each_start_on(texts, before):
    content = before + b"\t".join(text.encode() for text in texts)
    lengths = np.array([len(text) for text in texts])
    starts = len(before) + np.concatenate([[0], np.cumsum(lengths + 1)[:-1]])
    words = words_at(content, starts)
    assert words.tolist() == [int.from_bytes(content[start : start + WIDTH], "little") for start in starts.tolist()]
    expected = [0 if not text else criteo.parse_category(text) for text in texts]
    assert hex_values(words, lengths).tolist() == expected


def test_a_number_of_more_than_eight_characters_keeps_its_block_on_the_short_way(criteo_rows, truth, clicks):
    rows = criteo_rows(50)
    rows[3][5], rows[9][5], rows[9][13], rows[20][7] = "123456789012345678", "-87654321.0", "-0", "-98765432.00"
    batch = parse_sound("".join("\t".join(row) + "\n" for row in rows).encode(), LAYOUT.delimiter, LAYOUT.columns)
    for row, column in ((3, 5), (9, 5), (9, 13), (20, 7)):
        found = batch.column(f"I{column}")[row].as_py()
        assert found == np.float32(criteo.parse_integer(rows[row][column]))
    assert math.copysign(1, batch.column("I13")[9].as_py()) == -1
    others = [row for number, row in enumerate(rows) if number not in (3, 9, 20)]
    assert [each for number, each in enumerate(clicks(batch)) if number not in (3, 9, 20)] == truth(others)


FAULTS = """
import resource, sys
import numpy as np
from components.runtime.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for turn in range(11):
    if turn == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(2 << 20, np.uint8) for _ in range(8)]
    del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another measure")
def test_freed_memory_is_not_asked_for_anew():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    # 10 turns of 16 MiB are 40,960 pages of 4 KiB.
    assert faults("keep") < 2000 < faults("give back")


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
