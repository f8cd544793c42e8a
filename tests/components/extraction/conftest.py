"""Criteo rows as text, an independent reading of them (csv, gzip, int), and lakes made of raw tables."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.extraction.set_aside import SetAside


@pytest.fixture
def criteo_rows():
    """Makes `n` rows as lists of 40 texts: label, integers (I2 negative at times), hex categories, empty = missing."""

    def make(n: int, *, seed: int = 0) -> list[list[str]]:
        source = random.Random(seed)
        rows = []
        for _ in range(n):
            dense = ["" if source.random() < 0.2 else str(int(source.lognormvariate(2, 2))) for _ in criteo.DENSE]
            dense[1] = str(source.randint(-2, 50))
            cats = ["" if source.random() < 0.1 else f"{source.getrandbits(32):08x}" for _ in criteo.CATEGORICAL]
            rows.append([str(int(source.random() < 0.25)), *dense, *cats])
        return rows

    return make


@pytest.fixture
def write_text():
    """Writes rows as delimited lines, gzipped where the name says so."""

    def write(path: Path, rows: list[list[str]], *, delimiter: str = "\t", header: str = "", end: str = "\n") -> Path:
        text = (header + end if header else "") + "".join(delimiter.join(row) + end for row in rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    return write


@pytest.fixture
def truth():
    """Reads Criteo text with the standard library alone: tuples of label, float or None, int or None."""

    def parse(rows: list[list[str]]) -> list[tuple]:
        text = io.StringIO("\n".join("\t".join(row) for row in rows))
        return [
            (
                int(row[0]),
                *(float(x) if x else None for x in row[1:14]),
                *(int(x, 16) if x else None for x in row[14:]),
            )
            for row in csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]

    return parse


@pytest.fixture
def read(tmp_path):
    """Reads all of a reader: its rows' click columns as tuples, and what was set aside as parsed JSON lines."""

    def run(reader, *, max_fraction: float = 1.0) -> tuple[list[tuple], list[dict]]:
        path = tmp_path / "read.jsonl"
        path.unlink(missing_ok=True)
        with SetAside(path, max_fraction=max_fraction) as set_aside:
            rows = [row for batch in reader.batches(set_aside) for row in click_tuples(batch)]
            set_aside.judge()
        return rows, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return run


def click_tuples(table) -> list[tuple]:
    columns = [table.column(name).to_pylist() for name in (criteo.LABEL, *criteo.FEATURES)]
    return list(zip(*columns))


@pytest.fixture
def clicks():
    """The click columns of a table or batch as tuples."""
    return click_tuples


@pytest.fixture
def write_lake():
    """Writes a raw table into day partitions below a folder, `num_files` a day."""

    def write(folder: Path, table, *, num_files: int = 1, row_group_size: int = 100) -> Path:
        days = [time.date().isoformat() for time in table.column(criteo.EVENT_TIME).to_pylist()]
        for day in sorted(set(days)):
            rows = [i for i, d in enumerate(days) if d == day]
            partition = folder / criteo.DAY_PARTITION.format(day=day)
            partition.mkdir(parents=True, exist_ok=True)
            for k in range(num_files):
                part = table.take(pa.array(rows[k::num_files], pa.int64()))
                pq.write_table(part, partition / f"part-{k}.parquet", row_group_size=row_group_size)
        return folder

    return write
