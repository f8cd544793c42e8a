"""Release an accepted model: prepare its version, request the release, and wait for the result.

The export and the parity check need only the model registry. The request is then carried out by the
running controller, or by this process if no controller is running (`controller.reconcile`).
"""

from dataclasses import dataclass, field

from controller.reconcile import carry_out
from controller.site import SiteSettings
from evergreen.contracts.manifests import Model, RawDataset, Release, Verdict
from evergreen.contracts.requests import CANARY, RELEASE, ServingRequest
from evergreen.registry.models import read_release
from evergreen.serving.canary_policy import FIRST_SHARE
from evergreen.serving.prepare import prepare_request
from evergreen.serving.repository.triton_config import ServingOptions


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings(SiteSettings):
    """Deployment target and serving options of a release."""

    options: ServingOptions = field(default_factory=ServingOptions)
    """Serving options of the version."""
    trigger_id: str | None = None
    """Retrain request that this release answers, or None."""


def release(
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    *,
    settings: ReleaseSettings,
    override: str | None = None,
) -> Release:
    """Release `model`, and return its manifest. If it is already live, return its existing release.

    Args:
        model: Model to release.
        verdict: Verdict about it.
        raw: Data with the holdout rows.
        settings: Deployment target and serving options.
        override: Reason to release the model although the gate refused it (`promote`). None = the
            verdict must accept the model.

    Raises:
        ContractError: the inputs do not belong together, or the parity check fails.
        Refused: another model went live since the verdict, or a canary is running and the verdict
            is not a pass. The live version is unchanged.
        TemporaryError: a server does not answer, or nobody carried out the request. The live
            version is unchanged.
        PermanentError: a server rejected the version or answered wrongly. The live version is
            unchanged.
    """
    return _serve(RELEASE, (model, verdict, raw), settings, override=override)


def start_canary(
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    *,
    settings: ReleaseSettings,
    share: float = FIRST_SHARE,
) -> Release:
    """Start a canary and return its release.

    If the model is already live or already the canary, its existing release is returned. A shadow
    canary that is started again with a share begins to serve.

    Args:
        model: Model to serve as a canary.
        verdict: Verdict about it.
        raw: Data with the holdout rows of the verdict.
        settings: Deployment target and serving options.
        share: Share of the traffic. 0 = score shadow traffic only.

    Raises:
        ContractError: nothing is live, or as in a release.
        Refused: another canary is running, or as in a release.
        TemporaryError: a previous canary is still draining, or as in a release. Nothing changed.
        PermanentError: a server rejected the version or answered wrongly. Nothing changed.
    """
    return _serve(CANARY, (model, verdict, raw), settings, share=share)


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
        share: Share of the traffic of a canary. 0 = score shadow traffic only.
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
        seconds=settings.patience.deadline_seconds,
        trigger_id=settings.trigger_id,
        share=share,
        override=override,
    )


def _serve(
    kind: str,
    candidate: tuple[Model, Verdict, RawDataset],
    settings: ReleaseSettings,
    *,
    share: float | None = None,
    override: str | None = None,
) -> Release:
    settings = settings.serving(candidate[0])
    request = candidate_request(kind, candidate, settings, share=share, override=override)
    result = carry_out(settings, request).result
    assert result is not None
    assert result.version is not None
    return read_release(settings.store, result.version)
