"""The step as a command line and as a KFP component; the window that it resolves."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from kfp import dsl

from components.contracts.manifests import RawDataset
from components.extraction.component import extraction
from components.store.runs import read_notes

START = datetime(2026, 3, 1, tzinfo=timezone.utc)


def test_paths_with_spaces_and_uris_are_served(flags, tmp_path, run_main):
    assert run_main(flags) == 0
    dataset = RawDataset.read(flags["--output"])
    assert dataset.num_train_rows == 900
    assert dataset.train_uri == (tmp_path / "my work" / "run 1" / "extraction" / "train").as_uri()
    (note,) = read_notes(tmp_path / "my store", "run 1")
    assert (note.step, note.state, note.facts["train_rows"]) == ("extraction", "done", 900)


def test_the_window_starts_after_the_champions_last_trained_row(flags, released, run_main):
    first_half = RawDataset
    assert run_main(flags, window_end="2026-03-02T00:00:00Z") == 0
    trained = first_half.read(flags["--output"])
    released(trained.last_event_time)
    assert run_main(flags) == 0
    dataset = RawDataset.read(flags["--output"])
    assert dataset.num_train_rows + dataset.num_holdout_rows == 500
    assert dataset.window_start is not None
    assert trained.last_event_time < dataset.window_start <= dataset.first_event_time


REFUSED = {
    "nothing new": ({"window_start": "2026-05-01"}, "holds no rows, expected at least 10"),
    "start after end": ({"window_start": "2026-03-02", "window_end": "2026-03-01"}, "is empty, expected its start"),
    "not a time": ({"window_start": "yesterday"}, "window_start is 'yesterday', expected an ISO 8601 time"),
    "unknown champion": ({"champion": "m9"}, "champion 'm9' was never released"),
    "holdout of all": ({"holdout_fraction": "1"}, "holdout_fraction is 1.0, expected"),
    "days and a start": ({"window_days": "2", "window_start": "2026-03-01"}, "window_days is 2.0 with window_start"),
    "no column": ({"columns": "I1,label"}, "columns name ['label'], expected some of I1 to I13 and C1 to C26"),
    "rate above one": ({"negative_rate": "1.5"}, "negative_rate is 1.5, expected more than 0 and at most 1"),
    "negative late days": ({"late_days": "-1"}, "late_days is -1, expected 0"),
    "nothing mature": ({"attribution_hours": "99", "window_start": "2026-03-01"}, "holds no mature row"),
    "negative hours": ({"attribution_hours": "-1"}, "attribution_hours is -1.0, expected 0"),
    "no hours": ({"attribution_hours": "nan"}, "attribution_hours is nan, expected 0"),
    "relative lake": ({"lake": "lake"}, "lake is 'lake', expected gs://bucket/prefix, file:///... or an abs"),
    "lake elsewhere": ({"lake": "s3://shop/clicks"}, "lake is 's3://shop/clicks', expected gs://bucket/prefix, file"),
    "no lake": ({"lake": "/no/such/lake"}, "lake /no/such/lake does not exist"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unusable_input_is_one_line_on_stderr_and_code_2(flags, tmp_path, capsys, changed, message, run_main):
    assert run_main(flags, **changed) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert message in line
    (note,) = read_notes(tmp_path / "my store", "run 1")
    assert note.state == "failed"
    assert message in note.reason
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fails_is_named_and_worth_another_try(flags, tmp_path, capsys, run_main):
    (tmp_path / "full").write_text("no folder")
    assert run_main(flags, work=str(tmp_path / "full")) == 3
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert "Not a directory" in line
    assert str(tmp_path / "full") in line
    assert not (tmp_path / "out").exists()


def test_the_component_writes_the_manifest_and_counts(flags, tmp_path):
    raw_dataset = dsl.Dataset(name="raw_dataset", uri=str(tmp_path / "artifact"), metadata={})
    metrics = dsl.Metrics(name="metrics", uri=str(tmp_path / "metrics"), metadata={})
    arguments = {
        "run": "r", "store": flags["--store"], "work": flags["--work"], "lake": flags["--lake"], "window_start": "",
        "window_end": "", "champion": "current", "holdout_fraction": 0.2, "max_malformed_fraction": 0.0,
        "replay_share": 0.0, "replay_days": 7, "window_days": 0.0, "late_days": 1, "columns": "", "negative_rate": 1.0,
        "attribution_hours": 0.0,
    }  # fmt: skip
    extraction.python_func(**arguments, raw_dataset=raw_dataset, metrics=metrics)
    assert RawDataset.read(raw_dataset.path).num_holdout_rows == 200
    assert metrics.metadata == {
        "num_train_rows": 800,
        "num_holdout_rows": 200,
        "num_replay_rows": 0,
        "num_replay_holdout_rows": 0,
        "num_late_rows": 0,
        "num_malformed": 0,
        "num_duplicates": 0,
    }
    with pytest.raises(SystemExit) as caught:
        extraction.python_func(**{**arguments, "lake": "/no"}, raw_dataset=raw_dataset, metrics=metrics)
    assert caught.value.code == 2
