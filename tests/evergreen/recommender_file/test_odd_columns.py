"""Tests of warnings about columns and rows that need a person's decision."""

import json
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

from evergreen.config.data import ColumnNames
from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.recommender_file.draft import draft, read_sample
from evergreen.recommender_file.trial import try_rows


def rows(n):
    return [
        {
            "click": int(i % 4 == 0),
            "event_time": f"2026-03-0{1 + i % 3}T00:00:00",
            "user_id": i % 50,
            "item": f"i{i % 9}",
        }
        for i in range(n)
    ]


def test_binary_columns_are_excluded_with_message(tmp_path):
    found = [
        {**row, "device": uuid.UUID(int=(7919 * i + 255 << 64) + i).bytes}
        for i, row in enumerate(rows(300))
    ]
    pq.write_table(pa.Table.from_pylist(found), tmp_path / "rows.parquet")
    text = draft(read_sample(tmp_path / "rows.parquet"), name="shop")
    (line,) = [line for line in text.splitlines() if "device" in line]
    assert line.startswith("#   device: bytes that are not UTF-8 text")


def test_rows_without_request_id_become_separate_requests(tmp_path):
    found = [
        {"request_id": "" if i % 7 == 0 else f"q{i // 3}", "row": i % 3, **row}
        for i, row in enumerate(rows(300))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, found)))
    assert "  request_id: request_id" in draft(read_sample(path), name="shop")
    recommender = Recommender(
        name="shop",
        features=Features(numeric=(), categorical=("user_id",)),
        data=ColumnNames(label="click"),
    )
    trial = try_rows(path, recommender)
    assert (trial.rows, trial.refusals, trial.copies.num_conflicting) == (300, [], 0)


def test_rows_written_again_with_their_click_are_reported(tmp_path):
    found = [{**row, "click": 0, "user_id": i} for i, row in enumerate(rows(200))]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(map(json.dumps, [*found, *[{**row, "click": 1} for row in found[:30]]]))
    )
    features = Features(numeric=(), categorical=("user_id",))
    trial = try_rows(
        path, Recommender(name="shop", features=features, data=ColumnNames(label="click"))
    )
    assert (trial.rows, trial.equal_rows, trial.changed_labels) == (230, 0, 30)


def test_folder_with_empty_file_has_times(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows(30))))
    (tmp_path / "b.jsonl").write_text("")
    features = Features(numeric=(), categorical=("user_id",))
    trial = try_rows(
        tmp_path, Recommender(name="shop", features=features, data=ColumnNames(label="click"))
    )
    assert trial.has_times
    assert "is empty" in trial.refusals[0]
