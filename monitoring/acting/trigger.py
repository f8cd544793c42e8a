"""Who runs the pipeline: what every trigger promises.

In: a `RetrainRequest`. Out: whether a run started, and later how it ended. When to ask is decided elsewhere
(`monitoring.deciding`, `monitoring.acting.retraining`); the triggers are `local_trigger` and `kubeflow_trigger`.
"""

from typing import NamedTuple, Protocol

from components.contracts.retrain_request import RetrainRequest

STARTED = "started"
BUSY = "busy"
ALREADY = "already"
RUNNING = "running"
RELEASED = "released"
REFUSED = "refused"
FAILED = "failed"
UNKNOWN = "unknown"


class RunState(NamedTuple):
    """How a run stands: `running`, `unknown` to the trigger, or ended as `store.runs.RunOutcome` says."""

    state: str
    reason: str = ""
    version: int | None = None
    """The version that it released or made a canary, where known."""


class Trigger(Protocol):
    """Starts runs, at most one at a time."""

    @property
    def poll_seconds(self) -> float:
        """Shortest time between two questions for a run's state; 0 = no limit."""

    def submit(self, request: RetrainRequest) -> str:
        """`started`; `busy` while another run is active; `already` if this request was submitted before.

        Raises:
            TemporaryError: not reachable now; submit the same request again.
            PermanentError: no run can be started this way.
        """

    def state(self, request_id: str) -> RunState:
        """The state of a submitted request's run.

        Raises:
            TemporaryError: not reachable now.
            PermanentError: it cannot be determined this way.
        """
