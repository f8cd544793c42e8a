"""docs/observability.md says of each metric and dashboard what there is."""

from __future__ import annotations

import re

from monitoring.showing.metrics import RECORD_OUTCOMES
from tests.k8s.grafana import DASHBOARDS, queries
from tests.support import metric_names
from tests.support.paths import REPOSITORY

TEXT = (REPOSITORY / "docs" / "observability.md").read_text()


def section(heading: str) -> str:
    return TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_every_metric_of_the_monitor_is_told_with_its_labels():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.+) \|$", section("The monitor's metrics"), re.MULTILINE)
    told = {f"ctr_monitor_{name}": frozenset(re.findall(r"`(\w+)`", labels)) for name, labels, _ in rows}
    assert len(told) == len(rows)
    assert told == metric_names.monitor()


def test_the_outcomes_of_records_are_told():
    (sentence,) = re.findall(r"Values of `outcome` of `records_total`: (.+?)\. ", TEXT, re.DOTALL)
    assert re.findall(r"`(\w+)`", sentence) == list(RECORD_OUTCOMES)


def test_every_metric_of_others_on_a_dashboard_is_told():
    text = section("Triton's metrics in use") + section("Install")
    told = {metric for written in re.findall(r"`([^`]+)`", text) for metric in spelt_out(written)}
    asked = {selector.name for each in queries() for selector in metric_names.selectors(each.expr)}
    assert asked - metric_names.monitor().keys() <= told


def test_every_dashboard_is_told():
    for dashboard in DASHBOARDS.values():
        assert f"| {dashboard['title']} |" in TEXT


def spelt_out(written: str) -> set[str]:
    """`a_{b,c}_d` as `a_b_d` and `a_c_d`; a label in braces at the end is dropped."""
    written = re.sub(r"\s", "", written)
    braces = re.search(r"\{([^{}]+)\}", written)
    if braces is None:
        return {written}
    if "," not in braces[1]:
        return {written.replace(braces[0], "")}
    return {written.replace(braces[0], each) for each in braces[1].split(",")}
