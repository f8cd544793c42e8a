"""Tests of TFDV's statistics from streamed rows, for any batches and processes."""

import os
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_data_validation as tfdv

from components.validation.tfdv_statistics import (
    checked_columns,
    make_options,
    read_statistics,
    summarize_files,
)
from evergreen.config.features import MAX_CATEGORY
from evergreen.contracts import criteo, raw_rows
from evergreen.runtime.errors import ContractError, TemporaryError
from tests.support.validation_statistics import by_feature, statistics_of, value_counts


@pytest.fixture
def by_tfdv():
    """TFDV's statistics of a table by its own generators, from all rows at once."""

    def generate(table):
        frame = table.to_pandas()
        for name in criteo.CATEGORICAL:
            frame[name] = table[name].cast(pa.string()).to_pandas()
        return tfdv.generate_statistics_from_dataframe(
            frame.drop(columns=raw_rows.REQUEST_ID), make_options(criteo.CRITEO)
        )

    return generate


@pytest.mark.parametrize(
    "replaced",
    [
        {},
        {"I2": pa.nulls(5000, pa.float32()), "C3": pa.nulls(5000, pa.int64())},
        {"I2": pa.array([float("inf"), float("-inf"), 1.0, 2.0, None] * 1000, pa.float32())},
        {"C3": pa.array([0, MAX_CATEGORY] * 2500, pa.int64())},
    ],
    ids=["ordinary", "empty", "infinite", "extreme"],
)
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # TFDV warns about infinite numbers
def test_statistics_equal_tfdv_on_same_dataframe(checked, by_tfdv, replaced):
    rows = checked(5000, **replaced)
    found, expected = statistics_of(rows), by_tfdv(rows)
    assert str(found.message) == str(
        expected
    )  # the texts are compared, because NaN is not equal to itself


def test_statistics_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ContractError, match="absent.pb cannot be read"):
        read_statistics(tmp_path / "absent.pb")
    (tmp_path / "wrong.pb").write_bytes(b"\xff\xff")
    with pytest.raises(ContractError, match="wrong.pb cannot be read"):
        read_statistics(tmp_path / "wrong.pb")


# -- processes


@pytest.fixture
def files(tmp_path, raw_table):
    table = raw_table(9000)
    many = np.random.default_rng(3).zipf(1.15, 9000) % 1_000_000
    column_index = table.schema.get_field_index("C7")
    table = table.set_column(column_index, "C7", [many])
    for i, (begin, rows) in enumerate([(0, 2500), (2500, 500), (3000, 6000)]):
        pq.write_table(
            table.slice(begin, rows), tmp_path / f"part-{i}.parquet", row_group_size=1700
        )
    return sorted(tmp_path.glob("*.parquet"))


@pytest.fixture
def frame(files):
    return pq.read_table(files[0].parent).to_pandas()


@pytest.mark.parametrize("processes", [1, 3])
def test_counts_and_moments_are_exact_for_any_number_of_processes(files, frame, processes):
    counter = RowLabels()
    found = summarize_files(files, counter, processes=processes)
    assert [counter.labels[i] for i in range(9000)] == frame["label"].tolist(), (
        "each row must occur once, with its number"
    )
    assert found.num_rows == 9000
    features = by_feature(found)
    assert list(features) == list(checked_columns(criteo.CRITEO))
    for name in criteo.DENSE:
        column, values = found.columns[name], frame[name].dropna().astype(np.float64)
        assert (column.num_values, column.num_missing) == (len(values), 9000 - len(values))
        assert (column.least, column.most) == (values.min(), values.max())
        assert features[name].num_stats.num_zeros == (values == 0).sum()
        assert column.mean == pytest.approx(values.mean(), rel=1e-12)
        assert column.std == pytest.approx(values.std(ddof=0), rel=1e-9)
        low, high = np.quantile(values, [0.48, 0.52])
        assert low <= column.median <= high
    for name in criteo.CATEGORICAL:
        values = frame[name].dropna().astype(np.int64)
        expected = values.value_counts()
        assert found.columns[name].num_values == len(values)
        counts = {int(value): count for value, count in value_counts(features[name]).items()}
        if len(expected) <= 1024:
            assert counts == expected.to_dict()
            assert found.columns[name].distinct == len(expected)
        else:  # with 1024 counters, a summary may miss up to 1/1024 of the rows
            assert all(
                abs(expected[value] - count) <= len(values) / 1024
                for value, count in counts.items()
            )
            assert set(expected.index[:50]) <= set(counts)
    assert max(frame[name].nunique() for name in criteo.CATEGORICAL) > 1024


class RowLabels:
    """Counts the rows without TFDV."""

    features = criteo.CRITEO

    def __init__(self):
        self.labels = {}

    def add(self, batch, first_row):
        for i, value in enumerate(batch.column("label").to_pylist()):
            assert first_row + i not in self.labels
            self.labels[first_row + i] = value

    def merge(self, other):
        assert not set(self.labels) & set(other.labels)
        self.labels |= other.labels


class KilledAtTheLastShare(RowLabels):
    """A worker that gets SIGKILL at the last share, as if the kernel killed it to free memory."""

    def add(self, batch, first_row):
        if first_row > 6000:
            os.kill(os.getpid(), signal.SIGKILL)


def test_process_that_is_killed_is_temporary_error(files):
    with pytest.raises(TemporaryError, match="processes was killed"):
        summarize_files(files, KilledAtTheLastShare(), processes=2)


def test_file_corrupt_within_is_refused_by_name(files):
    content = bytearray(files[1].read_bytes())
    content[4:4000] = bytes(3996)
    files[1].write_bytes(content)
    with pytest.raises(ContractError, match="part-1.parquet is not a readable"):
        summarize_files(files, RowLabels())


class HeldBytes(RowLabels):
    """Records the bytes that Arrow has allocated in total, at each batch."""

    def __init__(self):
        self.bytes = []

    def add(self, batch, first_row):
        self.bytes.append(pa.total_allocated_bytes())

    def merge(self, other):
        self.bytes += other.bytes


def test_memory_does_not_grow_with_rows(files):
    counter = HeldBytes()
    summarize_files([*files] * 12, counter, processes=1)
    size = len(counter.bytes)
    assert max(counter.bytes[size // 2 :]) < 1.5 * max(counter.bytes[: size // 4])
