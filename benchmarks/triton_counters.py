"""What a Triton counted of one model, all versions together, from the server's own statistics."""

from typing import Any

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
"""Where a request's time goes inside the server, in order."""


def counters(client: Any, model: str) -> dict[str, int]:
    """Successful requests and cache hits since the model was loaded, and nanoseconds in each part.

    Args:
        client: A tritonclient of the server's gRPC.
        model: Its name there.
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
    """What was counted between two readings."""
    return {name: after[name] - before[name] for name in after}
