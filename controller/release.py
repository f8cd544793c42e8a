"""Prepare a version of a stored model, and create the request to serve this version.

The export and the parity check need only the model registry.
"""

from dataclasses import dataclass, field

from controller.deployment_target import TargetSettings
from evergreen.contracts.manifests import Model, RawDataset, Verdict
from evergreen.contracts.requests import ServingRequest
from evergreen.serving.prepare import prepare_request
from evergreen.serving.repository.triton_config import ServingOptions


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings(TargetSettings):
    """Deployment target and serving options of a release."""

    options: ServingOptions = field(default_factory=ServingOptions)
    """Serving options of the version."""
    trigger_id: str | None = None
    """Retrain request that this release answers, or None."""


def candidate_request(
    kind: str,
    candidate: tuple[Model, Verdict, RawDataset],
    settings: ReleaseSettings,
    *,
    share: float | None = None,
    override: str | None = None,
) -> ServingRequest:
    """Prepare the version of a candidate, and return the request to serve it.

    Args:
        kind: `RELEASE` or `CANARY`.
        candidate: Model, its verdict, and the data with the holdout rows.
        settings: Deployment target of the candidate's recommender, and serving options.
        share: A canary's share of the traffic. 0 = the canary only scores shadow traffic.
        override: Reason to release the model although the gate refused it, or None.

    Raises:
        ContractError: as in `prepare_request`.
    """
    return prepare_request(
        kind,
        candidate,
        store=settings.store,
        options=settings.options,
        who=settings.who,
        now=settings.clock,
        seconds=settings.timeouts.deadline_seconds,
        trigger_id=settings.trigger_id,
        share=share,
        override=override,
    )
