"""One simulation for a terminal: its time line, queue times, refusals, and hours of pods and nodes.

Simulating is `simulation`'s.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from k8s.scaling.hpa import SYNC_SECONDS
from k8s.scaling.simulation import SimulatedRun

_MOST_LINES = 48


def describe(outcome: SimulatedRun, *, objective_ms: float) -> str:
    """The run as text.

    `objective_ms` is the queue time that is still in time.
    """
    waits = np.concatenate([each for _, each in outcome.waits])
    counters, wanted = outcome.counters, [moment.wanted for moment in outcome.moments]
    num_dropped = counters.refused + counters.timed_out + outcome.num_homeless
    num_late = int((waits > objective_ms / 1e3).sum()) + num_dropped
    mean = outcome.pod_hours * 3600 / outcome.seconds
    num_changes = sum(1 for a, b in zip(wanted, wanted[1:]) if a != b)
    return "\n".join([
        *_time_line(outcome),
        "",
        f"{outcome.num_arrived:,} requests: {counters.answered:,} answered, {counters.refused:,} found a full queue, "
        f"{counters.timed_out:,} waited too long, {outcome.num_homeless:,} found no ready pod, {outcome.num_inside:,} "
        "under way at the end",
        f"queue time p50 {_quantile_ms(waits, 0.5)} ms, p99 {_quantile_ms(waits, 0.99)} ms; "
        f"{num_late / max(1, outcome.num_arrived):.3%} later than {objective_ms:g} ms or dropped",
        f"replicas {mean:.2f} in the mean, {max(wanted)} at most, changed {num_changes} times",
        f"{outcome.pod_hours:.1f} pod hours (of a GPU or slice each, where pods have one), {outcome.node_hours:.1f} "
        "node hours",
    ])  # fmt: skip


def _time_line(outcome: SimulatedRun) -> Iterator[str]:
    """A line for each span of some syncs, so many that few lines tell the whole run."""
    yield f"{'time':>6}  {'ready':>5}  {'wanted':>6}  {'served/s':>8}  {'p50 ms':>8}  {'p99 ms':>8}"
    size = -(-len(outcome.moments) // _MOST_LINES)
    for start in range(0, len(outcome.moments), size):
        moments = outcome.moments[start : start + size]
        waits = np.concatenate([each for _, each in outcome.waits[start : start + size]])
        seconds = int(moments[-1].seconds)
        yield (
            f"{seconds // 3600:3d}:{seconds // 60 % 60:02d}  {np.mean([each.ready for each in moments]):5.1f}  "
            f"{np.mean([each.wanted for each in moments]):6.1f}  {len(waits) / (len(moments) * SYNC_SECONDS):8.1f}  "
            f"{_quantile_ms(waits, 0.5):>8}  {_quantile_ms(waits, 0.99):>8}"
        )


def _quantile_ms(waits: NDArray[np.float32], quantile: float) -> str:
    return f"{1e3 * float(np.quantile(waits, quantile)):.1f}" if len(waits) else "none"
