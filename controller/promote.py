"""Promotion past the gate: a stored model that was refused, or whose verdict is stale, goes live on a person's word.

`python -m controller.promote --store S --model-id M --override REASON` (`evergreen promote`). Only the
gate's opinion is overridden: the graph is built and its parity proven on the rows and scores that evaluation kept, and
every check of a release is made. `promote_version` is how a canary becomes the live version.
"""

import argparse
from dataclasses import fields

from evergreen.contracts.manifests import Release
from evergreen.registry import promotion_journal
from evergreen.registry.models import judged_model, read_release, read_serving_place
from evergreen.registry.promotion_journal import Promotion
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.serving.release import ReleaseSettings, release
from evergreen.serving.repository.triton_config import ServingOptions, read_options
from evergreen.serving.site import Site, SiteSettings, add_site_flags, change_reason, site_of
from evergreen.serving.switch import make_live


def promote_version(site: Site, version: int, *, reason: str, decision: str | None = None) -> Promotion:
    """The line that made a prepared version (a canary) live, in the site that the caller opened.

    The version has a manifest and a graph in the store; its folder may be in the repository already. `reason` and
    `decision` are for the journal.

    Raises:
        ContractError, TemporaryError, PermanentError: as `make_live`; what was live is live.
    """
    target = read_release(site.store, version)
    line = site.entry(promotion_journal.PROMOTE, target, reason=reason, trigger_id=target.trigger_id, decision=decision)
    return make_live(site, target, line, options=site.repository.options_for(version))


def promote_model(settings: SiteSettings, model_id: str, *, override: str) -> Release:
    """The release that made the stored model live whatever its verdict is.

    Raises:
        ContractError: there is no such model, or evaluation never judged it; otherwise as `release`.
    """
    judged = judged_model(settings.store, model_id)
    return release(*judged, settings=as_served_now(settings.serving(judged[0])), override=override)


def as_served_now(settings: SiteSettings) -> ReleaseSettings:
    """Settings of a release that is served as what is served now."""
    place = read_serving_place(settings.store)
    config = settings.open_repository().read_config()
    if config is not None:
        options = read_options(config)
    else:
        options = ServingOptions(server=place.server) if place else ServingOptions()
    return ReleaseSettings(
        **{each.name: getattr(settings, each.name) for each in fields(SiteSettings)}, options=options
    )


def build_parser() -> argparse.ArgumentParser:
    """The flags of a promotion."""
    parser = CommandParser(prog="evergreen promote", description=__doc__)
    add_site_flags(parser)
    parser.add_argument("--model-id", required=True, help="the stored model")
    parser.add_argument("--override", type=change_reason, required=True, metavar="REASON", help="why it goes live")
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Promotes; where it fails, what was live is live."""
    arguments = build_parser().parse_args(argv)
    done = promote_model(site_of(arguments), arguments.model_id, override=arguments.override)
    print(f"version {done.version} is live, model {done.model_id} (was {done.previous_version})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
