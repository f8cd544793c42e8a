"""Whether a candidate may take the live version's place: asked before anything is built or told.

A verdict compares with one champion. If another model went live since (two runs at once: one wins), it says nothing of
the exchange that a release would make, so the loser is refused and must be judged again. A run that named its champion,
or asked for none, has said what it wants compared with.
"""

from __future__ import annotations

from components.contracts.manifests import Model, Verdict
from components.contracts.retrain_request import CURRENT
from components.deployment.canary.state import active
from components.deployment.release_settings import ReleaseSettings
from components.deployment.site import Site
from components.runtime.errors import ContractError, PermanentError
from components.store.promotion_journal import Promotion


class Refused(PermanentError):
    """The candidate may not go live as things are; the same candidate, tried again, would hear the same."""


class StaleVerdict(Refused):
    """The verdict compared with a model that is not the live one any more: the candidate must be judged again."""


def check_belonging(model: Model, verdict: Verdict, *, override: str | None = None) -> None:
    """Returns if the verdict is about the model and lets it go live.

    Raises:
        ContractError: it is not, or does not.
    """
    if verdict.candidate_model_id != model.model_id:
        raise ContractError(f"verdict is about model {verdict.candidate_model_id}, expected {model.model_id}")
    if not verdict.accepted and override is None:
        raise ContractError(f"verdict on model {model.model_id} is {verdict.decision!r}, expected an accepted one")


def check_may_replace(site: Site, verdict: Verdict, settings: ReleaseSettings, *, override: str | None = None) -> None:
    """Returns if the candidate may take the live version's place.

    Raises:
        ContractError: the live version is of another kind of server.
        Refused: a canary is at work.
        StaleVerdict: the live model is not the one that the verdict compared with.
    """
    if canary := active(site.store):
        raise Refused(f"version {canary.version} is a canary, expected it promoted or ended before a release")
    live = site.live
    if override is None:
        check_champion(verdict, live)
    if live is not None and live.version in site.repository.versions():
        kind = site.repository.server_of(live.version)
        if kind != settings.server:
            raise ContractError(
                f"server is {settings.server!r}, expected {kind!r} as the live version {live.version} in "
                f"{site.repository.uri}: one model serves all its versions alike"
            )


def check_champion(verdict: Verdict, live: Promotion | None) -> None:
    """Returns if the verdict compared with what is live, or with what the run had named.

    Raises:
        StaleVerdict: it did not.
    """
    if verdict.champion_reference not in (None, CURRENT):
        return
    live_model = live.model_id if live else None
    if verdict.champion_model_id != live_model:
        raise StaleVerdict(
            f"model {verdict.candidate_model_id} was judged against {verdict.champion_model_id or 'no champion'}, but "
            f"{live_model or 'nothing'} is live: judge it again, or promote it with --override"
        )
