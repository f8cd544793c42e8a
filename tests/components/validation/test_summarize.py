from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.runtime.errors import ContractError
from components.validation import log_histogram, summarize
from components.validation.lists import as_lists
from components.validation.rows import COLUMNS, divide, find_column_faults, parquet_files, read_part
from components.validation.schema import make_type_schema
from components.validation.tfdv import tfdv
from tests.components.validation.counting import statistics_of


@pytest.fixture
def rows(judged):
    return judged(5000)


@pytest.fixture
def by_tfdv():
    """TFDV's statistics of a table by its own generators, all rows at once."""

    def generate(table):
        frame = table.to_pandas()
        for name in criteo.CATEGORICAL:
            frame[name] = table[name].cast(pa.string()).to_pandas()
        options = tfdv.StatsOptions(
            schema=make_type_schema(),
            generators=[log_histogram.LogHistogramGenerator()],
            num_top_values=20,
            num_rank_histogram_buckets=1000,
        )
        return tfdv.generate_statistics_from_dataframe(frame, options)

    return generate


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"I2": pa.nulls(5000, pa.float32()), "C3": pa.nulls(5000, pa.int64())},
        {"I2": pa.array([float("inf"), float("-inf"), 1.0, 2.0, None] * 1000, pa.float32())},
        {"C3": pa.array([0, criteo.MAX_CATEGORY] * 2500, pa.int64())},
    ],
    ids=["ordinary", "empty", "infinite", "extreme"],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # TFDV's, of infinite numbers
def test_statistics_equal_tfdv_on_the_same_dataframe(judged, by_tfdv, odd):
    rows = judged(5000, **odd)
    found, expected = statistics_of(rows), by_tfdv(rows)
    assert str(found) == str(expected)  # as text, for NaN is not equal to itself


def test_batches_are_given_as_tfx_would_make_them(judged):
    from tfx_bsl.arrow import table_util

    rows = judged(1000, C5=pa.nulls(1000, pa.int64()))
    for batch in [*rows.to_batches(max_chunksize=300), rows.to_batches()[0].slice(0, 0)]:
        columns = [
            column.cast(pa.string()) if name in criteo.CATEGORICAL else column
            for name, column in zip(batch.schema.names, batch.columns)
        ]
        expected = table_util.CanonicalizeRecordBatch(pa.RecordBatch.from_arrays(columns, batch.schema.names))
        found = as_lists(batch)
        assert found.schema.names == expected.schema.names
        for name in COLUMNS:
            ours, theirs = (x.column(x.schema.get_field_index(name)) for x in (found, expected))
            if name in criteo.CATEGORICAL:  # which TFX takes for bytes
                theirs = theirs.cast(ours.type)
            elif name in criteo.DENSE:  # whose numbers TFX widens
                ours = ours.cast(theirs.type)
            assert ours.equals(theirs)


@pytest.mark.parametrize("batch_rows", [5000, 1024, 77])
def test_numbers_do_not_depend_on_the_batches(rows, batch_rows):
    features = summarize.by_feature(statistics_of(rows, batch_rows=batch_rows))
    assert list(features) == list(COLUMNS)
    for name in criteo.DENSE:
        numbers = features[name].num_stats
        values = rows[name].drop_null().to_numpy().astype(np.float64)
        assert numbers.common_stats.num_missing == rows[name].null_count
        assert numbers.common_stats.num_non_missing == len(values)
        assert numbers.mean == pytest.approx(values.mean())
        assert numbers.std_dev == pytest.approx(values.std())
        assert (numbers.min, numbers.max) == (values.min(), values.max())
        # TFDV's quantile sketch promises ranks within 1 %.
        low, high = np.quantile(values, [0.48, 0.52])
        assert low <= numbers.median <= high
    for name in criteo.CATEGORICAL:
        expected = {str(v["values"]): v["counts"] for v in rows[name].drop_null().value_counts().to_pylist()}
        assert features[name].string_stats.common_stats.num_missing == rows[name].null_count
        assert features[name].string_stats.unique == len(expected)
        assert summarize.value_counts(features[name]) == expected


def test_log_histogram_counts_every_value_once(rows):
    features = summarize.by_feature(statistics_of(rows, batch_rows=999))
    for name in criteo.DENSE:
        counts = [bucket.sample_count for bucket in summarize.log_histogram(features[name]).buckets]
        values = rows[name].drop_null().to_numpy()
        assert counts == np.histogram(values, log_histogram.EDGES)[0].tolist()


def test_log_histogram_merges_and_leaves_nan_out():
    generator = log_histogram.LogHistogramGenerator()

    def count(values):
        batch = pa.RecordBatch.from_arrays([pa.array(values, pa.list_(pa.float32()))], ["I1"])
        return generator.add_input(generator.create_accumulator(), batch)

    merged = generator.merge_accumulators(
        [count([[1.0], None, [float("nan")]]), count([[1.0], [float("inf")], [-9.0]])]
    )
    assert merged["I1"].sum() == 4
    assert merged["I1"][[0, -1]].tolist() == [1, 1]


def test_rows_are_read_in_batches_of_bounded_size_and_without_log_columns(write_rows, raw_table):
    files = parquet_files(write_rows(raw_table(700), raw_table(300, seed=1)).parent / "train")
    (parts,) = divide(files, 1)
    batches = [batch for part in parts for batch in read_part(part, COLUMNS, batch_rows=256)]
    assert [batch.num_rows for batch in batches] == [256, 256, 188, 256, 44]
    assert all(batch.schema.names == list(COLUMNS) for batch in batches)


@pytest.mark.parametrize("number", [1, 2, 3, 7, 40])
def test_shares_hold_every_row_once_and_are_as_large_as_each_other(tmp_path, raw_table, number):
    table = raw_table(1000)
    for i, (begin, end, group) in enumerate([(0, 300, 90), (300, 310, 90), (310, 310, 90), (310, 1000, 1000)]):
        pq.write_table(table.slice(begin, end - begin), tmp_path / f"{i}.parquet", row_group_size=group)
    shares = divide(parquet_files(tmp_path), number)
    sizes = [sum(part.num_rows for part in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    parts = [part for share in shares for part in share]
    assert [part.first_row for part in parts] == [0, *np.cumsum([part.num_rows for part in parts])][:-1]
    batches = [batch for part in parts for batch in read_part(part, list(COLUMNS), batch_rows=64)]
    assert pa.Table.from_batches(batches).equals(table.select(COLUMNS))


def test_missing_and_retyped_columns_are_named_with_their_file(write_rows, raw_table):
    table = raw_table(50)
    retyped = table.set_column(table.schema.get_field_index("C2"), "C2", table["C2"].cast(pa.string()))
    faults = find_column_faults(
        parquet_files(write_rows(table, retyped.drop(["I3"])).parent / "train"),
    )
    assert [fault.description for fault in faults] == [
        "column I3 is missing in part-1.parquet, expected float",
        "column C2 is string in part-1.parquet, expected int64",
    ]


def test_a_damaged_file_is_refused_by_name(write_rows, raw_table):
    folder = write_rows(raw_table(50)).parent / "train"
    path = folder / "part-0.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ContractError, match="part-0.parquet cannot be read as Parquet"):
        find_column_faults(parquet_files(folder))


def test_statistics_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ContractError, match="absent.pb cannot be read"):
        summarize.read_statistics(tmp_path / "absent.pb")
    (tmp_path / "wrong.pb").write_bytes(b"\xff\xff")
    with pytest.raises(ContractError, match="wrong.pb cannot be read"):
        summarize.read_statistics(tmp_path / "wrong.pb")
