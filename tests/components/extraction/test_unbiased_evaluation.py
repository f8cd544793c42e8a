"""Tests that no compared model was trained on an evaluation row or on its request."""

import re
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from tests.support.lakes import rows_in

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
ROWS, DAYS = 240, 4
REFUSALS = (
    "expected at least 10",
    "is empty, expected its start before its end",
    "has no mature row",
    "expected older and newer rows",
    "all of their requests also have older rows",
)


def moments():
    """Draw a time in the lake's range, or shortly before or after it.

    The time may equal a row's time.
    """
    return st.integers(-6, 2 * ROWS + 6).map(
        lambda half: START + half * timedelta(days=DAYS) / (2 * ROWS)
    )


@st.composite
def windows(draw):
    """Draw random command-line flags that select a window for the extraction step."""
    kind = draw(st.sampled_from(["watermark", "start", "full days"]))
    flags = {"parent": draw(st.sampled_from(["current", "none", "m1"]))}
    flags["champion"] = draw(st.sampled_from(["current", "current", "m1", "none"]))
    flags["holdout_fraction"] = draw(st.sampled_from(["0.01", "0.1", "0.5", "0.9"]))
    if draw(st.booleans()):
        flags["window_end"] = draw(moments()).isoformat()
    if kind == "start":
        flags["window_start"] = draw(moments()).isoformat()
    elif kind != "watermark":
        flags["full_days"] = str(draw(st.floats(0.1, DAYS + 1)))
    if draw(st.integers(0, 3)) == 0:
        flags["attribution_hours"] = "7"
    return flags


@pytest.mark.parametrize("request_rows", [1, 4], ids=["rows", "requests"])
@given(requested=windows(), trained=st.tuples(moments(), moments()))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_baseline_was_trained_on_evaluation_rows(
    requested,
    trained,
    request_rows,
    flags,
    run_main,
    released,
    raw_table,
    write_lake,
    tmp_path,
    capsys,
):
    lake = tmp_path / "lake"
    if not lake.exists():
        table = raw_table(
            ROWS, start=START.timestamp(), seconds=DAYS * 86_400, request_rows=request_rows
        )
        write_lake(lake, table)
    (tmp_path / "my store" / "journal.jsonl").unlink(missing_ok=True)
    watermarks = {f"m{number}": time for number, time in enumerate(trained, start=1)}
    for number, (model_id, time) in enumerate(watermarks.items(), start=1):
        released(time.isoformat(), model_id=model_id, version=number)
    flags = {**flags, "--lake": lake.as_uri(), "--replay-days": "0"}
    if run_main(flags, **requested) != 0:
        message = capsys.readouterr().err
        assert any(refusal in message for refusal in REFUSALS), message
        if found := re.search(r"use a window_end of (\S+) or later", message):
            assert "window_end" in requested or "attribution_hours" in requested
            code = run_main(flags, **{**requested, "window_end": found[1]})
            assert (
                code == 0 or "all of their requests also have older rows" in capsys.readouterr().err
            )
        return
    dataset = RawDataset.read(flags["--output"])
    baselines = {dataset.parent_model_id, dataset.champion_model_id} - {None}
    assert baselines == {
        {"current": "m2", "none": None}.get(requested[role], "m1")
        for role in ("parent", "champion")
    } - {None}
    train, holdout = rows_in(dataset.train_uri), rows_in(dataset.holdout_uri)
    newest_trained = max([row[raw_rows.EVENT_TIME] for row in train], default=START)
    assert holdout
    for row in holdout:
        assert row[raw_rows.EVENT_TIME] > max(
            [newest_trained, *(watermarks[baseline] for baseline in baselines)]
        )
    assert not {row[raw_rows.REQUEST_ID] for row in holdout} & {
        row[raw_rows.REQUEST_ID] for row in train
    }
    # Rows that are used neither for training nor for evaluation are in the window of the next run.
    rows = [row for row in rows_in(*(day.as_uri() for day in sorted(lake.iterdir())))]
    first, last = (
        datetime.fromisoformat(getattr(dataset, f"{end}_event_time")) for end in ("first", "last")
    )
    trained_until = datetime.fromisoformat(dataset.watermark)
    window = [row for row in rows if first <= row[raw_rows.EVENT_TIME] <= last]
    by_identity = {
        (row[raw_rows.REQUEST_ID], row[raw_rows.ROW]): row[raw_rows.EVENT_TIME] for row in window
    }
    left = by_identity.keys() - {
        (row[raw_rows.REQUEST_ID], row[raw_rows.ROW]) for row in train + holdout
    }
    assert len(left) == dataset.num_straddling_rows
    assert all(by_identity[key] > trained_until for key in left)
