"""Tests that the manifests of autoscaling agree on metrics, targets, bounds and pace."""

import pytest
import yaml

from tests.k8s.crds import validate_crd
from tests.support.rendering import OVERLAYS, render_variant
from tests.support.scaler_queries import ADAPTER, KEDA, adapter_rules, read_queries
from tests.support.yaml_texts import documents
from tools.autoscaling.hpa import SHIPPED_AUTOSCALER, read_autoscaler

HPA = ADAPTER / "autoscaler.yaml"
SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
SLOWEST_START_SECONDS = 300
"""Maximum startup time of a replica: a GPU node, its image and the model
(docs/kubernetes/autoscaling.md)."""


def specification(path):
    return yaml.safe_load(path.read_text())["spec"]


def scalers_of(manifests, target="triton"):
    return [
        m
        for m in manifests
        if m["kind"] in SCALERS and m["spec"]["scaleTargetRef"]["name"] == target
    ]


def test_adapter_publishes_what_hpa_reads_by_queries_of_keda():
    metrics = {each["external"]["metric"]["name"] for each in specification(HPA)["metrics"]}
    assert read_queries(ADAPTER) == read_queries(KEDA)
    assert read_queries(ADAPTER).keys() == metrics
    for rule in adapter_rules():
        # The HPA may read the metric in one namespace, which the adapter takes from the label
        # `namespace`.
        assert rule["resources"]["overrides"] == {"namespace": {"resource": "namespace"}}
        assert rule["seriesQuery"].endswith('{namespace!="",pod!=""}')


def test_adapter_and_keda_use_same_prometheus():
    values = yaml.safe_load((ADAPTER / "values.yaml").read_text())
    address = values["prometheus"]["url"] + f":{values['prometheus']['port']}"
    assert {
        each["metadata"]["serverAddress"] for each in specification(SHIPPED_AUTOSCALER)["triggers"]
    } == {address}


def test_targets_are_written_as_api_server_writes_them():
    """The API server writes numbers with the largest suffix that leaves an integer.

    If a manifest used another form, each `kubectl apply` would report a change.
    """
    targets = [metric["external"]["target"] for metric in specification(HPA)["metrics"]]
    assert targets == [
        {"type": "Value", "value": "1k"},
        {"type": "AverageValue", "averageValue": "8"},
    ]


def test_hpa_and_keda_decide_by_same_targets_bounds_and_pace():
    hpa, keda = specification(HPA), specification(SHIPPED_AUTOSCALER)
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (
        keda["minReplicaCount"],
        keda["maxReplicaCount"],
    )
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    spec = read_autoscaler(SHIPPED_AUTOSCALER)
    assert [(metric.target, metric.is_average) for metric in spec.metrics] == [
        (1000, False),
        (8, True),
    ]


def test_hpa_is_only_scaler_where_adapter_replaces_keda(tmp_path):
    [scaler] = scalers_of(documents(render_variant("base+prometheus-adapter", tmp_path)))
    assert (scaler["kind"], scaler["metadata"]["namespace"]) == (
        "HorizontalPodAutoscaler",
        "evergreen",
    )
    assert scalers_of(documents(render_variant("base", tmp_path))) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_keda_is_only_scaler_of_overlay(rendered, overlay):
    [scaler] = scalers_of(rendered(overlay))
    assert scaler["kind"] == "ScaledObject"
    # The HPA that KEDA creates has the name `triton`, which alerts use. KEDA takes over an existing
    # HPA of this name.
    assert scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["name"] == "triton"
    assert (
        scaler["metadata"]["annotations"]["scaledobject.keda.sh/transfer-hpa-ownership"] == "true"
    )


def test_scaling_to_zero_is_option_and_another_metric_wakes_servers(rendered, tmp_path):
    [without] = scalers_of(rendered("gke"))
    assert "idleReplicaCount" not in without["spec"]
    text = render_variant("gke+keda/scale-to-zero", tmp_path)
    [scaler] = scalers_of(documents(text))
    validate_crd(scaler)
    spec = scaler["spec"]
    assert spec["idleReplicaCount"] == 0 < spec["minReplicaCount"]
    [cron] = [trigger for trigger in spec["triggers"] if trigger["type"] == "cron"]
    assert cron["metadata"]["start"] != cron["metadata"]["end"]
    assert int(cron["metadata"]["desiredReplicas"]) >= spec["minReplicaCount"]
    # KEDA does not count a failed query as inactivity. If a failed query counted as 0, KEDA would
    # stop all servers whenever Prometheus is down.
    assert all(
        t["metadata"]["ignoreNullValues"] == "false" for t in spec["triggers"] if t is not cron
    )


def test_replicas_stop_slowly_and_start_fast():
    spec = read_autoscaler(SHIPPED_AUTOSCALER)
    assert spec.down.stabilization_seconds >= SLOWEST_START_SECONDS
    for policy in spec.down.policies:
        assert policy.type == "Pods", "a percentage of many replicas stops many pods at once"
        assert policy.value == 1
        assert policy.period_seconds >= 60
    assert spec.up.stabilization_seconds == 0
    assert spec.up.select == "Max"
    doubling = [
        each.period_seconds
        for each in spec.up.policies
        if each.type == "Percent" and each.value >= 100
    ]
    assert min(doubling) <= 60
