"""Release a model or start a canary as a command does, and wait for the result."""

from controller.reconcile import carry_out
from controller.release import ReleaseSettings, candidate_request
from evergreen.contracts.manifests import Model, RawDataset, Release, Verdict
from evergreen.contracts.requests import CANARY, RELEASE
from evergreen.registry.models import read_release
from evergreen.serving.canary_policy import FIRST_SHARE


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
        verdict: Verdict on the model.
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
        verdict: Verdict on the model.
        raw: Data with the holdout rows of the verdict.
        settings: Deployment target and serving options.
        share: Share of the traffic. 0 = score shadow traffic only.

    Raises:
        ContractError: No version is live, or `release` would raise this error.
        Refused: Another canary is running, or `release` would raise this error.
        TemporaryError: A previous canary is still draining, or `release` would raise this error.
            Nothing changed.
        PermanentError: A server rejected the version or answered wrongly. Nothing changed.
    """
    return _serve(CANARY, (model, verdict, raw), settings, share=share)


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
