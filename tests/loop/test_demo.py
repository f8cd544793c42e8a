"""Tests that one complete run of the demo keeps all the demo's promises."""

import hashlib
import json
import re

from cli import status
from cli.runs import describe_run, read_runs
from evergreen.registry.promotion_journal import INTENT, current, read_entries
from evergreen.registry.runs import read_outcomes
from tests.support.browser import DARK, cut_texts, needs_browser, pixels_too_wide, serious_findings


def test_demo_loop_fulfils_every_promise(turned):
    _, ended, summary = turned
    assert summary["requests"]["failed"] == 0
    assert summary["requests"]["sent"] > 0
    assert summary["records"]["archived"] == summary["records"]["published"] > 0
    assert summary["serving_parity_max_abs_diff"] <= 1e-5
    assert summary["trigger"]["runs"] == 1
    auc = summary["auc"]
    regained = (auc["recovered"] - auc["trough"]) / (auc["baseline"] - auc["trough"])
    assert regained >= 0.7
    assert [run["state"] for run in summary["runs"]] == ["released", "released"]
    assert [version["version"] for version in summary["versions"]] == [1, 2]
    assert summary["versions"][1]["parent"] == summary["versions"][0]["model_id"]
    assert summary["uncertain"] == []
    drift = summary["feature_drift"]
    assert (
        set(list(drift["columns"])[:2])
        == set(summary["drift"]["new_category_columns"])
        == {"C2", "C14"}
    )
    assert summary["policies"]["data_drift"] is not None
    assert ended.left == {}
    assert re.search(r"status page: http://127\.0\.0\.1:\d+/", ended.output)
    assert (
        auc["at_detection"]
        < auc["threshold"]
        < auc["baseline"]
        < summary["bayes_auc"]["before"] + 0.02
    )


def test_status_of_finished_demo_is_one_screen(turned, capsys, monkeypatch):
    folder, _, summary = turned
    monkeypatch.setenv("COLUMNS", "80")
    assert status.main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert status.main([str(folder), "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    live = current(folder / "store")
    assert (known["live"]["version"], known["live"]["since"]) == (live.version, live.time)
    auc = known["auc"]
    assert auc["is_of_production"]
    assert auc["limit"] < auc["low"] <= auc["auc"] <= auc["high"]
    assert known["last_run"]["run"] == read_runs(folder / "store")[-1].run
    assert known["next_run"]["not_before"] > known["last_run"]["started_at"]
    assert known["monitor"] == "stopped"
    assert any("evergreen open" in each for each in known["needs_person"])


def test_every_run_is_listed_with_its_rows_its_model_and_gate_decision(turned):
    folder, _, summary = turned
    first, second = read_runs(folder / "store")
    assert [(line.state, line.version, line.verdict) for line in (first, second)] == [
        ("released", 1, "pass"),
        ("released", 2, "pass"),
    ]
    made = summary["versions"][1]
    names = {first.run, second.run}
    assert first.run == "first"
    assert second.run.startswith("drift-")
    for subfolder in ("work", "artifacts", "logs/runs"):
        assert {path.name for path in (folder / subfolder).iterdir()} == names, (
            "all folders must use the same names of runs"
        )
    assert {
        entry.trigger_id for entry in read_entries(folder / "store") if entry.action == "release"
    } == names
    assert (second.model_id, second.rows) == (made["model_id"], made["trained_rows"])
    assert second.settings["release"]["rollout"] == "full"
    described = describe_run(folder / "store", read_outcomes(folder / "store")[1])
    assert (
        f"model {second.model_id}, auc {second.auc:.4f} on held-out rows, verdict pass" in described
    )
    assert "report of validation: file://" in described


def test_release_under_traffic_failed_no_request_and_its_p99_is_reported(turned):
    _, _, summary = turned
    release = summary["release"]
    assert (release["version"], release["during"]["requests_failed"]) == (2, 0)
    assert release["during"]["requests_sent"] > 0
    assert min(release["p99_ms_before"], release["during"]["p99_ms"], release["p99_ms_after"]) > 0


def test_bad_release_under_traffic_rolled_back_by_itself_without_failures(turned):
    folder, _, summary = turned
    bad = summary["bad_release"]
    assert (bad["made"]["version"], bad["rolled_back"]["version"]) == (3, 2)
    assert (
        bad["made"]["started_at"]
        < bad["rolled_back"]["started_at"]
        < bad["rolled_back"]["answered_at"]
    )
    assert bad["during"]["requests_failed"] == 0
    lived = [
        (entry.action, entry.version)
        for entry in read_entries(folder / "store")
        if entry.action != INTENT
    ]
    assert lived == [("release", 1), ("release", 2), ("baked", 2), ("promote", 3), ("rollback", 2)]
    sentences = [
        event["kind"]
        for event in map(json.loads, (folder / "monitor" / "events.jsonl").read_text().splitlines())
    ]
    assert (sentences.count("bad_release"), sentences.count("rolled_back")) == (1, 1)


def test_every_archived_score_was_recomputed_and_equals_served_score(turned):
    _, _, summary = turned
    assert [found["version"] for found in summary["verified"]] == [1, 2, 3]
    assert all(found["same"] and found["max_abs_diff"] <= 1e-6 for found in summary["verified"])
    assert sum(found["num_rows"] for found in summary["verified"]) == summary["records"]["archived"]


def test_every_decision_was_repeated_from_lake_and_equals_recorded_one(turned):
    folder, ended, summary = turned
    written = (folder / "monitor" / "decisions.jsonl").read_bytes()
    found = summary["decisions"]
    assert found["points"] == len(written.splitlines()) > 20
    assert f"{found['points']} decisions were replayed from the lake, " in ended.output
    # If the machine stalls for seconds, a record may arrive after its decision point. Rows of
    # the late record are in the lake, but the decision did not use them.
    if not (found["late_requests"] or found["late_rows"]):
        assert found["equal"]
        assert found["digest"] == hashlib.sha256(written).hexdigest()


def test_every_policy_is_sure_only_after_change_and_requests_one_run(turned):
    _, _, summary = turned
    assert list(summary["policies"]) == ["sequential", "data_drift", "baking"]
    assert re.match(r"evidence .* that the auc is below", summary["trigger"]["reason"])
    assert all(seconds is None or seconds > 0 for seconds in summary["policies"].values())


def test_report_needs_no_network(turned):
    folder, _, _ = turned
    page = (folder / "report.html").read_text()
    assert "newer ones" in page
    assert "rolled back" in page
    assert "logged scores recomputed offline" in page
    assert "decisions were replayed from the lake, " in page
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page) == []
    assert re.findall(r"<(?:script|link|img|iframe)\b", page) == []


@needs_browser
def test_report_fits_every_screen_and_is_accessible(turned, tmp_path):
    page = (turned[0] / "report.html").read_text()
    assert pixels_too_wide(tmp_path, page, 390, 480, 1280, 1920) == [0, 0, 0, 0]
    assert cut_texts(tmp_path, page, 390, 480, 1280, 1920) == [[], [], [], []]
    assert serious_findings(tmp_path, page) == []
    assert serious_findings(tmp_path, page, DARK) == []


def test_screen_shows_transitions_and_no_library_noise(turned):
    _, ended, _ = turned
    lines = ended.output.splitlines()
    assert len(lines) < 60
    assert any(re.search(r"training of each run: \d+\.\d s, \d+\.\d s$", line) for line in lines)
    assert all(re.match(r" *\d+\.\d s  ", line) for line in lines), ended.output
