"""Read one model's counters from Triton's statistics, summed over all versions."""

from typing import Any

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
"""Parts of a request's time inside the server, in order."""


def counters(client: Any, model: str) -> dict[str, int]:
    """Return requests, cache hits, and nanoseconds per part since the model was loaded.

    Only successful requests are counted.

    Args:
        client: A tritonclient that is connected to the server by gRPC.
        model: Name of the model on the server.
    """
    versions = client.get_inference_statistics(model, as_json=True)["model_stats"]
    found = dict.fromkeys(("requests", "request", "cache_hits", "executions", *PARTS), 0)
    for version in versions:
        statistics = version["inference_stats"]
        found["requests"] += int(statistics["success"].get("count", 0))
        found["request"] += int(statistics["success"].get("ns", 0))
        found["cache_hits"] += int(statistics.get("cache_hit", {}).get("count", 0))
        found["executions"] += int(version.get("execution_count", 0))
        for part in PARTS:
            found[part] += int(statistics.get(part, {}).get("ns", 0))
    return found


def increase(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return the increase of the counters between two reads."""
    return {name: after[name] - before[name] for name in after}
