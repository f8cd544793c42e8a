"""Tests of the extraction step's command line, KFP component and window."""

import re

import pytest
from kfp import dsl

from components.extraction.component import extraction
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.registry.runs import read_notes
from evergreen.runtime.errors import flags_to_run_again
from tests.support.lakes import rows_in


def test_paths_with_spaces_and_uris_are_served(flags, tmp_path, run_main):
    assert run_main(flags) == 0
    dataset = RawDataset.read(flags["--output"])
    assert dataset.num_train_rows == 900
    assert dataset.train_uri == (tmp_path / "my work" / "run 1" / "extraction" / "train").as_uri()
    (note,) = read_notes(tmp_path / "my store", "run 1")
    assert (note.step, note.state, note.facts["train_rows"]) == ("extraction", "done", 900)


def test_window_starts_after_last_training_row_of_parent(flags, released, run_main, tmp_path):
    assert run_main(flags, window_end="2026-03-02T00:00:00Z") == 0
    facts = read_notes(tmp_path / "my store", "run 1")[0].facts
    assert (facts["window_start"], facts["window_end"]) == ("", "2026-03-02T00:00:00Z"), (
        "the parameters that `reproduce` passes again"
    )
    first = RawDataset.read(flags["--output"])
    evaluated_by = rows_in(first.holdout_uri)
    assert (first.num_train_rows, first.num_holdout_rows) == (450, 50)
    assert first.watermark < first.last_event_time
    released(first.watermark)
    assert run_main(flags) == 0
    dataset = RawDataset.read(flags["--output"])
    assert dataset.num_train_rows + dataset.num_holdout_rows == 550, (
        "the first holdout rows are training rows now"
    )
    assert dataset.window_start is not None
    assert first.watermark < dataset.window_start <= dataset.first_event_time
    assert (dataset.parent_model_id, dataset.champion_model_id) == ("m1", "m1")
    assert dataset.first_event_time == evaluated_by[0][raw_rows.EVENT_TIME].isoformat()


def test_run_from_scratch_reads_lake_or_span_and_evaluates_on_unseen_rows(
    flags, released, run_main
):
    released("2026-03-02T21:36:00+00:00")  # 50 rows are newer
    assert run_main(flags, parent="none") == 0
    full = RawDataset.read(flags["--output"])
    assert (full.window_start, full.num_train_rows, full.num_holdout_rows) == (None, 951, 49)
    assert (full.parent_model_id, full.champion_model_id) == (None, "m1")
    assert full.watermark == "2026-03-02T21:36:00+00:00"
    assert run_main(flags, parent="none", full_days="0.5") == 0
    half = RawDataset.read(flags["--output"])
    assert (half.num_train_rows, half.num_holdout_rows) == (225, 25), (
        "the holdout is the newest tenth"
    )
    assert run_main(flags, full_days="0.1") == 0
    assert RawDataset.read(flags["--output"]).num_train_rows == 44, (
        "`full_days` must not limit a run with a parent"
    )


def test_window_without_unseen_rows_is_refused_with_one_that_would_do(
    flags, released, run_main, capsys
):
    released("2026-03-02T12:00:00+00:00")
    window = {"window_start": "2026-03-01", "window_end": "2026-03-02T12:20:00Z"}
    assert run_main(flags, **window) == 2
    message = capsys.readouterr().err
    assert (
        "has 6 rows after 2026-03-02T12:00:00+00:00, the time of the newest training row of m1, "
        "expected at least 10" in message
    )
    (would_do,) = re.findall(r"use a window_end of (\S+) or later", message)
    assert run_main(flags, **{**window, "window_end": would_do}) == 0
    dataset = RawDataset.read(flags["--output"])
    assert (dataset.num_train_rows, dataset.num_holdout_rows) == (751, 10)
    released("2026-03-02T23:50:00+00:00", model_id="m2", version=2)
    assert run_main(flags, parent="none") == 2
    refused = capsys.readouterr().err
    assert "the lake has only 3 such rows: bring more rows by `evergreen data ingest`" in refused
    assert flags_to_run_again(refused) == ["--from-scratch"]
    assert run_main(flags, parent="none", champion="none") == 0


REFUSED = {
    "nothing new": ({"window_start": "2026-05-01"}, "has no rows, expected at least 10"),
    "start after end": (
        {"window_start": "2026-03-02", "window_end": "2026-03-01"},
        "is empty, expected its start",
    ),
    "not a time": (
        {"window_start": "yesterday"},
        "window_start is 'yesterday', expected an ISO 8601 time",
    ),
    **{
        reference: (
            {"parent": reference},
            f"parent is {reference!r}, which names 2 models, expected one, because models cannot",
        )
        for reference in ("m1,m2", "current, m2", "m1 m2")
    },
    "unknown parent": ({"parent": "m9"}, "parent 'm9' is not in the model registry"),
    "unknown champion": ({"champion": "m9"}, "champion 'm9' was never released"),
    "no column": (
        {"columns": '["price", "label"]'},
        "columns name ['label'], expected some of price, age, item",
    ),
    "no setting": (
        {"settings": "extraction.holdout=1"},
        "extraction.holdout is not a setting, expected holdout_fraction",
    ),
    "no section": (
        {"settings": "extractoin.late_days=1"},
        "extractoin is not a section, expected extraction",
    ),
    "no recommender": (
        {"recommender": "7"},
        "recommender is '7', expected current, the number of an accepted version",
    ),
    "negative late days": ({"late_days": "-1"}, "late_days is -1, expected 0"),
    "nothing mature": (
        {"attribution_hours": "99", "window_start": "2026-03-01"},
        "has no mature row",
    ),
    "no hours": (
        {"attribution_hours": "nan"},
        "extraction.attribution_hours is 'nan', expected float",
    ),
    "relative lake": (
        {"lake": "lake"},
        "lake is 'lake', expected gs://bucket/prefix, file:///... or an abs",
    ),
    "lake elsewhere": (
        {"lake": "s3://shop/clicks"},
        "lake is 's3://shop/clicks', expected gs://bucket/prefix, file",
    ),
    "no lake": ({"lake": "/no/such/lake"}, "lake /no/such/lake does not exist"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unusable_input_is_one_line_on_stderr_and_code_2(
    flags, tmp_path, capsys, changed, message, run_main
):
    assert run_main(flags, **changed) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert message in line
    (note,) = read_notes(tmp_path / "my store", "run 1")
    assert note.state == "failed"
    assert message in note.reason
    assert not (tmp_path / "out").exists()


def test_disk_that_fails_is_named_and_worth_another_try(flags, tmp_path, capsys, run_main):
    (tmp_path / "full").write_text("no folder")
    assert run_main(flags, work=str(tmp_path / "full")) == 3
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert "Not a directory" in line
    assert str(tmp_path / "full") in line
    assert not (tmp_path / "out").exists()


def test_component_writes_manifest(flags, tmp_path):
    raw_dataset = dsl.Dataset(name="raw_dataset", uri=str(tmp_path / "artifact"), metadata={})
    arguments = {
        "run": "r",
        "run_resource": "x",
        "run_id": "",
        "store": flags["--store"],
        "work": flags["--work"],
        "lake": flags["--lake"],
        "window_start": "",
        "window_end": "",
        "parent": "current",
        "champion": "current",
        "recommender": "current",
        "settings": "extraction.holdout_fraction=0.2",
        "dask_scheduler": "",
    }
    extraction.python_func(**arguments, raw_dataset=raw_dataset)
    assert RawDataset.read(raw_dataset.path).num_holdout_rows == 200
    with pytest.raises(SystemExit) as caught:
        extraction.python_func(**{**arguments, "lake": "/no"}, raw_dataset=raw_dataset)
    assert caught.value.code == 2
