"""Requests to the controller, and its answers, as entries of the promotion journal.

A pipeline step or a person's command appends a `ServingRequest`. The controller appends
`ServingAnswer`s to the journal. Nobody changes an entry later.
"""

from dataclasses import dataclass, field
from typing import Any

REQUESTED = "requested"
ACCEPTED = "accepted"
"""The controller has started to process the request. After the acceptance, only the controller can
end the request."""
DONE = "done"
REFUSED = "refused"
"""The request was not carried out. `ServingAnswer.error` is the kind of the error."""
CANCELLED = "cancelled"
"""The requester withdrew the request before the controller accepted it."""
ANSWERS = (ACCEPTED, DONE, REFUSED, CANCELLED)
REQUEST_ACTIONS = (REQUESTED, *ANSWERS)

RELEASE, ROLLBACK, CANARY, ADVANCE, ABORT = KINDS = (
    "release",
    "rollback",
    "canary",
    "advance",
    "abort",
)
"""Kinds of requests: serve a new version, serve an earlier version, start a canary, give the canary
its next share, and end the canary."""


@dataclass(frozen=True, kw_only=True)
class ServingRequest:
    """Request to the controller to change the served versions."""

    time: str
    """ISO 8601 UTC."""
    request: str
    """Id of the request, which no other request has."""
    kind: str
    """One of `KINDS`."""
    who: str
    """Person or pipeline run that makes the request."""
    reason: str
    deadline: str
    """ISO 8601 UTC. The controller does not start the request after this time."""
    model_id: str | None = None
    """Model of a `release` or `canary`."""
    to_version: int | None = None
    """Version to which a `rollback` returns. None = the version before the live version."""
    replaces: int | None = None
    """Version that an automatic `rollback` removes. The request is refused if another version is
    live by then. If the rollback succeeds,
    the version's model is blocked from automatic releases."""
    plan: int | None = None
    """Sequence number of the traffic plan that an automatic `advance` or `abort` refers to."""
    is_override: bool = False
    """Whether a `release` ignores the decision of the gate. If True, a person wrote the
    `reason`."""
    share: float | None = None
    """First share of the traffic for a `canary`. 0 = shadow traffic only."""
    trigger_id: str | None = None
    """Retrain request whose run made this `release` or `canary` request."""
    run: str | None = None
    """Pipeline run whose step made the request. If the same run requests the same model again, the
    second request is a retry. None = a person or the controller made the request."""
    options: dict[str, Any] = field(default_factory=dict)
    """Serving options of a `release` or `canary`
    (`evergreen.serving.repository.triton_config.ServingOptions`)."""
    action: str = REQUESTED


@dataclass(frozen=True, kw_only=True)
class ServingAnswer:
    """Entry about the progress or the result of a request."""

    time: str
    """ISO 8601 UTC."""
    action: str
    """One of `ANSWERS`."""
    request: str
    """Id of the request."""
    who: str
    """Controller that answered, or the requester that withdrew the request."""
    reason: str
    version: int | None = None
    """Version that gets traffic because of the request. None if the request released no version."""
    error: str | None = None
    """Name of the error class if the request was refused, such as `Refused` or `TemporaryError`."""
    lease: int | None = None
    """Lease number of the controller. None if the requester withdrew the request."""
