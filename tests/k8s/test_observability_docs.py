"""Tests that the pages describe every metric and dashboard."""

import re

from monitoring.web.metrics import RECORD_OUTCOMES
from testing.paths import REPOSITORY
from tests.k8s.grafana import DASHBOARDS
from tests.support import metric_names

TEXT = (REPOSITORY / "docs" / "operate" / "observability.md").read_text()


METRICS = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()


def test_every_metric_of_monitor_is_documented_with_its_labels():
    rows = re.findall(r"^\| `(ctr_monitor_\w+)` \| (.*?) ?\| (.+) \|$", METRICS, re.MULTILINE)
    documented = {
        name: frozenset(re.findall(r"`(\w+)`", labels)) | {"recommender"}
        for name, labels, _ in rows
    }
    assert len(documented) == len(rows)
    assert documented == metric_names.monitor()


def test_outcomes_of_records_are_documented():
    text = METRICS.partition("`ctr_monitor_records_total`\n")[2].partition("\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(RECORD_OUTCOMES)


def test_every_dashboard_is_documented():
    for dashboard in DASHBOARDS.values():
        assert f"| {dashboard['title']} |" in TEXT
