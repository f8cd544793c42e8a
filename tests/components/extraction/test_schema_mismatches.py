"""Tests that schema mismatches of a lake's files reach the manifest."""

from datetime import datetime, timezone

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from evergreen.contracts.manifests import RawDataset


@pytest.fixture
def change_file(tmp_path):
    """Rewrites one file of the lake and returns its path."""

    def change(what, *, day=1):
        path = tmp_path / "my lake" / f"day=2026-03-0{day}" / "part-0.parquet"
        pq.write_table(what(pq.read_table(path, partitioning=None)), path)
        return path

    return change


def cast(name, arrow_type):
    return lambda table: table.set_column(
        table.schema.get_field_index(name), name, table[name].combine_chunks().cast(arrow_type)
    )


def encoded(table):
    return table.set_column(
        table.schema.get_field_index("user"), "user", table["user"].dictionary_encode()
    )


def mismatches(flags, run_main, **more: str):
    assert run_main(flags, **more) == 0
    return RawDataset.read(flags["--output"]).schema_mismatches


def test_column_that_became_text_is_reported_with_its_first_file(flags, run_main, change_file):
    first = change_file(cast("shop", pa.string()))
    change_file(cast("shop", pa.string()), day=2)
    assert mismatches(flags, run_main) == [
        {"column": "shop", "arrow_type": "string", "expected": "int64", "file": str(first)}
    ]


def test_unknown_columns_are_reported_and_those_of_agreed_groups_are_not(
    flags, run_main, change_file
):
    path = change_file(
        lambda table: table.append_column("cost", pa.array([1.5] * len(table))).append_column(
            "shadow_version", pa.nulls(len(table), pa.int32())
        )
    )
    assert mismatches(flags, run_main) == [
        {"column": "cost", "arrow_type": "double", "expected": None, "file": str(path)}
    ]


@pytest.mark.parametrize("change", [cast("label", pa.bool_()), cast("user", pa.uint32()), encoded])
def test_numbers_of_other_width_and_dictionaries_of_numbers_are_accepted(
    flags, run_main, change_file, change
):
    change_file(change)
    assert mismatches(flags, run_main) == []


def test_dictionary_of_texts_is_no_number(flags, run_main, change_file):
    path = change_file(lambda table: encoded(cast("user", pa.string())(table)))
    (mismatch,) = mismatches(flags, run_main)
    assert (mismatch["column"], mismatch["expected"], mismatch["file"]) == (
        "user",
        "int64",
        str(path),
    )


def test_missing_categories_may_be_nan_among_floats_as_pandas_has_them(
    flags, run_main, change_file
):
    def with_nan(table):
        values = pc.fill_null(table["user"].cast(pa.float64()), float("nan"))
        return table.set_column(table.schema.names.index("user"), "user", values)

    path = change_file(lambda table: table)
    before = pq.read_table(path, partitioning=None)["user"].null_count
    assert before > 0
    change_file(with_nan)
    assert mismatches(flags, run_main) == []
    rows = pq.read_table(f"{flags['--work']}/run 1/extraction/train", partitioning=None)
    first_day = pc.less(rows["event_time"], pa.scalar(datetime(2026, 3, 2, tzinfo=timezone.utc)))
    assert rows.filter(first_day)["user"].null_count == before


def test_columns_that_run_does_not_read_are_not_evaluated(flags, run_main, change_file):
    change_file(cast("shop", pa.string()))
    assert mismatches(flags, run_main, columns='["price", "item"]') == []


def test_rows_that_no_model_of_ours_served_need_not_name_one(flags, run_main, change_file):
    change_file(lambda table: table.drop_columns(["model_version", "score"]))
    assert mismatches(flags, run_main) == []
    rows = pq.read_table(f"{flags['--work']}/run 1/extraction/train", partitioning=None)
    without = rows.slice(0, 400)
    assert without["model_version"].null_count == without["score"].null_count == 400
    assert rows["item"].null_count < 400
