"""Promotion past the gate: a stored model that was refused, or whose verdict is stale, goes live on a person's word.

`python -m components.deployment.promote --store S --model-id M --override REASON` (`evergreen promote`). Only the
gate's opinion is overridden: the graph is built and its parity proven on the rows and scores that evaluation kept, and
every check of a release is made. `promote_version` is how a canary becomes the live version.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from components.contracts.manifests import Release
from components.deployment.command_line import add_site_flags, exit_code, site_of
from components.deployment.discovery import Resolve, resolve
from components.deployment.make_live import make_live
from components.deployment.release import release
from components.deployment.release_settings import ReleaseSettings
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.repository.triton_config import read_options
from components.deployment.rollback import options_for
from components.deployment.servers import Connect
from components.deployment.site import Site, SiteSettings
from components.deployment.triton_client import Triton
from components.runtime.errors import ContractError
from components.storage.locations import open_objects
from components.store import promotion_journal
from components.store.models import judged_model, read_serving_place, release_path
from components.store.promotion_journal import Promotion


def promote_version(site: Site, version: int, *, reason: str, decision: str | None = None) -> Promotion:
    """The line that made a prepared version (a canary) live, in the site that the caller opened.

    Args:
        site: Where.
        version: Has a manifest and a graph in the store; its folder may be in the repository already.
        reason: Why, for the journal.
        decision: What was decided of it, if anything was.

    Raises:
        ContractError, TemporaryError, PermanentError: as `make_live`; what was live is live.
    """
    target = Release.read(release_path(site.store, version))
    line = site.entry(promotion_journal.PROMOTE, target, reason=reason, trigger_id=target.trigger_id, decision=decision)
    return make_live(site, target, line, options=options_for(site, version))


def promote_model(
    settings: SiteSettings,
    model_id: str,
    *,
    override: str,
    connect: Connect = Triton,
    resolve: Resolve = resolve,
) -> Release:
    """The release that made the stored model live whatever its verdict says.

    Raises:
        ContractError: there is no such model, or evaluation never judged it; otherwise as `release`.
    """
    if not override.strip():
        raise ContractError("the reason of an override is empty, expected one for the journal")
    model, verdict, raw = judged_model(settings.store, model_id)
    return release(model, verdict, raw, as_served_now(settings), override=override, connect=connect, resolve=resolve)


def as_served_now(settings: SiteSettings) -> ReleaseSettings:
    """Settings of a release that is served as what is served now."""
    place = read_serving_place(settings.store)
    plain = ReleaseSettings(
        store=settings.store,
        repository=settings.repository,
        triton_urls=settings.triton_urls,
        who=settings.who,
        patience=settings.patience,
        clock=settings.clock,
        checkpoint=settings.checkpoint,
    )
    config = ModelRepository(open_objects(settings.repository)).read_config()
    if config is None:
        return replace(plain, server=place.server) if place else plain
    now = read_options(config)
    return replace(
        plain, server=now.server, device=now.device, instances=now.instances, response_cache=now.response_cache
    )


def build_parser() -> argparse.ArgumentParser:
    """The flags of a promotion."""
    parser = argparse.ArgumentParser(prog="evergreen promote", description=__doc__)
    add_site_flags(parser)
    parser.add_argument("--model-id", required=True, help="the stored model")
    parser.add_argument("--override", required=True, metavar="REASON", help="why it goes live all the same")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Promotes; exit code 0 done, 2 misuse or impossible, 3 a server failed and what was live is live."""
    arguments = build_parser().parse_args(argv)

    def command() -> str:
        done = promote_model(site_of(arguments), arguments.model_id, override=arguments.override)
        return f"version {done.version} is live, model {done.model_id} (was {done.previous_version})"

    return exit_code(command)


if __name__ == "__main__":
    raise SystemExit(main())
