"""Release a stored model that the gate refused, or whose verdict is stale.

The command is `python -m controller.promote --store S --model-id M --override REASON`, or
`evergreen release promote`. Only the gate's decision is overridden. The graph is built and its
parity is checked with the rows and scores that evaluation stored. Every other check of a release is
made too. `promote_version` makes a canary the live version.
"""

import argparse
from dataclasses import fields

from evergreen.contracts.manifests import Release
from evergreen.registry import promotion_journal
from evergreen.registry.models import evaluated_model, read_release, read_serving_place
from evergreen.registry.promotion_journal import Promotion
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.serving.release import ReleaseSettings, release
from evergreen.serving.repository.triton_config import ServingOptions, read_options
from evergreen.serving.site import Site, SiteSettings, add_site_flags, change_reason, site_of
from evergreen.serving.switch import make_live


def promote_version(
    site: Site, version: int, *, reason: str, decision: str | None = None
) -> Promotion:
    """Make a prepared version (a canary) live, and return its journal entry.

    Its manifest and graph are in the registry, and its folder may already be in the repository.

    Args:
        site: Deployment target that the caller opened.
        version: Version to make live.
        reason: Reason for the journal.
        decision: Decision of the gate for the journal, or None.

    Raises:
        ContractError, TemporaryError, PermanentError: as in `make_live`. The live version is
        unchanged.
    """
    target = read_release(site.store, version)
    line = site.entry(
        promotion_journal.PROMOTE,
        target,
        reason=reason,
        trigger_id=target.trigger_id,
        decision=decision,
    )
    return make_live(site, target, line, options=site.repository.options_for(version))


def promote_model(settings: SiteSettings, model_id: str, *, override: str) -> Release:
    """Release the stored model whatever its verdict is, and return its manifest.

    Raises:
        ContractError: the model does not exist or was never evaluated. `release` raises it too.
    """
    evaluated = evaluated_model(settings.store, model_id)
    return release(
        *evaluated, settings=as_served_now(settings.serving(evaluated[0])), override=override
    )


def as_served_now(settings: SiteSettings) -> ReleaseSettings:
    """Return release settings with the serving options of the live version."""
    place = read_serving_place(settings.store)
    config = settings.open_repository().read_config()
    if config is not None:
        options = read_options(config)
    else:
        options = ServingOptions(server=place.server) if place else ServingOptions()
    return ReleaseSettings(
        **{each.name: getattr(settings, each.name) for each in fields(SiteSettings)},
        options=options,
    )


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(prog="evergreen release promote", description=__doc__)
    add_site_flags(parser)
    parser.add_argument("--model-id", required=True, help="id of the stored model")
    parser.add_argument(
        "--override",
        type=change_reason,
        required=True,
        metavar="REASON",
        help="reason for the journal",
    )
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Promote the model. After a failure the live version is unchanged."""
    arguments = build_parser().parse_args(argv)
    done = promote_model(site_of(arguments), arguments.model_id, override=arguments.override)
    print(f"version {done.version} is live, model {done.model_id} (was {done.previous_version})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
