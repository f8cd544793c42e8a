"""The extraction benchmark: rows as Criteo's are, ratios of one round, and no ratio between different rows."""

import csv
import gzip
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import extraction
from benchmarks.criteo_text import CATEGORIES, CLICK_RATE, INTEGERS, write_tsv_gz
from benchmarks.extraction import CATEGORICAL, DENSE, NAMES, pyarrow_stream, pyarrow_whole
from components.extraction.readers.criteo import INTEGER_PATTERN


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "day_0.gz"
    write_tsv_gz(path, 20_000)
    return path


def test_rows_have_the_published_shape(file):
    with gzip.open(file, "rt", newline="") as text:
        rows = list(csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert {len(row) for row in rows} == {40}
    assert len(rows) == 20_000
    columns = list(zip(*rows))
    assert abs(np.mean([label == "1" for label in columns[0]]) - CLICK_RATE) < 0.01
    for values, stated in zip(columns[1:14], INTEGERS):
        assert abs(np.mean([value == "" for value in values]) - stated.missing) < 0.02
        assert all(re.fullmatch(INTEGER_PATTERN, value) for value in values if value)
    for values, (missing, size) in zip(columns[14:], CATEGORIES):
        assert abs(np.mean([value == "" for value in values]) - missing) < 0.02
        assert all(re.fullmatch("[0-9a-f]{8}", value) for value in values if value)
        assert len({value for value in values if value}) <= size
    assert min(int(value) for value in columns[2]) == -2
    assert [size for _, size in CATEGORIES].count(10_000_000) == 5


@pytest.mark.parametrize("way", [pyarrow_whole, pyarrow_stream])
def test_a_peer_keeps_every_row_and_value(file, tmp_path, way):
    (tmp_path / "out").mkdir()
    assert way(file, tmp_path / "out")() == 20_000
    with gzip.open(file, "rt", newline="") as text:
        rows = list(csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = rows[:500] + rows[-500:]
    truth = [
        (int(row[0]), *(float(x) if x else None for x in row[1:14]), *(int(x, 16) if x else None for x in row[14:]))
        for row in rows
    ]
    assert extraction.rows_of(tmp_path / "out") == truth


def told(seconds: float, rows: int = 1000) -> dict:
    return {"seconds": seconds, "processor": seconds, "rows": rows, "peak": 100}


def test_a_ratio_is_of_one_round_and_of_the_faster_pyarrow():
    taken = [
        {"ours": told(1 * f), "pyarrow_whole": told(3 * f), "pyarrow_stream": told(2 * f)} for f in (1.0, 10.0, 3.0)
    ]
    assert extraction.ratio_to_pyarrow(taken) == (2.0, 2.0, 2.0)
    figures = extraction.figures(taken, 1000)
    assert figures["pyarrow_whole"]["ours_to_it"].median == 3.0
    assert figures["ours"]["rows_per_second"] == (1000 / 3, 100, 1000)


@pytest.mark.parametrize("fault", ["row lost", "value changed"])
def test_ways_that_made_different_rows_are_not_compared(tmp_path, monkeypatch, fault):
    def run(way, file, folder):
        columns = (
            {name: ["0000000a"] * 3 for name in CATEGORICAL} if way != "ours" else dict.fromkeys(CATEGORICAL, [10] * 3)
        )
        label = [1, 0, int(fault == "value changed" and way != "ours")]
        table = pa.table({"label": label, **dict.fromkeys(DENSE, [1.0] * 3), **columns}).select(NAMES)
        folder.mkdir()
        pq.write_table(table, folder / "part.parquet")
        return told(1.0, rows=2 if fault == "row lost" and way != "ours" else 3)

    monkeypatch.setattr(extraction, "run", run)
    with pytest.raises(extraction.Unequal, match="pyarrow_whole"):
        extraction.measure(tmp_path / "file", 3, ["ours", "pyarrow_whole"], rounds=1, scratch=tmp_path)
