"""Tests that docs/observability.md describes every metric and dashboard."""

import re

from monitoring.web.metrics import RECORD_OUTCOMES
from tests.k8s.grafana import DASHBOARDS
from tests.support import metric_names
from tests.support.paths import REPOSITORY

TEXT = (REPOSITORY / "docs" / "observability.md").read_text()


def section(heading: str) -> str:
    return TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_every_metric_of_monitor_is_documented_with_its_labels():
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) ?\| (.+) \|$", section("The monitor's metrics"), re.MULTILINE
    )
    documented = {
        f"ctr_monitor_{name}": frozenset(re.findall(r"`(\w+)`", labels)) | {"recommender"}
        for name, labels, _ in rows
    }
    assert len(documented) == len(rows)
    assert documented == metric_names.monitor()


def test_outcomes_of_records_are_documented():
    (sentence,) = re.findall(r"Values of `outcome` of `records_total`: (.+?)\. ", TEXT, re.DOTALL)
    assert re.findall(r"`(\w+)`", sentence) == list(RECORD_OUTCOMES)


def test_every_dashboard_is_documented():
    for dashboard in DASHBOARDS.values():
        assert f"| {dashboard['title']} |" in TEXT
