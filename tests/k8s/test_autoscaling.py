"""What decides the number of replicas fits together: target, metrics, bounds and pace, in both ways of serving them."""

from __future__ import annotations

import pytest
import yaml

from k8s.scaling.manifests import read_autoscaler
from tests.k8s.crds import validate_crd
from tests.support.adapter_queries import ADAPTER, read_queries
from tests.support.rendering import K8S, OVERLAYS, find, render_variant
from tests.support.yaml_texts import documents

KEDA = K8S / "components/keda"
AUTOSCALER, SCALED_OBJECT = K8S / "base/triton/autoscaler.yaml", KEDA / "scaled-object.yaml"
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
SLOWEST_START_SECONDS = 300
"""A GPU node, its image and the model: what is taken away is back no sooner (docs/autoscaling.md)."""


def scalers_of(manifests, target="triton"):
    return [m for m in manifests if m["kind"] in SCALERS and m["spec"]["scaleTargetRef"]["name"] == target]


def test_the_hpa_asks_for_the_metrics_that_the_adapter_publishes_per_pod(manifests):
    [scaler] = scalers_of(manifests)
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    published = yaml.safe_load(find(manifests, "ConfigMap", "triton-adapter-rules")["data"]["config.yaml"])["rules"]
    assert {rule["name"]["as"] for rule in published} == asked
    for rule in published:
        # How the adapter knows which of the API's objects a series belongs to.
        assert rule["resources"]["overrides"] == {name: {"resource": name} for name in ("namespace", "pod")}
        assert rule["seriesQuery"].endswith('{namespace!="",pod!=""}')


def test_the_adapter_is_told_of_the_config_map_that_is_sent(rendered):
    values = yaml.safe_load((ADAPTER / "values.yaml").read_text())
    config = find(rendered(OVERLAYS[0]), "ConfigMap", values["rules"]["existing"])
    assert set(config["data"]) == {"config.yaml"}, "the chart starts the adapter with that file"
    assert config["metadata"]["namespace"] == "monitoring"
    address = values["prometheus"]["url"] + f":{values['prometheus']['port']}"
    triggers = yaml.safe_load(SCALED_OBJECT.read_text())["spec"]["triggers"]
    assert {trigger["metadata"]["serverAddress"] for trigger in triggers} == {address}


def test_targets_are_written_as_the_api_server_writes_them():
    """It keeps the largest suffix that leaves a whole number; another form would be `configured` by every apply."""
    spec = yaml.safe_load(AUTOSCALER.read_text())["spec"]
    written = [str(metric["pods"]["target"]["averageValue"]) for metric in spec["metrics"]]
    assert written == ["1k", "8"]
    assert [metric.target for metric in read_autoscaler(AUTOSCALER).metrics] == [1000, 8]


def test_keda_decides_by_the_same_targets_bounds_and_pace_as_the_hpa():
    ours, theirs = (yaml.safe_load(path.read_text())["spec"] for path in (AUTOSCALER, SCALED_OBJECT))
    targets = {metric.name: metric.target for metric in read_autoscaler(AUTOSCALER).metrics}
    assert {each["name"]: float(each["metadata"]["threshold"]) for each in theirs["triggers"]} == targets
    assert read_queries(KEDA).keys() == read_queries(ADAPTER).keys() == targets.keys()
    assert (theirs["minReplicaCount"], theirs["maxReplicaCount"]) == (ours["minReplicas"], ours["maxReplicas"])
    assert theirs["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == ours["behavior"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_keda_is_the_only_scaler_where_it_is_switched_on(rendered, overlay):
    [scaler] = scalers_of(rendered(f"{overlay}+keda"))
    assert scaler["kind"] == "ScaledObject"
    # The HPA that KEDA makes takes the place of one applied before, under the name that alerts look for.
    assert scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["name"] == "triton"
    assert scaler["metadata"]["annotations"]["scaledobject.keda.sh/transfer-hpa-ownership"] == "true"


def test_scaling_to_zero_is_an_option_and_something_beside_the_servers_wakes_them(rendered, tmp_path):
    [without] = scalers_of(rendered("gke+keda"))
    assert "idleReplicaCount" not in without["spec"]
    text = render_variant("gke+keda+keda/scale-to-zero", tmp_path)
    [scaler] = scalers_of(documents(text))
    validate_crd(scaler)
    spec = scaler["spec"]
    assert spec["idleReplicaCount"] == 0 < spec["minReplicaCount"]
    [cron] = [trigger for trigger in spec["triggers"] if trigger["type"] == "cron"]
    assert cron["metadata"]["start"] != cron["metadata"]["end"]
    assert int(cron["metadata"]["desiredReplicas"]) >= spec["minReplicaCount"]
    # An error, which KEDA does not take for inactivity while servers run; 0 would end them where Prometheus is lost.
    assert all(t["metadata"]["ignoreNullValues"] == "false" for t in spec["triggers"] if t is not cron)


def test_replicas_go_slowly_and_come_fast():
    spec = read_autoscaler(AUTOSCALER)
    assert spec.down.stabilization_seconds >= SLOWEST_START_SECONDS
    for policy in spec.down.policies:
        assert policy.type == "Pods", "a share of many replicas is many at once"
        assert policy.value == 1
        assert policy.period_seconds >= 60
    assert spec.up.stabilization_seconds == 0
    assert spec.up.select == "Max"
    doubling = [each.period_seconds for each in spec.up.policies if each.type == "Percent" and each.value >= 100]
    assert min(doubling) <= 60
