"""Names and labels of every metric for alerts and dashboards, and a check of expressions.

The monitor's metrics are read from the monitor's own metrics page. Triton's metrics are recorded
from the server of the serving environment, and tests/e2e/test_metric_names.py verifies them. The
metrics of kube-state-metrics and of NVIDIA's GPUs are taken from their documentation, because no
test machine has these exporters.
"""

from collections.abc import Iterator
from functools import cache

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

from monitoring.web.metrics import metrics_page
from tests.support.snapshots import FULL

Labels = frozenset[str]
SCRAPED: Labels = frozenset({"namespace", "pod", "container", "endpoint", "job", "instance"})
"""Labels that Prometheus adds to metrics scraped through a PodMonitor."""

_MODEL, _NONE = frozenset({"model", "version"}), frozenset[str]()
_OF_EACH_MODEL = (
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
    "nv_inference_pending_request_count",
)
_CACHED = tuple(
    f"nv_cache_{n}_per_model" for n in ("num_hits", "num_misses", "hit_duration", "miss_duration")
)
_SUMMARIES = (
    "nv_inference_request_summary_us",
    "nv_inference_queue_summary_us",
    "nv_inference_compute_input_summary_us",
    "nv_inference_compute_infer_summary_us",
    "nv_inference_compute_output_summary_us",
    "nv_cache_hit_summary_per_model",
    "nv_cache_miss_summary_per_model",
)
_CACHE = (
    "nv_cache_util",
    "nv_cache_num_entries",
    "nv_cache_num_hits",
    "nv_cache_num_misses",
    "nv_cache_num_lookups",
    "nv_cache_num_evictions",
    "nv_cache_lookup_duration",
    "nv_cache_insertion_duration",
)
_MACHINE = (
    "nv_pinned_memory_pool_total_bytes",
    "nv_pinned_memory_pool_used_bytes",
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
)
TRITON: dict[str, Labels] = {
    **dict.fromkeys((*_OF_EACH_MODEL, *_CACHED), _MODEL),
    "nv_inference_request_failure": _MODEL | {"reason"},
    **dict.fromkeys(_SUMMARIES, _MODEL | {"quantile"}),
    **{f"{name}_{part}": _MODEL for name in _SUMMARIES for part in ("sum", "count")},
    **dict.fromkeys((*_CACHE, *_MACHINE), _NONE),
}
"""Labels of each metric of Triton 2.51. Triton has a local response cache, and the option
`--metrics-config` of the Deployment."""
FAILURE_REASONS = frozenset({"OTHER", "CANCELED", "BACKEND", "REJECTED"})
QUANTILES = frozenset({"0.5", "0.9", "0.95", "0.99", "0.999"})
GPU: dict[str, Labels] = dict.fromkeys(
    (
        "nv_gpu_utilization",
        "nv_gpu_memory_total_bytes",
        "nv_gpu_memory_used_bytes",
        "nv_gpu_power_usage",
        "nv_gpu_power_limit",
        "nv_energy_consumption",
    ),
    frozenset({"gpu_uuid"}),
)
"""Source: Triton's docs/user_guide/metrics.md, GPU metrics. MIG slices report fewer GPU metrics."""
DCGM: dict[str, Labels] = {
    name: frozenset({"gpu", "UUID", "device", "modelName", "Hostname", "GPU_I_PROFILE", "GPU_I_ID"})
    for name in (
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_FB_FREE",
    )
}
"""Source: NVIDIA's dcgm-exporter, etc/default-counters.csv, and its labels of a MIG slice."""
_HPA = frozenset({"namespace", "horizontalpodautoscaler"})
_DEPLOYMENT = frozenset({"namespace", "deployment"})
_CONTAINER = frozenset({"namespace", "pod", "uid", "container"})
KUBE_STATE: dict[str, Labels] = {
    "kube_horizontalpodautoscaler_spec_min_replicas": _HPA,
    "kube_horizontalpodautoscaler_spec_max_replicas": _HPA,
    "kube_horizontalpodautoscaler_status_current_replicas": _HPA,
    "kube_horizontalpodautoscaler_status_desired_replicas": _HPA,
    "kube_horizontalpodautoscaler_status_condition": _HPA | {"condition", "status"},
    "kube_horizontalpodautoscaler_spec_target_metric": _HPA | {"metric_name", "metric_target_type"},
    "kube_deployment_spec_replicas": _DEPLOYMENT,
    "kube_deployment_status_replicas": _DEPLOYMENT,
    "kube_deployment_status_replicas_ready": _DEPLOYMENT,
    "kube_deployment_status_replicas_available": _DEPLOYMENT,
    "kube_deployment_status_replicas_updated": _DEPLOYMENT,
    "kube_pod_status_ready": frozenset({"namespace", "pod", "uid", "condition"}),
    "kube_pod_container_status_restarts_total": _CONTAINER,
    "kube_pod_container_status_waiting_reason": _CONTAINER | {"reason"},
}
"""Source: kube-state-metrics, docs/metrics/workload, pages of horizontalpodautoscaler, deployment
and pod. Prometheus must honour the labels `namespace` and `pod` of kube-state-metrics
(`honorLabels`), as kube-prometheus-stack configures it."""
PROMETHEUS: dict[str, Labels] = {
    "up": SCRAPED,
    "ALERTS": frozenset({"alertname", "alertstate", "severity"}),
}


@cache
def monitor() -> dict[str, Labels]:
    """Return the metrics that the monitor's own code exports, with their labels."""
    found: dict[str, Labels] = {}
    for family in text_string_to_metric_families(metrics_page(FULL).decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, _NONE) | frozenset(sample.labels)
    return found


def known() -> dict[str, Labels]:
    """Return every metric with all labels that its series may have."""
    scraped = {
        name: labels | SCRAPED for name, labels in {**monitor(), **TRITON, **GPU, **DCGM}.items()
    }
    return {**scraped, **KUBE_STATE, **PROMETHEUS}


def selectors(expression: str) -> Iterator[promql.VectorSelector]:
    """Yield the selectors of a PromQL expression.

    Raises ValueError if the expression is not PromQL.
    """
    yield from _selectors(promql.parse(expression))


def unexported_names(expression: str, recorded: dict[str, Labels] | None = None) -> list[str]:
    """Return the expression's metric names and labels that no program exports.

    Args:
        expression: PromQL without templates.
        recorded: Additional allowed series, from recording rules, with their labels.
    """
    names = {**known(), **(recorded or {})}
    found = []
    for selector in selectors(expression):
        name = selector.name or next(
            (m.value for m in selector.matchers.matchers if m.name == "__name__"), ""
        )
        if name not in names:
            found.append(name)
            continue
        labels = {
            matcher.name for matcher in selector.matchers.matchers if matcher.name != "__name__"
        }
        found += [f"{name}{{{label}}}" for label in sorted(labels - names[name])]
    return found


def _selectors(node: object) -> Iterator[promql.VectorSelector]:
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str):
            yield from _selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from _selectors(child)
