"""Tests of the text of the status page. `test_page_in_browser` tests the layout of the page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from evergreen.registry import promotion_journal
from monitoring.policies.policy import Action, Decision
from monitoring.retraining.actions import ActionStatus
from monitoring.web.exposition import Exposition, Snapshot
from monitoring.web.page import MAX_POINTS, History, read_history, status_page, tail
from tests.support.html_pages import health_of, table_of
from tests.support.snapshots import DECISION, EMPTY, EVENTS, FULL, LAST_RUN, NOW, POINTS


class Text(HTMLParser):
    """The text of each element with a tested class or id, and every tag and address."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.addresses, self.words = [], [], []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action")]

    def handle_data(self, data):
        self.words.append(data)


def page(snapshot: Snapshot, history: History | None = None) -> Text:
    exposition = Exposition()
    exposition.show(replace(snapshot, time=NOW))
    return Text(status_page(exposition, history or History([], []), now=NOW))


def test_page_has_everything_that_on_call_needs():
    shown = page(
        replace(FULL, last_record_time=NOW - 3, counters={"dead_letter": 4}),
        History(POINTS, EVENTS),
    )
    for expected in (
        "A drift of version 3 is suspected (policy threshold).",
        "0.750 (0.700 .. 0.800)",
        "threshold 0.740",
        "trigger",
        "release",
        "rollback",
        "1 of 3 columns drifted in the 5,000 predictions",
        "dead letters 4",
        "auc 0.6 < 0.7",
        "3 min ago",
    ):
        assert expected in shown.text, expected


def test_page_is_self_contained():
    shown = page(FULL, History(POINTS, EVENTS))
    shown_versions = {
        FULL.store_status.promotions.live_version,
        *(kpis.version for kpis in FULL.windows),
    }
    cards = {f"/models/{version}" for version in shown_versions}
    assert {address for address in shown.addresses if not address.startswith("#")} == cards
    assert not {"script", "img", "link", "iframe", "object"} & set(shown.tags)


def test_number_that_does_not_exist_is_called_undefined():
    shown = page(Snapshot(windows=(EMPTY,), serving_version=4))
    assert "AUC, 95 % undefined" in shown.text
    assert "log lag unknown" in shown.text
    assert "No window has an AUC yet" in shown.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "no prediction has arrived yet", id="idle"),
        pytest.param(
            {"log_problem": "stream ended"},
            "Not ready: the log cannot deliver: stream ended",
            id="dead",
        ),
    ],
)
def test_idle_log_and_dead_log_are_distinguished(changes, expected):
    assert expected in page(Snapshot(**changes)).text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "Working; the newest prediction is 3 s old. Version 3 was evaluated on rows up to"),
        (
            {"actions": ["ok", "rollback", "retrain"]},
            "Version 3 is bad and must be rolled back (policy two).",
        ),
        (
            {"actions": ["breach", "held"]},
            "Drift of version 3 for 2 min (policy two). What is being done: running.",
        ),
        (
            {"actions": ["undecidable", "breach"]},
            "A drift of version 3 is suspected for 2 min (policy two).",
        ),
        ({"run": "failed"}, "The last run failed 3 min ago at deployment: passed"),
    ],
    ids=["well", "bad release", "drift", "suspicion", "failed run"],
)
def test_banner_states_worst_first_since_when_and_what_is_being_done(changes, expected):
    names = ("one", "two", "three")
    banners = [
        replace(DECISION, policy=name, action=Action(action), reason=f"why {name}")
        for name, action in zip(names, changes.get("actions", ["ok"]))
    ]
    acting = replace(FULL.actions, incident_since=NOW - 120)
    last = replace(LAST_RUN, state=changes.get("run", "released"), ended_at=NOW - 180)
    status = replace(FULL.store_status, runs=replace(FULL.store_status.runs, last_run=last))
    snapshot = replace(
        FULL,
        last_record_time=NOW - 3,
        decisions=tuple(banners),
        actions=acting,
        store_status=status,
    )
    assert expected in page(snapshot).text


def banner(**changes) -> tuple[str, str]:
    """Return the state and the text of the status page's banner while version 5 serves."""
    exposition = Exposition()
    snapshot = Snapshot(
        time=NOW, serving_version=5, last_record_time=NOW - 3, decided_at=NOW - 1800
    )
    exposition.show(replace(snapshot, **changes))
    return health_of(status_page(exposition, History([], []), now=NOW))


def about(version, action="ok", *, policy="sequential", window=None):
    numbers = {"version": version, "window_version": window, "threshold": None}
    return Decision(policy=policy, action=Action(action), reason=f"why {policy}", numbers=numbers)


def test_banner_is_green_only_if_rows_of_serving_lineage_were_evaluated():
    state, text = banner(decisions=(about(5, window=5), about(5, "undecidable", policy="baking")))
    expected = "Version 5 was evaluated on rows up to 1970-01-01 02:16:40 UTC, 30 min ago."
    assert (state, expected in text) == ("good", True)
    state, text = banner(decisions=(about(5, window=3),))
    assert state == "good"
    assert "No row of version 5 has matured yet; rows up to" in text
    assert text.endswith("were evaluated, the newest of version 3.")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decided_at": None}, "Nothing has been evaluated yet: no label is final."),
        (
            {"decisions": (about(4, window=4),)},
            "Version 5 has not been evaluated yet; the last decision, on rows up",
        ),
        (
            {"decisions": (about(5, "undecidable"),)},
            "Version 5 could not be evaluated on rows up to",
        ),
        (
            {"decisions": (about(5, "undecidable"), about(5, policy="schedule"))},
            "Version 5 could not be evaluated on rows up to",
        ),
        (
            {"decisions": (about(5, "undecidable"), about(5, policy="baking"))},
            "Version 5 could not be evaluated",
        ),
    ],
    ids=["nothing", "another version", "undecidable", "the calendar alone", "baked once"],
)
def test_banner_is_grey_where_nothing_was_evaluated(changes, expected):
    state, text = banner(**changes)
    assert state == "wait"
    assert text.startswith("Working; the newest prediction is 3 s old.")
    assert expected in text


def test_tile_names_predecessor_of_auc_while_serving_version_has_none():
    shown = page(replace(FULL, serving_version=5, decisions=(about(5, window=3),))).text
    assert "AUC, 95 % of version 3 0.750 (0.700 .. 0.800)" in shown
    assert (
        "AUC, 95 % undefined" in page(replace(FULL, serving_version=5, decisions=(about(5),))).text
    )


def promotion(**changes):
    fields = {
        "time": "1970-01-01T02:00:00Z",
        "action": "release",
        "version": 3,
        "previous_version": 2,
    }
    fields |= {
        "model_id": "m",
        "model_uri": "file:///m",
        "release_uri": "file:///r",
        "trigger_id": None,
    }
    return promotion_journal.Promotion(**{**fields, "reason": "passed", **changes})


def test_history_joins_monitor_files_and_registry_promotions_by_time(tmp_path):
    state, store = tmp_path / "state", tmp_path / "store"
    state.mkdir()
    store.mkdir()
    (state / "events.jsonl").write_text(
        json.dumps({"time": 7300.0, "kind": "decision", "text": "drift"}) + '\n{"torn'
    )
    promotion_journal.append_promotion(store, promotion())
    promotion_journal.append_promotion(
        store, promotion(time="1970-01-01T02:10:00Z", action="rollback", version=2)
    )
    events = read_history(state, store).events
    assert [(event["time"], event["kind"]) for event in events] == [
        (7200.0, "release"),
        (7300.0, "decision"),
        (7800.0, "rollback"),
    ]


def test_long_timeline_is_downsampled_and_keeps_its_newest_point(tmp_path):
    lines = [json.dumps({"time": float(i), "version": i % 2, "auc": None}) for i in range(5000)]
    (tmp_path / "timeline.jsonl").write_text("\n".join(lines) + "\n")
    points = read_history(tmp_path, tmp_path).points
    assert points[-2:] == [
        {"time": 4998.0, "version": 0, "auc": None},
        {"time": 4999.0, "version": 1, "auc": None},
    ]
    assert len(points) <= 2 * MAX_POINTS


def test_only_end_of_large_file_is_read_from_complete_line_on(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(100)))
    found = tail(path, num_bytes=25)
    assert found == [{"n": 98}, {"n": 99}]
    assert tail(tmp_path / "absent.jsonl") == []


def test_series_of_one_kind_is_one_line_and_one_marker():
    drifts = [
        {"time": NOW - 100 + 2 * i, "kind": "drift", "text": f"bucket {i}"} for i in range(20)
    ]
    shown = page(FULL, History(POINTS, drifts))
    assert "20 × drift 02:45:38 62 s ago drift, 20 in a row bucket 19" in shown.text
    assert shown.text.count("1 feature drift") == 2, (
        "the text must be beside its line, and below the chart for narrow panes"
    )
    assert "2 feature drift" not in shown.text


def test_different_events_of_one_kind_are_lines_of_their_own():
    texts = (
        "C2 0.03, C14 0.02 of version 2",
        "C14 0.05, C2 0.04 of version 2",
        "C2 0.1 of version 2",
        "C2 0.1 of version 1",
    )
    drifts = [{"time": NOW - i, "kind": "drift", "text": text} for i, text in enumerate(texts)]
    shown = page(FULL, History([], drifts[::-1])).text
    assert (shown.count("in a row"), shown.count("drift, 2 in a row C2 0.03")) == (1, 1)
    assert all(text in shown for text in (texts[0], *texts[2:]))


def test_unknown_facts_about_actions_are_omitted():
    shown = page(Snapshot(actions=ActionStatus(budget_left=3, daily_budget=4)))
    assert "budget left today 3 of 4 requests" in shown.text
    assert "drifted since" not in shown.text
    assert "messages waiting" not in shown.text.partition("Retraining")[2]


def drawn(snapshot: Snapshot, events=()) -> str:
    exposition = Exposition()
    exposition.show(replace(snapshot, time=NOW))
    return status_page(exposition, History([], list(events)), now=NOW)


def test_decision_is_table_of_its_checks():
    numbers = {**DECISION.numbers, "auc": 0.61234, "auc_low": 0.6, "auc_high": 0.625}
    columns = {"drifted_columns": 1, "compared_columns": 11, "threshold": None, "auc": 0.6}
    decisions = (
        replace(DECISION, numbers=numbers),
        replace(DECISION, policy="data_drift", action=Action.OK, reason="calm", numbers=columns),
        replace(
            DECISION, policy="schedule", action=Action.OK, reason="young", numbers={"auc": 0.6}
        ),
    )
    assert table_of(drawn(replace(FULL, decisions=decisions)), "What the policies decided")[1:] == [
        ["threshold", "0.6123 0.6 to 0.625", "AUC at least 0.740", "breach"],
        ["auc 0.6 < 0.7."],
        ["data_drift", "1 of 11 columns", "–", "ok"],
        ["schedule", "–", "–", "ok"],
    ]


def test_reason_of_decision_is_on_page_once():
    shown = drawn(replace(FULL, decisions=(replace(DECISION, reason="a reason of its own"),)))
    assert shown.count("a reason of its own") == 1


def test_archived_files_and_drift_are_folded_and_decisions_are_not():
    kinds = ["archived", "drift", "decision", "drift"]
    events = [
        {"time": NOW - 10 + i, "kind": kind, "text": f"{kind} of version {i}"}
        for i, kind in enumerate(kinds)
    ]
    section = drawn(FULL, events).partition('id="events"')[2]
    folded = re.findall(r'<details class="routine">(.*?)</details>\n</details>', section, re.DOTALL)
    assert [re.findall(r"of version (\d)", each) for each in folded] == [["3", "1", "0"]]
    assert re.findall(r"<time>(.*?)</time>", section) == [
        "02:46:33",
        "02:46:31",
        "02:46:30",
        "02:46:32",
    ]
    assert section.count("1970-01-01 <small>") == 1
