"""Tests that Prometheus scrapes the pods often enough, with the required labels."""

import re

import pytest
import yaml

from tests.support.rendering import K8S, find
from tests.support.scaler_queries import KEDA, read_queries

NAMES = ("triton", "monitor")
every_monitor = pytest.mark.parametrize("name", NAMES)
SECONDS = {"s": 1, "m": 60, "h": 3600}


def seconds(duration: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([smh])", duration).groups()
    return int(number) * SECONDS[unit]


def endpoint(manifests, name):
    (found,) = find(manifests, "PodMonitor", name)["spec"]["podMetricsEndpoints"]
    return found


@every_monitor
def test_pod_monitor_selects_pods_of_one_deployment_and_one_of_their_ports(manifests, name):
    monitor = find(manifests, "PodMonitor", name)
    labels = monitor["spec"]["selector"]["matchLabels"]
    deployments = [m for m in manifests if m["kind"] == "Deployment"]
    selected = [
        d
        for d in deployments
        if labels.items() <= d["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert [d["metadata"]["name"] for d in selected] == [name]
    assert monitor["metadata"]["namespace"] == selected[0]["metadata"]["namespace"]
    containers = selected[0]["spec"]["template"]["spec"]["containers"]
    ports = [port["name"] for container in containers for port in container.get("ports", ())]
    scraped = endpoint(manifests, name)
    assert ports.count(scraped["port"]) == 1
    # The operator rejects an object with a longer timeout than interval. The operator sets the
    # labels `namespace` and `pod` by itself.
    assert seconds(scraped["scrapeTimeout"]) <= seconds(scraped["interval"])
    assert not {"relabelings", "metricRelabelings", "honorLabels"} & scraped.keys()


@every_monitor
def test_job_names_are_workloads(manifests, name):
    """Alerts on the metric `up` use the label `job`."""
    monitor = find(manifests, "PodMonitor", name)
    label = monitor["spec"]["jobLabel"]
    assert (
        find(manifests, "Deployment", name)["spec"]["template"]["metadata"]["labels"][label] == name
    )


def test_autoscalers_window_holds_four_scrapes(manifests):
    interval = seconds(endpoint(manifests, "triton")["interval"])
    windows = {
        seconds(each)
        for query in read_queries(KEDA).values()
        for each in re.findall(r"\[(\w+)\]", query)
    }
    assert windows
    assert 4 * interval <= min(windows)


def test_prometheus_of_operator_selects_every_own_object_by_its_release(manifests):
    """kube-prometheus-stack selects by its release's name, as our documentation states."""
    ours = [m for m in manifests if m["kind"] in ("PodMonitor", "PrometheusRule")]
    (release,) = {m["metadata"]["labels"]["release"] for m in ours}
    text = (K8S.parent / "docs" / "operate" / "observability.md").read_text()
    assert f"helm upgrade --install {release} " in text
    values = yaml.safe_load((K8S / "components" / "observability" / "values.yaml").read_text())
    assert values["prometheus"]["prometheusSpec"]["podMonitorSelectorNilUsesHelmValues"] is False
