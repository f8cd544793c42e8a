"""Tests that the dashboards use existing metrics and are JSON in Grafana's form.

tests/e2e/test_dashboards_on_prometheus.py sends the queries of all dashboards to a real Prometheus.
"""

import json
import re

import promql_parser as promql
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from pipelines.placement import read_values
from tests.k8s.grafana import DASHBOARDS, PanelQuery, filled, offered, panels, queries
from tests.support import metric_names
from tests.support.rendering import K8S, find
from tests.support.scaler_queries import KEDA, read_queries

UNITS = {"short", "none", "bytes", "s", "µs", "percentunit", "reqps", "cps", "dateTimeFromNow"}
"""Grafana's unit ids in use here, from packages/grafana-data/src/valueFormats/categories.ts."""

every_query = pytest.mark.parametrize("query", list(queries()), ids=str)
every_dashboard = pytest.mark.parametrize("name", sorted(DASHBOARDS))


def parts(expression) -> list:
    """Return the expression and every expression inside it."""
    inner = [
        getattr(expression, name, None)
        for name in ("expr", "lhs", "rhs", "param", "vector_selector")
    ]
    inner += getattr(expression, "args", None) or []
    return [
        expression,
        *(each for part in inner if isinstance(part, promql.Expr) for each in parts(part)),
    ]


def unknown_labels(text: str) -> set[str]:
    """Return the labels of grouping and matching in an expression that the metrics do not have."""
    found = set()
    for part in parts(promql.parse(text)):
        if isinstance(part, promql.AggregateExpr) and part.modifier is not None:
            grouped = part.modifier.labels
        elif (
            isinstance(part, promql.BinaryExpr)
            and part.modifier is not None
            and part.modifier.matching is not None
        ):
            grouped = part.modifier.matching.labels
        else:
            continue
        for inside in parts(part):
            if isinstance(inside, promql.VectorSelector):
                found |= set(grouped) - metric_names.known()[inside.name]
    return found


@every_query
def test_query_is_promql_of_metrics_and_labels_that_are_exported(query: PanelQuery):
    assert metric_names.unexported_names(query.expr) == []
    assert unknown_labels(query.expr) == set()


def test_query_with_wrong_name_label_or_grouping_is_found():
    assert metric_names.unexported_names("ctr_monitor_rolling_auk") == ["ctr_monitor_rolling_auk"]
    assert metric_names.unexported_names('ctr_monitor_rolling_auc{versoin="3"}') == [
        "ctr_monitor_rolling_auc{versoin}"
    ]
    assert unknown_labels("max by (versoin) (ctr_monitor_rolling_auc)") == {"versoin"}
    assert unknown_labels("sum by (versoin) (rate(nv_inference_count[1m]))") == {"versoin"}
    assert unknown_labels("max(up) / on (pot) nv_gpu_utilization") == {"pot"}
    assert unknown_labels("max by (version) (ctr_monitor_rolling_auc)") == set()


def test_every_metric_of_monitor_is_on_dashboard():
    shown = {selector.name for each in queries() for selector in metric_names.selectors(each.expr)}
    assert metric_names.monitor().keys() - shown == set()


@every_dashboard
def test_grafanas_own_types_hold_every_field(name):
    """Annotations are skipped, because their fields belong to the Prometheus data source."""
    dashboard = {**DASHBOARDS[name], "annotations": {}}
    assert json.loads(json.dumps(Dashboard.from_json(dashboard), cls=JSONEncoder)) == dashboard


def test_queue_panels_show_metric_of_autoscaler_by_pod():
    expected = {
        name: query.replace("sum(", "sum by (pod) (") for name, query in read_queries(KEDA).items()
    }
    drawn = {
        panel["title"]: filled(panel["targets"][0]["expr"])
        for panel in panels(DASHBOARDS["serving"])
    }
    assert drawn["Queue time per request"] == expected["triton_queue_microseconds_per_request"]
    assert drawn["Pending requests"] == expected["triton_pending_requests"]


@every_dashboard
def test_every_panel_has_description_unit_and_chosen_data_source(name):
    for panel in panels(DASHBOARDS[name]):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == sorted(set(letters))


@every_dashboard
def test_every_variable_is_defined_before_use_and_offers_existing_label(name):
    dashboard = DASHBOARDS[name]
    defined = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert defined[:2] == ["datasource", "namespace"]
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard)))
    assert {each for each in used if not each.startswith("__")} == set(defined)
    assert {panel["repeat"] for panel in panels(dashboard) if "repeat" in panel} <= set(defined)
    for _, series, label in offered(dashboard):
        assert metric_names.unexported_names(series) == []
        (selector,) = metric_names.selectors(series)
        assert label in metric_names.known()[selector.name]


def test_grafanas_sidecar_finds_each_dashboard_in_config_map(manifests, overlay):
    """Only the runbook's address is absent from the file, because the overlay determines it."""
    runbook = read_values(K8S / "overlays" / overlay / "cluster.env")["RUNBOOK_URL"]
    for name, dashboard in DASHBOARDS.items():
        config_map = find(manifests, "ConfigMap", f"evergreen-dashboard-{name}")
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert config_map["metadata"]["annotations"]["grafana_folder"] == "Evergreen"
        ((key, text),) = config_map["data"].items()
        sent = json.loads(text)
        assert key == f"{name}.json"
        assert sent["links"][0]["url"] == runbook
        sent["links"][0]["url"] = dashboard["links"][0]["url"]
        assert sent == dashboard
