"""Tests of a window's summary: it equals pandas' results and can be merged with other summaries."""

import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from components.validation.measure import LineageWindows, read_windows
from evergreen.contracts import criteo, raw_rows
from evergreen.runtime.errors import ContractError
from evergreen.statistics import profile_files
from evergreen.statistics.column_profile import (
    DENSE_EDGES,
    LISTED,
    RowTotal,
    TableProfile,
    find_sums,
)
from evergreen.statistics.profile_counter import BLOCK_ROWS, ProfileCounter


def by_request(table, cut=BLOCK_ROWS):
    """Return a frame with a column `key`, which names the request and its block of rows."""
    frame = table.to_pandas()
    frame["key"] = (
        frame[raw_rows.REQUEST_ID].astype(str) + "/" + (np.arange(len(frame)) // cut).astype(str)
    )
    return frame


def assert_same(one: TableProfile, other: TableProfile):
    assert {**vars(one), "columns": None} == {**vars(other), "columns": None}
    assert list(one.columns) == list(other.columns)
    for name, column in one.columns.items():
        found = vars(other.columns[name])
        for field, value in vars(column).items():
            np.testing.assert_array_equal(found[field], value, err_msg=f"{name} {field}")


@pytest.fixture
def rows(in_requests):
    """Rows in requests of 48 rows. Some requests cross the boundary between blocks of 1024 rows."""
    return in_requests(5000, size=48)


def test_sums_over_requests_are_pandas(rows, window_of):
    found, frame = window_of(rows), by_request(rows)
    sizes = frame.groupby("key").size()
    assert (found.rows, found.requests, found.sizes) == (5000, len(sizes), (sizes**2).sum())
    clicks = frame.groupby("key")[raw_rows.LABEL].sum()
    assert found.clicks == RowTotal(
        rows=clicks.sum(), squares=(clicks**2).sum(), products=(clicks * sizes).sum()
    )
    for name in criteo.FEATURES:
        column, present = found.columns[name], frame.groupby("key")[name].count()
        missing = sizes - present
        assert column.missing == RowTotal(
            rows=missing.sum(), squares=(missing**2).sum(), products=(missing * sizes).sum()
        )
        assert column.present == present.sum()
        assert column.present_sizes == (present**2).sum()
        assert column.present_requests == (present > 0).sum()


def test_cells_are_pandas(rows, window_of):
    found, frame = window_of(rows), by_request(rows)
    for name in criteo.FEATURES:
        column, present = found.columns[name], frame.groupby("key")[name].count()
        cells = frame[name]
        if name in criteo.DENSE:
            cells = pd.cut(cells, DENSE_EDGES, labels=False, right=False)
        table = (
            frame.assign(cell=cells)
            .dropna(subset=["cell"])
            .groupby(["cell", "key"])
            .size()
            .rename("rows")
        )
        table = table.reset_index().assign(rows_of_request=lambda t, of=present: t["key"].map(of))
        table = table.assign(
            squares=table["rows"] ** 2, products=table["rows"] * table["rows_of_request"]
        )
        expected = table.groupby("cell")[["rows", "squares", "products"]].sum()
        if name in criteo.DENSE:
            ours = pd.DataFrame(column.sums, columns=expected.columns)
            pd.testing.assert_frame_equal(
                ours[ours["rows"] > 0],
                expected,
                check_names=False,
                check_dtype=False,
                check_index_type=False,
            )
            places = table.assign(place=table["cell"] * table["rows"]).groupby("key")["place"].sum()
            assert column.bucket_squares == (places**2).sum()
            assert column.bucket_products == (places * present[places.index]).sum()
        else:
            found_sums = find_sums(expected.index.to_numpy(np.int64), column.values, column.sums)
            np.testing.assert_array_equal(found_sums, expected.to_numpy())
            assert column.counts.sum() == column.present
            assert column.floor == 0


@pytest.mark.parametrize("batch_rows", [BLOCK_ROWS, 3 * BLOCK_ROWS])
def test_whole_blocks_in_any_batches_and_any_processes_give_same_summary(
    rows, window_of, batch_rows
):
    whole, parts = window_of(rows), [ProfileCounter(criteo.CRITEO), ProfileCounter(criteo.CRITEO)]
    batches = rows.combine_chunks().to_batches(max_chunksize=batch_rows)
    first = 0
    for number, batch in enumerate(batches):
        parts[number * 2 // len(batches)].add(batch, first)
        first += batch.num_rows
    counter = pickle.loads(pickle.dumps(parts[0]))
    counter.merge(pickle.loads(pickle.dumps(parts[1])))
    assert_same(counter.profile(), whole)


def test_rows_of_request_need_not_lie_together(in_requests, window_of):
    table = in_requests(1024, size=16)
    mixed = table.take(pa.array(np.arange(1024).reshape(64, 16).T.ravel()))
    assert_same(window_of(mixed), window_of(table))


def test_merged_windows_are_window_of_all_rows(in_requests, window_of):
    tables = [in_requests(2 * BLOCK_ROWS, seed=seed) for seed in (1, 2, 3)]
    merged = LineageWindows(tuple(window_of(table) for table in tables)).merged
    whole = window_of(pa.concat_tables(tables))
    assert_same(merged, whole)


def test_frequent_values_of_long_column_are_kept_and_floor_bounds_rest(checked, window_of):
    random = np.random.default_rng(0)
    parts = [random.zipf(1.15, 30_000) % 20_000 for _ in range(3)]
    tables = [checked(30_000, C3=pa.array(part, pa.int64())) for part in parts]
    merged = LineageWindows(tuple(window_of(table) for table in tables)).merged.columns["C3"]
    values, counts = np.unique(np.concatenate(parts), return_counts=True)
    listed = find_sums(values, merged.values, merged.sums)[:, 0]
    assert len(merged.values) == LISTED
    assert (listed <= counts).all()
    assert ((counts - listed) <= merged.floor)[listed > 0].all()
    assert counts[listed == 0].max() <= merged.floor
    assert merged.floor < 0.001 * len(np.concatenate(parts))


# -- stored


def test_what_is_read_is_what_was_written_and_same_windows_give_same_bytes(
    rows, window_of, tmp_path
):
    kept = LineageWindows(
        (window_of(rows, "a"), window_of(rows.slice(0, 100), "b", excluded=("I1", "C1")))
    )
    kept.write(tmp_path / "one.npz")
    kept.write(tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    found = read_windows(tmp_path / "one.npz")
    assert len(found.windows) == 2
    for one, other in zip(found.windows, kept.windows):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda p: p.unlink(), "cannot be read"),
        (lambda p: p.write_bytes(p.read_bytes()[:-40]), "holds no TrainingWindows"),
        (lambda p: p.write_text("nothing"), "holds no TrainingWindows"),
        (
            lambda p: np.savez(
                p, head=np.frombuffer(b'{"kind": "Other", "format_version": 9}', np.uint8)
            ),
            "version 9",
        ),
    ],
    ids=["absent", "cut", "text", "version"],
)
def test_corrupt_file_is_refused_with_what_is_wrong(checked, window_of, tmp_path, break_it, words):
    path = tmp_path / "windows.npz"
    LineageWindows((window_of(checked(100)),)).write(path)
    break_it(path)
    with pytest.raises(ContractError, match=words):
        read_windows(path)


@pytest.mark.parametrize(
    ("factor", "same"), [(1 + 1e-15, True), (1.01, False)], ids=["last digit", "others"]
)
def test_edges_that_another_numpy_computed_are_same_edges(
    checked, window_of, tmp_path, monkeypatch, factor, same
):
    path = tmp_path / "windows.npz"
    LineageWindows((window_of(checked(100)),)).write(path)
    monkeypatch.setattr(profile_files, "DENSE_EDGES", DENSE_EDGES * factor)
    assert not np.array_equal(profile_files.DENSE_EDGES, DENSE_EDGES)
    if same:
        assert len(read_windows(path).windows) == 1
    else:
        with pytest.raises(ContractError, match="other bucket edges"):
            read_windows(path)
