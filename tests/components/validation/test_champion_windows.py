"""What a round is compared with: the windows that the champion keeps, or what an older champion kept."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from components.contracts.manifests import Model
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.validation.champion_windows import read_champion, window_of_reference
from components.validation.drift import measure_drift
from components.validation.kept_windows import KeptWindows, read_windows
from components.validation.reference import ReferenceCounter
from components.validation.settings import ValidationSettings


def counted(table):
    counter = ReferenceCounter()
    for batch in table.combine_chunks().to_batches():
        counter.add(batch)
    return counter


def test_each_round_adds_its_window_to_those_of_its_champion(step, write_rows, raw_table, release_model):
    _, first = step(write_rows(raw_table(300)))
    assert [w.rows for w in read_windows(local_path(first.windows_uri)).windows] == [300]
    release_model(first)
    second = step(write_rows(raw_table(200, seed=1), name="raw2"), run="r2")[1]
    # The fixture's manifests all have one digest; of one data set a second validation counts once.
    assert [w.rows for w in read_windows(local_path(second.windows_uri)).windows] == [200]
    assert second.drift[0]["num_rows_before"] == 300
    assert second.label["num_rows_before"] == 300


def test_a_blocked_round_with_a_faulty_column_keeps_no_window_and_judges_the_others(
    step, write_rows, judged, release_model
):
    release_model(step(write_rows(judged(300)))[1])
    _, report = step(write_rows(judged(300, seed=1).drop(["I3"]), name="raw2"), run="r2")
    assert (report.decision, report.windows_uri, report.label) == ("block", None, None)
    assert "I3" not in [entry["feature"] for entry in report.drift]
    assert len(report.drift) == 38


def test_an_older_champion_is_compared_by_what_it_kept_for_the_monitor(in_requests, tmp_path):
    before, now = in_requests(6400), in_requests(6400, seed=1)
    counter = counted(before)
    counter.statistics().write(tmp_path / Model.REFERENCE)
    compared, line = read_champion(tmp_path)
    assert line.windows == ()
    older, newer = compared.merged, counter.window()
    for name, column in newer.columns.items():
        assert older.columns[name].present == column.present
        assert older.columns[name].missing.rows == column.missing.rows
        if column.values is None:
            np.testing.assert_array_equal(older.columns[name].counts, column.counts)
        else:
            known = older.columns[name].of(column.values)[:, 0]
            np.testing.assert_array_equal(known[known > 0], column.counts[known > 0])
            assert column.counts[known == 0].max(initial=0) <= older.columns[name].floor
    drift = {e["feature"]: e for e in measure_drift(counted(now).window(), compared, ValidationSettings())}
    # Its requests are taken to be like those of these rows.
    assert drift["C9"]["design_effect"] == pytest.approx(64, rel=0.05)
    assert not any(entry["drifted"] for entry in drift.values())
    swapped = now.set_column(now.schema.get_field_index("C20"), "C20", now["C24"])
    drift = measure_drift(counted(swapped).window(), compared, ValidationSettings())
    assert [entry["feature"] for entry in drift if entry["drifted"]] == ["C20"]


def test_the_floor_of_an_older_champion_s_long_column_bounds_what_is_not_listed(judged):
    values = np.random.default_rng(0).zipf(1.15, 30_000) % 20_000
    column = window_of_reference(counted(judged(30_000, C3=pa.array(values, pa.int64()))).statistics()).columns["C3"]
    found, counts = np.unique(values, return_counts=True)
    unlisted = counts[column.of(found)[:, 0] == 0]
    assert unlisted.max() <= column.floor < 0.01 * 30_000


def test_a_champion_that_kept_nothing_is_compared_with_nothing(tmp_path):
    assert read_champion(tmp_path) == (None, KeptWindows(()))


def test_a_damaged_file_of_the_champion_is_refused(tmp_path):
    (tmp_path / Model.WINDOWS).parent.mkdir()
    (tmp_path / Model.WINDOWS).write_bytes(b"PK")
    with pytest.raises(ContractError, match="holds no training windows"):
        read_champion(tmp_path)
