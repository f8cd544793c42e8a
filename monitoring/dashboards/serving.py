"""The dashboard of serving: is it up, how long do callers wait and why, and do the replicas follow the load.

Metrics are Triton's, kube-state-metrics' and the DCGM exporter's; the two queries of the autoscaler are read from
`k8s/components/prometheus-adapter`, so that what is drawn is what the autoscaler sees.
"""

from __future__ import annotations

from functools import partial

from k8s.scaling.manifests import ADAPTER, PENDING_METRIC, QUEUE_METRIC, read_queries
from monitoring.dashboards.board import Dashboard, Variable
from monitoring.dashboards.panels import GREEN, RED, YELLOW, Panel, Query, Row

_MODEL = 'namespace="$namespace",model=~"$model"'
_HPA = 'namespace="$namespace",horizontalpodautoscaler="triton"'
_DEPLOYMENT = 'namespace="$namespace",deployment="triton"'
_COMPLETED = f"sum(rate(nv_inference_request_success{{{_MODEL}}}[$__rate_interval]))"
_FAILED = f"sum(rate(nv_inference_request_failure{{{_MODEL}}}[$__rate_interval]))"
_HITS = f"sum(rate(nv_cache_num_hits_per_model{{{_MODEL}}}[$__rate_interval]))"
_MISSES = f"sum(rate(nv_cache_num_misses_per_model{{{_MODEL}}}[$__rate_interval]))"


def serving() -> Dashboard:
    """The dashboard.

    Raises:
        ContractError: the autoscaler's queries cannot be read.
    """
    return Dashboard(
        uid="evergreen-serving",
        title="Evergreen / Serving",
        description="Triton: load, latency, queue, replicas, cache, GPU.",
        variables=[
            Variable(name="namespace", series="nv_inference_request_success", label="namespace", default="evergreen"),
            Variable(name="model", series='nv_inference_request_success{namespace="$namespace"}', label="model"),
        ],
        rows=[
            Row("Now", _now()),
            Row("Load and latency", [*_load(), *_latency()]),
            Row("Autoscaling", _scaling()),
            Row("Pods", [*_pods(), *_nodes()]),
        ],
    )


def _per_request(counter: str) -> str:
    """Mean microseconds per completed request; no series where none completed."""
    return f"sum(rate({counter}{{{_MODEL}}}[$__rate_interval])) / ({_COMPLETED} > 0)"


def _now() -> list[Panel]:
    stat = partial(Panel, kind="stat", width=4, height=4)
    return [
        stat(
            title="Requests",
            description="Requests that completed, per second, of all pods.",
            queries=[Query(_COMPLETED)],
            unit="reqps",
        ),
        stat(
            title="Failing",
            description="Share of requests that failed inside Triton. Malformed ones, refused at its front door, are "
            "not counted by it.",
            queries=[Query(f"({_FAILED} or vector(0)) / ({_COMPLETED} + ({_FAILED} or vector(0)) > 0)")],
            unit="percentunit",
            steps=((None, GREEN), (0.001, YELLOW), (0.01, RED)),
        ),
        stat(
            title="Latency, mean",
            description="Mean time of a request inside Triton, with its queue and without the network. Mean: "
            "counters have no quantiles.",
            queries=[Query(_per_request("nv_inference_request_duration_us"))],
            unit="µs",
        ),
        stat(
            title="Queue, mean",
            description="Mean time that a request waited for a free instance, over all pods.",
            queries=[Query(_per_request("nv_inference_queue_duration_us"))],
            unit="µs",
        ),
        stat(
            title="Pods ready",
            description="Pods of the Deployment that are available.",
            queries=[Query(f"max(kube_deployment_status_replicas_available{{{_DEPLOYMENT}}})")],
            steps=((None, RED), (1, YELLOW), (2, GREEN)),
        ),
        stat(
            title="Cache hits",
            description="Share of requests answered from the response cache; undefined without one.",
            queries=[Query(f"{_HITS} / ({_HITS} + {_MISSES} > 0)")],
            unit="percentunit",
        ),
    ]


def _load() -> list[Panel]:
    return [
        Panel(
            title="Requests by version",
            description="Completed requests per second by model and version: during a canary, two of them.",
            queries=[
                Query(
                    f"sum by (model, version) (rate(nv_inference_request_success{{{_MODEL}}}[$__rate_interval]))",
                    "{{model}} v{{version}}",
                )
            ],
            unit="reqps",
            is_stacked=True,
        ),
        Panel(
            title="Rows",
            description="Rows scored per second: a request has one row or many. Rows from the cache are not "
            "among them.",
            queries=[Query(f"sum(rate(nv_inference_count{{{_MODEL}}}[$__rate_interval]))", "rows")],
            unit="cps",
        ),
        Panel(
            title="Failures by reason",
            description="Requests per second that failed: REJECTED is a full queue or a timeout there, CANCELED the "
            "client's doing, BACKEND the model's, OTHER the rest.",
            queries=[
                Query(
                    f"sum by (reason) (rate(nv_inference_request_failure{{{_MODEL}}}[$__rate_interval]))", "{{reason}}"
                )
            ],
            unit="reqps",
            is_stacked=True,
        ),
    ]


def _latency() -> list[Panel]:
    parts = {
        "queue": "nv_inference_queue_duration_us",
        "input": "nv_inference_compute_input_duration_us",
        "inference": "nv_inference_compute_infer_duration_us",
        "output": "nv_inference_compute_output_duration_us",
    }
    return [
        Panel(
            title="Latency by part, mean per request",
            description="Where a request's time in Triton goes. A queue that grows asks for replicas; inference that "
            "grows does not.",
            queries=[Query(_per_request(counter), name) for name, counter in parts.items()],
            unit="µs",
            is_stacked=True,
        ),
        Panel(
            title="Latency quantiles of the slowest pod",
            description="Quantiles of a pod's newest requests as Triton keeps them; the greatest over pods, since "
            "quantiles have no mean. Absent for a model whose answers may come from the cache.",
            queries=[
                Query(
                    f'max by (model, quantile) (nv_inference_request_summary_us{{{_MODEL},quantile=~"0.5|0.95|0.99"}})',
                    "{{model}} p{{quantile}}",
                )
            ],
            unit="µs",
        ),
        Panel(
            title="Rows per execution",
            description="Mean size of the batches that the backend executes: what dynamic batching achieves.",
            queries=[
                Query(
                    f"sum(rate(nv_inference_count{{{_MODEL}}}[$__rate_interval])) / "
                    f"(sum(rate(nv_inference_exec_count{{{_MODEL}}}[$__rate_interval])) > 0)",
                    "rows",
                )
            ],
        ),
    ]


def _scaling() -> list[Panel]:
    shipped = {
        name: query.replace('pod="POD"', 'pod=~"triton-.+"')
        for name, query in read_queries(ADAPTER, namespace="$namespace", pods=("POD",)).items()
    }

    def target(metric: str, place: int) -> Query:
        """The target that the cluster's autoscaler has now, of the HPA or of the one that KEDA makes."""
        names = f'metric_name=~"{metric}|s{place}-prometheus.*"'
        return Query(f"max(kube_horizontalpodautoscaler_spec_target_metric{{{_HPA},{names}}})", "target")

    return [
        Panel(
            title="Queue time per request",
            description="The autoscaler's own query: mean microseconds in the queue per completed request of the last "
            "minute, by pod. It adds pods when the mean over pods is above the target.",
            queries=[Query(shipped[QUEUE_METRIC], "{{pod}}"), target(QUEUE_METRIC, 0)],
            unit="µs",
            dashed=["target"],
            least=0,
        ),
        Panel(
            title="Pending requests",
            description="The autoscaler's second query: requests in a pod's queue, mean of the last minute. It still "
            "rises where a pod completes nothing.",
            queries=[Query(shipped[PENDING_METRIC], "{{pod}}"), target(PENDING_METRIC, 1)],
            dashed=["target"],
            least=0,
        ),
        Panel(
            title="Replicas",
            description="Pods that are ready, pods that the autoscaler wants, and its bounds. Wanted above ready: "
            "pods or nodes are still starting. Ready at the upper bound: see the runbook.",
            queries=[
                Query(f"max(kube_deployment_status_replicas_available{{{_DEPLOYMENT}}})", "ready"),
                Query(f"max(kube_horizontalpodautoscaler_status_desired_replicas{{{_HPA}}})", "wanted"),
                Query(f"max(kube_horizontalpodautoscaler_spec_min_replicas{{{_HPA}}})", "least"),
                Query(f"max(kube_horizontalpodautoscaler_spec_max_replicas{{{_HPA}}})", "most"),
            ],
            dashed=["least", "most"],
            least=0,
            decimals=0,
        ),
    ]


def _pods() -> list[Panel]:
    return [
        Panel(
            title="Versions loaded",
            description="Pods that have each model version loaded. A version on some pods only: a release is under "
            "way, or one of its steps failed there.",
            queries=[
                Query(f"count by (model, version) (nv_inference_request_success{{{_MODEL}}})"),
            ],
            kind="table",
            columns={"model": "Model", "version": "Version", "Value": "Pods"},
        ),
        Panel(
            title="GPU busy",
            description="Share of time with work on the GPU, as Triton reads it; on a MIG slice, which Triton cannot "
            "read, as the DCGM exporter does. Empty without a GPU.",
            queries=[
                Query('max by (pod, gpu_uuid) (nv_gpu_utilization{namespace="$namespace"})', "{{pod}} {{gpu_uuid}}"),
                Query(
                    "max by (Hostname, gpu, GPU_I_PROFILE) (DCGM_FI_PROF_GR_ENGINE_ACTIVE)",
                    "{{Hostname}} GPU {{gpu}} {{GPU_I_PROFILE}}",
                ),
            ],
            unit="percentunit",
            least=0,
            most=1,
        ),
        Panel(
            title="GPU memory",
            description="Share of the GPU's memory in use, as Triton reads it. Empty without a GPU.",
            queries=[
                Query(
                    'max by (pod, gpu_uuid) (nv_gpu_memory_used_bytes{namespace="$namespace"}) / '
                    'max by (pod, gpu_uuid) (nv_gpu_memory_total_bytes{namespace="$namespace"})',
                    "{{pod}} {{gpu_uuid}}",
                )
            ],
            unit="percentunit",
            least=0,
            most=1,
        ),
    ]


def _nodes() -> list[Panel]:
    return [
        Panel(
            title="CPU busy on the pod's node",
            description="Share of the node's CPU time in use, as Triton reads it: the whole node's, not the pod's.",
            queries=[Query('max by (pod) (nv_cpu_utilization{namespace="$namespace"})', "{{pod}}")],
            unit="percentunit",
            least=0,
            most=1,
            width=12,
        ),
        Panel(
            title="Restarts",
            description="Restarts of Triton's container by pod since the pod was made: crashes and failed liveness "
            "probes.",
            queries=[
                Query(
                    "max by (pod) (kube_pod_container_status_restarts_total"
                    '{namespace="$namespace",container="triton"})',
                    "{{pod}}",
                )
            ],
            decimals=0,
            width=12,
        ),
    ]
