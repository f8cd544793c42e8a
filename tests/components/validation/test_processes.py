"""Statistics from several processes: those of one, whatever the shares; and a process that dies is told."""

from __future__ import annotations

import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.runtime.errors import ContractError, TemporaryError
from components.validation.reference import ReferenceCounter
from components.validation.rows import COLUMNS, parquet_files
from components.validation.summarize import by_feature, num_missing, num_rows, num_values, summarize_files, value_counts


@pytest.fixture
def files(tmp_path, raw_table):
    table = raw_table(9000)
    many = np.random.default_rng(3).zipf(1.15, 9000) % 1_000_000
    place = table.schema.get_field_index("C7")
    table = table.set_column(place, "C7", [many])
    for i, (begin, rows) in enumerate([(0, 2500), (2500, 500), (3000, 6000)]):
        pq.write_table(table.slice(begin, rows), tmp_path / f"part-{i}.parquet", row_group_size=1700)
    return parquet_files(tmp_path)


@pytest.fixture
def frame(files):
    return pq.read_table(files[0].parent).to_pandas()


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_counts_and_moments_are_the_truth_whatever_the_number_of_processes(files, frame, processes):
    found = summarize_files(files, COLUMNS, processes=processes)
    assert num_rows(found) == 9000
    features = by_feature(found)
    assert list(features) == list(COLUMNS)
    for name in criteo.DENSE:
        numbers, values = features[name].num_stats, frame[name].dropna().astype(np.float64)
        assert (num_values(features[name]), num_missing(features[name])) == (len(values), 9000 - len(values))
        assert (numbers.min, numbers.max, numbers.num_zeros) == (values.min(), values.max(), (values == 0).sum())
        assert numbers.mean == pytest.approx(values.mean(), rel=1e-12)
        assert numbers.std_dev == pytest.approx(values.std(ddof=0), rel=1e-9)
        low, high = np.quantile(values, [0.48, 0.52])
        assert low <= numbers.median <= high
    for name in criteo.CATEGORICAL:
        values = frame[name].dropna().astype(np.int64)
        expected = values.value_counts()
        assert num_values(features[name]) == len(values)
        counts = {int(value): count for value, count in value_counts(features[name]).items()}
        if len(expected) <= 1024:
            assert counts == expected.to_dict()
            assert features[name].string_stats.unique == len(expected)
        else:  # a summary of 1024 counters may lack a 1024th of the rows
            assert all(abs(expected[value] - count) <= len(values) / 1024 for value, count in counts.items())
            assert set(expected.index[:50]) <= set(counts)
    assert max(frame[name].nunique() for name in criteo.CATEGORICAL) > 1024


@pytest.mark.parametrize("processes", [2, 5])
def test_counters_hold_what_one_process_counts(files, processes, tmp_path):
    alone, divided = ReferenceCounter(), ReferenceCounter()
    summarize_files(files, COLUMNS, [alone], processes=1)
    summarize_files(files, COLUMNS, [divided], processes=processes)
    alone.statistics().write(tmp_path / "alone.json")
    divided.statistics().write(tmp_path / "divided.json")
    assert (tmp_path / "alone.json").read_bytes() == (tmp_path / "divided.json").read_bytes()


class Rows:
    """A counter of the rows themselves."""

    def __init__(self):
        self.labels = {}

    def add(self, batch, first_row):
        for i, value in enumerate(batch.column("label").to_pylist()):
            assert first_row + i not in self.labels
            self.labels[first_row + i] = value

    def merge(self, other):
        assert not set(self.labels) & set(other.labels)
        self.labels |= other.labels


@pytest.mark.parametrize("processes", [1, 2, 7])
def test_a_counter_is_given_every_row_once_with_its_number(files, frame, processes):
    counter = Rows()
    summarize_files(files, COLUMNS, [counter], processes=processes)
    assert [counter.labels[i] for i in range(9000)] == frame["label"].tolist()


def test_few_rows_are_read_by_one_process(files):
    class Process(Rows):
        def __init__(self):
            self.seen = set()

        def add(self, batch, first_row):
            self.seen.add(os.getpid())

        def merge(self, other):
            self.seen |= other.seen

    counter = Process()
    summarize_files(files, COLUMNS, [counter])
    assert counter.seen == {os.getpid()}


def test_no_files_give_zero_rows():
    assert num_rows(summarize_files([], COLUMNS, processes=3)) == 0


class Killed(Rows):
    """Has its process killed by the kernel's signal for want of memory, at the last share."""

    def add(self, batch, first_row):
        if first_row > 6000:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_a_temporary_error(files):
    with pytest.raises(TemporaryError, match="processes was killed"):
        summarize_files(files, COLUMNS, [Killed()], processes=2)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_damaged_within_is_refused_by_name(files, processes):
    content = bytearray(files[1].read_bytes())
    content[4:4000] = bytes(3996)
    files[1].write_bytes(content)
    with pytest.raises(ContractError, match="part-1.parquet cannot be read as Parquet"):
        summarize_files(files, COLUMNS, processes=processes)


class Held(Rows):
    """The bytes that Arrow holds when each batch comes, beyond those at the first."""

    def __init__(self):
        self.bytes = []

    def add(self, batch, first_row):
        self.bytes.append(pa.total_allocated_bytes())

    def merge(self, other):
        self.bytes += other.bytes


@pytest.mark.parametrize("processes", [1, 2])
def test_memory_does_not_grow_with_the_rows(files, processes):
    counter = Held()
    summarize_files([*files] * 12, COLUMNS, [counter], processes=processes)
    size = len(counter.bytes) // processes
    for begin in range(0, size * processes, size):
        held = counter.bytes[begin : begin + size]
        assert max(held[size // 2 :]) < 1.5 * max(held[: size // 4])
