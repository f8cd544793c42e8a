"""Make an earlier version live again, on every server and in the journal.

The command is `python -m controller.rollback --store S --reason "..."`, or `evergreen release
rollback`. By default, the target is the version that the live version replaced. If a deployment was
interrupted, the default only withdraws that deployment and keeps the live version. Run the command
again to roll back further. Only the target version stays loaded. Newer versions stay on disk, and a
later release gets a higher number than all of them. A version that is no longer in the repository
is restored from the model registry. Every server must answer. To leave out a server that is gone
permanently, pass the other servers with `--triton-urls`.
"""

import argparse
import logging
from dataclasses import replace
from pathlib import Path

from evergreen.contracts.manifests import Release
from evergreen.registry import promotion_journal
from evergreen.registry.models import read_release
from evergreen.registry.promotion_journal import Promotion
from evergreen.runtime.errors import ContractError, Refused
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.serving.site import (
    Site,
    SiteSettings,
    add_site_flags,
    change_reason,
    opened,
    site_of,
)
from evergreen.serving.switch import make_live

logger = logging.getLogger(__name__)


def rollback(
    settings: SiteSettings,
    *,
    to_version: int | None = None,
    reason: str,
    of: Promotion | None = None,
) -> Promotion:
    """Make an earlier version live, and return its journal entry.

    If a killed deployment only had to be withdrawn, the returned entry is that of the live version.

    Args:
        settings: Deployment target.
        to_version: Version to make live. None = the default, see the module.
        reason: Reason for the journal.
        of: Journal entry of the version to roll back, passed by the controller. That version's
            model is then blocked from automatic releases.

    Raises:
        Refused: the version of `of` is no longer live.
        ContractError: the version does not exist, its graph is corrupt, or no copy of it is left.
        TemporaryError: a server does not answer, or a deployment is running. The live version is
            unchanged.
        PermanentError: a server rejected the version or answered wrongly. The live version is
            unchanged.
    """
    with opened(settings) as site:
        live = site.live
        if live is None:
            raise ContractError(
                f"model registry {settings.store} has no release, expected one to roll back"
            )
        if of is not None and live != of:
            raise Refused(
                f"version {live.version} is live since {live.time}, expected {of.version} since "
                f"{of.time}"
            )
        if site.recovered and of is None and to_version in (None, live.version):
            return live
        target = _target_release(
            site, live, to_version if to_version is not None else _replaced_by(site.store, live)
        )
        line = site.entry(promotion_journal.ROLLBACK, target, reason=reason)
        line = replace(line, blocked_model_id=of.model_id if of else None)
        line = make_live(site, target, line, options=site.repository.options_for(target.version))
        logger.info("rolled back from version %d to %d: %s", live.version, line.version, reason)
        return line


def _replaced_by(store: Path, live: Promotion) -> int:
    """Return the version that was live before the live version's first release.

    Repeated rollbacks therefore reach older and older versions.
    """
    # Read the journal, because a corrupt manifest of the live version must not prevent a rollback.
    lines = promotion_journal.read_journal(store)
    version = next(line.previous_version for line in lines if line.version == live.version)
    if version is None:
        raise ContractError(
            f"version {live.version} is the first release, expected one with a previous version"
        )
    return version


def _target_release(site: Site, live: Promotion, version: int) -> Release:
    if version == live.version:
        raise ContractError(f"version {version} is live already, expected another version")
    released = sorted({entry.version for entry in promotion_journal.read_journal(site.store)})
    if version not in released:
        raise ContractError(f"version {version} was never released, expected one of {released}")
    return read_release(site.store, version)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(prog="evergreen release rollback", description=__doc__)
    add_site_flags(parser)
    parser.add_argument(
        "--to", type=int, help="version to serve; default: the one that the live version replaced"
    )
    parser.add_argument(
        "--reason", type=change_reason, required=True, help="reason for the journal"
    )
    return parser


@exits_with_code
def main(argv: list[str] | None = None) -> int:
    """Roll back. After a failure the live version is unchanged."""
    arguments = build_parser().parse_args(argv)
    entry = rollback(site_of(arguments), to_version=arguments.to, reason=arguments.reason)
    if entry.action == promotion_journal.ROLLBACK and entry.reason == arguments.reason:
        print(f"version {entry.version} is live again (was {entry.previous_version})")
    else:
        print(f"version {entry.version} is live: the interrupted deployment was withdrawn")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
