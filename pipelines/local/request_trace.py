"""The demo's traffic as a request trace, so that the autoscaler can be tried on it: `evergreen scale simulate --trace`.

The format is `k8s.scaling.traces`'; the lines are the traffic's own, one a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from components.runtime.errors import ContractError
from k8s.scaling.traces import Trace

STEP_SECONDS = 1.0
"""What a line of traffic tells of; the first has none before it to be told from."""


def recorded_trace(lines: Sequence[dict[str, Any]]) -> Trace:
    """The rates of the seconds that `lines` tell of; rows of a request as they were on average in all of them.

    Args:
        lines: `time` (epoch seconds, rising), `requests_sent` and `rows` of the second that ended then.

    Raises:
        ContractError: no request was sent.
    """
    sent = np.array([line["requests_sent"] for line in lines], dtype=np.float64)
    if not sent.sum():
        raise ContractError(f"{len(lines)} seconds of traffic hold no request, expected at least one")
    ends = np.array([line["time"] for line in lines], dtype=np.float64)
    starts = np.concatenate([[ends[0] - STEP_SECONDS], ends])
    rows = max(1, round(sum(line["rows"] for line in lines) / sent.sum()))
    rates = sent / np.diff(starts)
    return Trace(starts - starts[0], rates, np.full(len(lines), rows), "the demo's traffic")
