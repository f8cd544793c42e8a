"""Counters of four real Tritons over 150 s (`queue_series.json`), and the expected values.

Each server represents one pod. The counters were read every 5 s, as Prometheus would do. `busy` has
three models: one under load, one idle, and one with few slow requests in the second half.
`restarted` was killed in the middle, during a pause of its traffic. Its counters start at zero
again. `quiet` got only three requests, all at the same time. `stuck` completes no request.
`answered` contains the number of answers that the clients received.
"""

import json

from testing.paths import REPOSITORY

QUEUE = "nv_inference_queue_duration_us"
SUCCESS = "nv_inference_request_success"
PENDING = "nv_inference_pending_request_count"
RECORD = json.loads((REPOSITORY / "tests" / "k8s" / "queue_series.json").read_text())
INTERVAL = int(RECORD["interval_seconds"])
PODS = tuple(RECORD["readings"])


def recorded_series(pods=PODS) -> dict[str, str]:
    """Return the series of `pods` in promtool's notation, with a PodMonitor's labels."""
    found = {}
    for pod in pods:
        readings = RECORD["readings"][pod]
        for metric in (QUEUE, SUCCESS, PENDING):
            for model in readings[0][metric]:
                labels = f'namespace="evergreen",pod="{pod}",model="{model}",version="1"'
                found[f"{metric}{{{labels}}}"] = " ".join(
                    str(each[metric][model]) for each in readings
                )
    return found


def counted(pod: str, metric: str, start: int, end: int) -> int:
    """Return the increase of a pod's counter between two times in seconds, over all models.

    A counter whose value fell has restarted at zero.
    """
    readings = RECORD["readings"][pod][start // INTERVAL : end // INTERVAL + 1]
    total = 0
    for before, after in zip(readings, readings[1:]):
        for model, value in after[metric].items():
            total += value - before[metric][model] if value >= before[metric][model] else value
    return total


def true_queue_time(end: int, pods=PODS, *, window: int = 60) -> float:
    """Return the mean queue time in microseconds of requests to `pods`.

    The mean is over the window that ends at `end`.
    """
    sums = {
        metric: sum(counted(pod, metric, end - window, end) for pod in pods)
        for metric in (QUEUE, SUCCESS)
    }
    return sums[QUEUE] / sums[SUCCESS]
