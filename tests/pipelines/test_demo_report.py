"""The demo's page says what happened once, and does not drown it in what always happens."""

from __future__ import annotations

from pipelines.local.report import fold_repeated


def event(second, kind, text):
    return {"time": float(second), "kind": kind, "text": text}


def test_events_of_one_kind_in_a_row_are_one_line_with_their_number_and_span():
    drifts = [event(10 + 2 * i, "drift", f"2 of 40 columns drifted over {3968 + i} rows") for i in range(40)]
    events = [event(0, "started", "0 rows"), *drifts[:30], event(70.5, "decision", "auc fell"), *drifts[30:]]
    folded = fold_repeated(events, start=0.0)
    assert [(when, kind) for when, kind, _ in folded] == [
        ("0.0 s", "started"), ("10.0 to 68.0 s", "drift, 30 times"), ("70.5 s", "decision"),
        ("70.0 to 88.0 s", "drift, 10 times"),
    ]  # fmt: skip
    assert folded[1][2] == "2 of 40 columns drifted over 3968 rows"


def test_drift_between_other_events_is_one_line_too():
    """Files are archived all the while: forty equal lines of drift would hide the eight events that matter."""
    events = []
    for i in range(40):
        events += [event(10 + 2 * i, "drift", "2 of 40 columns drifted"), event(11 + 2 * i, "archived", f"{i} rows")]
    folded = fold_repeated([*events, event(99, "run_started", "run a started")], start=0.0)
    assert [kind for _, kind, _ in folded] == ["drift, 40 times", "archived, 40 times", "run started"]
