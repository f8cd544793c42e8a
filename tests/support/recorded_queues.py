"""What four real Tritons counted in 150 s (`queue_series.json`), as series, and the truth by arithmetic on it.

Each stands for a pod and was read every 5 s, as Prometheus would: `busy` (one model under load, one that wakes half-way
with few slow requests, one idle), `restarted` (killed half-way, while its traffic paused: its counters begin again),
`quiet` (three requests, once), `stuck` (its requests do not end). `answered` counts the answers that the clients got.
"""

import json

from tests.support.paths import REPOSITORY

QUEUE = "nv_inference_queue_duration_us"
SUCCESS = "nv_inference_request_success"
PENDING = "nv_inference_pending_request_count"
RECORD = json.loads((REPOSITORY / "tests" / "k8s" / "queue_series.json").read_text())
INTERVAL = int(RECORD["interval_seconds"])
PODS = tuple(RECORD["readings"])


def recorded_series(pods=PODS) -> dict[str, str]:
    """Every series of these pods with the labels a PodMonitor gives, in promtool's notation."""
    found = {}
    for pod in pods:
        readings = RECORD["readings"][pod]
        for metric in (QUEUE, SUCCESS, PENDING):
            for model in readings[0][metric]:
                labels = f'namespace="evergreen",pod="{pod}",model="{model}",version="1"'
                found[f"{metric}{{{labels}}}"] = " ".join(str(each[metric][model]) for each in readings)
    return found


def counted(pod: str, metric: str, start: int, end: int) -> int:
    """What all models of a pod counted between two moments (seconds); a counter that fell began again at zero."""
    readings = RECORD["readings"][pod][start // INTERVAL : end // INTERVAL + 1]
    total = 0
    for before, after in zip(readings, readings[1:]):
        for model, value in after[metric].items():
            total += value - before[metric][model] if value >= before[metric][model] else value
    return total


def truth(end: int, pods=PODS, *, window: int = 60) -> float:
    """Queue microseconds per request of these pods together, in the window that ends at `end`."""
    sums = {metric: sum(counted(pod, metric, end - window, end) for pod in pods) for metric in (QUEUE, SUCCESS)}
    return sums[QUEUE] / sums[SUCCESS]
