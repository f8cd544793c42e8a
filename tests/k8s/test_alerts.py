"""Tests of every alert with promtool: it fires on time, is silent below its threshold, and ends.

The test cases are in alert_cases.yaml. The rules come from the manifest. promtool's input and
output are in build/promtool/.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.paths import REPOSITORY
from tests.support.alerts import ALERTS, RECORDED, RULES, SPEC
from tests.support.metric_names import (
    FAILURE_REASONS,
    QUANTILES,
    Labels,
    known,
    selectors,
    unexported_names,
)

RUNBOOKS = sorted((REPOSITORY / "docs" / "operate" / "alerts").glob("*.md"))
BUILD = REPOSITORY / "build" / "promtool"
# Read all values as text, because YAML would read `0x30` (promtool's notation for thirty zeros) as
# the number 48.
CASES = yaml.load((Path(__file__).parent / "alert_cases.yaml").read_text(), Loader=yaml.BaseLoader)  # noqa: S506
DEFAULTS = {
    "ctr_monitor_": {"namespace": "evergreen", "pod": "monitor-0", "recommender": "click_model"},
    "nv_": {"namespace": "evergreen", "pod": "triton-0", "model": "click_model", "version": "1"},
    "kube_deployment_": {"namespace": "evergreen", "deployment": "triton"},
    "kube_horizontalpodautoscaler_": {
        "namespace": "evergreen",
        "horizontalpodautoscaler": "triton",
    },
}
SERIES = re.compile(r"(?P<name>\w+)(\{(?P<labels>.*)\})?")


def with_defaults(series: str) -> tuple[str, dict[str, str]]:
    """Return the name and the labels of the series in a test case."""
    found = SERIES.fullmatch(series)
    (default,) = [labels for prefix, labels in DEFAULTS.items() if found["name"].startswith(prefix)]
    return found["name"], {**default, **dict(re.findall(r'(\w+)="([^"]*)"', found["labels"] or ""))}


def promtool_test(case: dict[str, Any]) -> dict[str, Any]:
    """Return the case in promtool's form."""
    rule = ALERTS[case["alert"]]
    expected = [
        {"eval_time": time, "alertname": case["alert"], "exp_alerts": []}
        for time in case.get("silent", ())
    ]
    for time, description in case.get("fires", {}).items():
        alert = {
            "exp_labels": {"severity": rule["labels"]["severity"], **case["labels"]},
            "exp_annotations": {**rule["annotations"], "description": description},
        }
        expected.append({"eval_time": time, "alertname": case["alert"], "exp_alerts": [alert]})
    series = []
    for each, values in case["series"].items():
        name, labels = with_defaults(each)
        text = ",".join(f'{label}="{value}"' for label, value in labels.items())
        series.append({"series": f"{name}{{{text}}}", "values": values})
    return {
        "interval": "1m",
        "name": case["case"],
        "input_series": series,
        "alert_rule_test": expected,
    }


def rules_for(alert: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recording rules that the alert uses, and then the alert."""
    needed: list[dict[str, Any]] = []
    for selector in selectors(alert["expr"]):
        if selector.name in RECORDED:
            needed += rules_for({"record": selector.name, "expr": RECORDED[selector.name]})
    return [*(rule for number, rule in enumerate(needed) if rule not in needed[:number]), alert]


def run_promtool(folder: Path, alerts: list[dict[str, Any]]) -> dict[str, str]:
    """Return promtool's complaints by alert.

    For each alert, a file of rules and a file of tests are written to `folder`.
    """
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: alert rules cannot be run")
    folder.mkdir(parents=True, exist_ok=True)
    complaints = {}
    for alert in alerts:
        name = alert["alert"]
        rules = {"groups": [{"name": "evergreen", "rules": rules_for(alert)}]}
        (folder / f"{name}.rules.yaml").write_text(
            yaml.safe_dump(rules, sort_keys=False, width=1000)
        )
        tests = {
            "rule_files": [f"{name}.rules.yaml"],
            "evaluation_interval": "30s",
            "tests": [promtool_test(case) for case in CASES if case["alert"] == name],
        }
        (folder / f"{name}.test.yaml").write_text(
            yaml.safe_dump(tests, sort_keys=False, width=1000)
        )
        command = ["promtool", "test", "rules", f"{name}.test.yaml"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        (folder / f"{name}.output.txt").write_text(done.stdout + done.stderr)
        if done.returncode:
            complaints[name] = done.stdout + done.stderr
    return complaints


def test_promtool_accepts_rules():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: alert rules cannot be checked")
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "rules.yaml").write_text(yaml.safe_dump(SPEC, sort_keys=False, width=1000))
    command = ["promtool", "check", "rules", "--lint-fatal", str(BUILD / "rules.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_alerts_fire_and_end_as_in_their_cases():
    complaints = run_promtool(BUILD, list(ALERTS.values()))
    assert not complaints, "\n".join(complaints.values())


@pytest.mark.parametrize(
    "change",
    [
        {"expr": "vector(0) > 1"},
        pytest.param({"for": "5h"}, marks=pytest.mark.slow),
        pytest.param({"expr": "vector(1)", "for": "0s"}, marks=pytest.mark.slow),
    ],
)
def test_cases_detect_silenced_late_or_permanent_alerts(change, tmp_path):
    """Tests the harness: a silenced, delayed or permanent alert makes one of its cases fail."""
    complaints = run_promtool(tmp_path, [{**rule, **change} for rule in ALERTS.values()])
    assert complaints.keys() == ALERTS.keys()


def test_every_alert_has_case_that_fires_and_ends_and_one_that_is_silent():
    for name in ALERTS:
        cases = [case for case in CASES if case["alert"] == name]
        assert any(case.get("fires") for case in cases), f"{name} never fires"
        assert any(case.get("silent") for case in cases), f"{name} is never silent"
    assert {case["alert"] for case in CASES} <= ALERTS.keys()


def test_cases_use_series_that_exist():
    names = known()
    for case in CASES:
        for series in case["series"]:
            name, labels = with_defaults(series)
            assert name in names, f"{case['alert']}: no program exports {name}"
            assert labels.keys() <= names[name], (
                f"{case['alert']}: {name} has no labels {labels.keys() - names[name]}"
            )


def labels_of_record(name: str) -> Labels:
    """Return the labels of a recorded series.

    By convention, the name of a recording rule starts with its labels.
    """
    return frozenset(name.split(":")[0].split("_"))


def test_expressions_use_only_exported_metrics():
    recorded = {name: labels_of_record(name) for name in RECORDED}
    for rule in RULES:
        found = unexported_names(rule["expr"], recorded)
        assert not found, (
            f"{rule.get('alert', rule.get('record'))} uses {found}, which no program exports"
        )


def test_queried_label_values_exist():
    from evergreen.registry import promotion_journal
    from monitoring.policies.policies import POLICIES
    from monitoring.policies.policy import Action
    from monitoring.web.metrics import RECORD_OUTCOMES

    allowed = {
        "action": {*(action.value for action in Action), *promotion_journal.ACTIONS},
        "policy": set(POLICIES),
        "outcome": {*RECORD_OUTCOMES, "delivered", "dropped"},
        "reason": FAILURE_REASONS,
        "quantile": QUANTILES,
        "model": {".+_candidate"},
        "recommender": {""},
        "condition": {"ScalingActive", "AbleToScale", "ScalingLimited"},
        "status": {"true", "false", "unknown"},
        "namespace": {"evergreen"},
        "pod": {"archivers-.*"},
        "deployment": {"triton", "release-controller(-.+)?"},
        "horizontalpodautoscaler": {"triton"},
    }
    for rule in RULES:
        for selector in selectors(rule["expr"]):
            for matcher in selector.matchers.matchers:
                assert set(matcher.value.split("|")) <= allowed[matcher.name], (
                    f"{rule.get('alert')}: {matcher.value}"
                )


@pytest.mark.parametrize("name", ALERTS)
def test_alert_states_severity_what_happened_and_where_its_runbook_is(name):
    rule = ALERTS[name]
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert "{{" not in rule["annotations"]["summary"], (
        "a summary must contain no numbers, which belong in the description"
    )
    address, _, page = rule["annotations"]["runbook_url"].partition("/docs/operate/")
    (found,) = [path.name for path in RUNBOOKS if f"## {name}\n" in path.read_text()]
    assert address.startswith("https://")
    assert page == f"alerts/{found}#{name.lower()}"


def test_every_alert_has_section_of_runbook_and_every_section_its_alert():
    text = "".join(path.read_text() for path in RUNBOOKS)
    sections = re.findall(r"^## (Evergreen\w+)$", text, flags=re.M)
    assert sorted(sections) == sorted(ALERTS)
